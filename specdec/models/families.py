"""Which model families can run on paged KV: refused by name, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

REASONS = {
    "state": (
        "it keeps a recurrent or convolutional state, which cannot be rewound by lowering a counter"
    ),
    "mla": "multi-head latent attention keeps a compressed cache that this pool does not hold",
    "sinks": "its attention sinks are not supported by the paged backends",
    "shared": "its layers share K/V with each other, which this pool does not hold",
    "alibi": "its position bias (ALiBi or relative) is not supported by the paged backends",
    "seq2seq": "it is an encoder-decoder model",
    "encoder": "it is an encoder: its tokens attend to later ones, so it does not generate text",
    "keywords": "its transformers modules pass no keywords on to the attention function",
    "geometry": "its attention layers do not keep one uniform K and V per layer",
    "sparse": "its chunked or sparse attention is not supported by the paged backends",
}
FAMILIES = {
    "mla": "deepseek_v2 deepseek_v3 deepseek_v32 minicpm3 kimi_k2 longcat_flash glm4_moe_lite",
    # Found by comparing each family's paged logits with its plain ones on tiny random models.
    "encoder": (
        "bert bert-generation camembert data2vec-text electra ernie megatron-bert rembert roberta "
        "roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod big_bird"
    ),
    "geometry": "diffllama jetmoe hrm_text",
    "keywords": "nemotron",
    "state": (
        "mamba mamba2 falcon_mamba falcon_h1 jamba zamba zamba2 bamba rwkv recurrent_gemma xlstm "
        "lfm2 lfm2_moe granitemoehybrid qwen3_next qwen3_5 qwen3_5_moe olmo_hybrid nemotron_h "
        "minimax kimi_linear"
    ),
    "sinks": "gpt_oss flint granite_swa granitemoe_swa mimo_v2_flash",
    "shared": "gemma3n gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text dory",
    "alibi": "bloom mpt",
    "seq2seq": "t5 mt5 bart mbart pegasus marian whisper",
    "sparse": "llama4 llama4_text doge minimax_m3_vl_text",
}
REFUSED = {name: reason for reason, names in FAMILIES.items() for name in names.split()}
SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class KVShape:
    """Attention geometry of a model."""

    num_layers: int
    num_kv_heads: int
    num_heads: int
    head_dim: int


def check_family(config: Any) -> None:
    """Raise ValueError, naming family and reason, for a model that cannot run here."""
    model_type = str(getattr(config, "model_type", "") or "unknown")
    reason = _obstacle(config, model_type)
    if reason:
        raise ValueError(
            f"model family {model_type!r} cannot run on paged KV: {reason}; use another model"
        )


def kv_shape(config: Any) -> KVShape:
    """Layers, heads and head size, for MHA, GQA and MQA configs."""
    text = config.get_text_config()
    num_heads = int(text.num_attention_heads)
    num_kv_heads = getattr(text, "num_key_value_heads", None)
    if num_kv_heads is None:
        num_kv_heads = 1 if getattr(text, "multi_query", False) else num_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // num_heads
    return KVShape(int(text.num_hidden_layers), int(num_kv_heads), num_heads, int(head_dim))


def max_context(config: Any) -> int:
    """Positions the model can serve, rotary scaling included.

    YaRN reaches original length x factor, also where max_position_embeddings was left as it was.
    LongRoPE switches to other frequencies past its original length, for a whole batch at once: the
    KV kept so far, and the other rows, would then be rotated wrongly, so it is served up to there.
    """
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if not limit:
        raise ValueError(
            f"model family {text.model_type!r} names no max_position_embeddings; use another model"
        )
    limits = {int(limit)}
    for rope in _ropes(text):
        kind = rope.get("rope_type") or rope.get("type")
        own = getattr(text, "original_max_position_embeddings", None)
        original = rope.get("original_max_position_embeddings") or own
        if kind == "yarn" and original and rope.get("factor"):
            limits = {max(int(limit), int(original * rope["factor"]))}
        elif kind in ("longrope", "su") and original:
            limits.add(int(original))
    return min(limits)


def _ropes(text: Any) -> list[Mapping[str, Any]]:
    """The rotary settings: none, one for all layers, or one per layer type."""
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    return nested or [rope]


def _obstacle(config: Any, model_type: str) -> str | None:
    if model_type in REFUSED:
        return REASONS[REFUSED[model_type]]
    if getattr(config, "is_encoder_decoder", False):
        return REASONS["seq2seq"]
    if config.get_text_config() is not config or any(
        getattr(config, name, None) is not None for name in ("vision_config", "audio_config")
    ):
        return "it is multimodal; only text models are served"
    try:
        reason = _layer_obstacle(config) or _class_obstacle(config, model_type)
        if reason is None:
            kv_shape(config)
    except (RuntimeError, AttributeError, TypeError, ValueError):
        # A field that differs from layer to layer (transformers >= 5.20), or is not there at all.
        return REASONS["geometry"]
    return reason


def _layer_obstacle(config: Any) -> str | None:
    if getattr(config, "kv_lora_rank", None):
        return REASONS["mla"]
    if getattr(config, "num_kv_shared_layers", 0):
        return REASONS["shared"]
    if getattr(config, "alibi", False):
        return REASONS["alibi"]
    for layer in getattr(config, "layer_types", None) or ():
        if layer not in SUPPORTED_LAYERS:
            return f"it has layers of type {layer!r}"
    window = getattr(config, "sliding_window", None)
    if config.model_type == "phimoe" and window and window < config.max_position_embeddings:
        return f"its modules keep the sliding window of {window} from the attention function"
    heads = getattr(config, "num_key_value_heads", None)
    value_dim = getattr(config, "v_head_dim", None)
    if isinstance(heads, list | tuple) or (value_dim and value_dim != kv_shape(config).head_dim):
        return REASONS["geometry"]
    return None


def _class_obstacle(config: Any, model_type: str) -> str | None:
    if getattr(config, "auto_map", None) and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None  # remote code: its class is not known before it is trusted
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "transformers knows no causal language model of this type"
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    if not getattr(model_class, "_supports_attention_backend", False):
        return "its transformers modules do not take an attention backend"
    return None
