"""Which model families can run on paged KV: refused by name, before any weight is loaded."""

from __future__ import annotations

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
    "sparse": "its chunked or sparse attention is not supported by the paged backends",
}
FAMILIES = {
    "mla": "deepseek_v2 deepseek_v3 deepseek_v32 minicpm3 kimi_k2 longcat_flash glm4_moe_lite",
    "state": (
        "mamba mamba2 falcon_mamba falcon_h1 jamba zamba zamba2 bamba rwkv recurrent_gemma xlstm "
        "lfm2 lfm2_moe granitemoehybrid qwen3_next qwen3_5 qwen3_5_moe olmo_hybrid nemotron_h "
        "minimax kimi_linear"
    ),
    "sinks": "gpt_oss",
    "shared": "gemma3n gemma3n_text",
    "alibi": "bloom mpt",
    "seq2seq": "t5 mt5 bart mbart pegasus marian whisper",
    "sparse": "llama4 llama4_text doge",
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
    """Positions the model can serve."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if not limit:
        raise ValueError(
            f"model family {text.model_type!r} names no max_position_embeddings; give max_model_len"
        )
    return int(limit)


def _obstacle(config: Any, model_type: str) -> str | None:
    if model_type in REFUSED:
        return REASONS[REFUSED[model_type]]
    if getattr(config, "is_encoder_decoder", False):
        return REASONS["seq2seq"]
    if (
        getattr(config, "vision_config", None) is not None
        or getattr(config, "audio_config", None) is not None
    ):
        return "it is multimodal; only text models are served"
    if getattr(config, "kv_lora_rank", None):
        return REASONS["mla"]
    if getattr(config, "num_kv_shared_layers", 0):
        return REASONS["shared"]
    if getattr(config, "alibi", False):
        return REASONS["alibi"]
    for layer in getattr(config, "layer_types", None) or ():
        if layer not in SUPPORTED_LAYERS:
            return f"it has layers of type {layer!r}"
    return _class_obstacle(config, model_type)


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
