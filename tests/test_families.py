"""Which families are refused, and the geometry read from the configs of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import FAMILIES, tiny_config
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    LlamaConfig,
    PhimoeForCausalLM,
    Qwen2Config,
)

from specdec.models.families import KVShape, check_family, kv_shape, max_context
from specdec.models.loading import resolve_source

REFUSED = {
    "deepseek_v2": "latent",
    "deepseek_v3": "latent",
    "mamba": "state",
    "mamba2": "state",
    "falcon_mamba": "state",
    "jamba": "state",
    "zamba": "state",
    "rwkv": "state",
    "recurrent_gemma": "state",
    "qwen3_next": "state",
    "bamba": "state",
    "granitemoehybrid": "state",
    "lfm2": "state",
    "gpt_oss": "sinks",
    "gemma3n_text": "share",
    "llama4_text": "chunked",
    "bloom": "ALiBi",
    "mpt": "ALiBi",
    "t5": "encoder-decoder",
    "bart": "encoder-decoder",
    "bert": "encoder",
    "roberta": "encoder",
    "diffllama": "uniform",
    "nemotron": "keywords",
    "gpt_neo": "attention backend",
}


@pytest.mark.parametrize("family", REFUSED)
def test_refused_by_name_and_reason(family: str) -> None:
    with pytest.raises(ValueError, match=f"{family}.*{REFUSED[family]}"):
        check_family(AutoConfig.for_model(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_promised_families_pass(family: str) -> None:
    check_family(tiny_config(family))


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"kv_lora_rank": 8}, "latent"),
        ({"num_kv_shared_layers": 2}, "share"),
        ({"alibi": True}, "ALiBi"),
        ({"v_head_dim": 24}, "uniform"),
        ({"num_key_value_heads": [2, 4]}, "uniform"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"vision_config": {"hidden_size": 8}}, "multimodal"),
    ],
)
def test_unknown_members_are_refused_by_their_fields(fields: dict[str, Any], reason: str) -> None:
    """A family that no list names, known by what its config says; the plain config passes."""
    config = LlamaConfig()
    check_family(config)
    config.__dict__.update(fields)  # past transformers' own type checks
    with pytest.raises(ValueError, match=reason):
        check_family(config)


def test_a_config_without_heads_is_refused() -> None:
    """Some config classes (assistants around another config) name no attention heads at all."""
    config = LlamaConfig()
    config.__dict__["num_attention_heads"] = None
    with pytest.raises(ValueError, match="uniform"):
        check_family(config)


def test_a_foreign_layer_type_is_refused() -> None:
    config = Qwen2Config(num_hidden_layers=2)
    check_family(config)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="'linear_attention'"):
        check_family(config)


def test_a_window_that_the_attention_never_hears_of_is_refused() -> None:
    """Phi-3.5-MoE's modules put the window in the mask only; its checkpoints' window spans all."""
    config = AutoConfig.for_model("phimoe", sliding_window=131072)
    if not PhimoeForCausalLM._supports_attention_backend:
        pytest.skip("transformers 4: the whole family is refused")
    check_family(config)
    config.sliding_window = 64
    with pytest.raises(ValueError, match="window of 64"):
        check_family(config)


def test_refused_before_any_weight(tmp_path: Path) -> None:
    """The folder has no weights at all: the family is what is wrong with it."""
    AutoConfig.for_model("mamba").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'mamba'"):
        resolve_source(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_every_family_of_transformers_is_refused_or_has_a_kv_shape() -> None:
    """No config of the installed transformers leads to another error."""
    accepted = set()
    for config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        try:
            config = config_class()
        except Exception:  # a few need arguments
            continue
        try:
            check_family(config)
        except ValueError:
            continue
        shape = kv_shape(config)
        assert min(shape.num_layers, shape.num_kv_heads, shape.head_dim) > 0, config_class
        assert max_context(config) > 1
        accepted.add(config.model_type)
    assert {"llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "olmo2"} <= accepted


@pytest.mark.parametrize(
    "config, shape",
    [
        (tiny_config("llama"), KVShape(2, 2, 4, 12)),
        (tiny_config("qwen3", num_hidden_layers=3), KVShape(3, 2, 4, 16)),
        (tiny_config("gemma2"), KVShape(2, 2, 4, 16)),
        (tiny_config("phi3", num_key_value_heads=4), KVShape(2, 4, 4, 12)),
        (tiny_config("llama", num_key_value_heads=1), KVShape(2, 1, 4, 12)),
        (AutoConfig.for_model("gpt_bigcode", multi_query=True), KVShape(12, 1, 12, 64)),
        (AutoConfig.for_model("gpt_bigcode", multi_query=False), KVShape(12, 12, 12, 64)),
        (AutoConfig.for_model("gpt2"), KVShape(12, 12, 12, 64)),
    ],
)
def test_kv_shape(config: Any, shape: KVShape) -> None:
    """GQA, MHA, MQA; head_dim given or hidden_size / heads."""
    assert kv_shape(config) == shape


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LONG = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [4.0] * 6}


@pytest.mark.parametrize(
    "family, fields, expected",
    [
        ("llama", {}, 256),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 256),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 256),
        ("qwen2", {"rope_scaling": YARN}, 1024),  # as Qwen2.5's model cards tell to switch it on
        ("qwen2", {"rope_scaling": YARN, "max_position_embeddings": 1024}, 1024),
        ("phi3", {"rope_scaling": LONG, "original_max_position_embeddings": 64}, 64),
        ("gemma3_text", {}, 256),  # rotary settings per layer type
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_max_context(family: str, fields: dict[str, Any], expected: int) -> None:
    assert max_context(tiny_config(family, **fields)) == expected


def test_a_config_without_positions_is_named() -> None:
    config = LlamaConfig()
    config.__dict__["max_position_embeddings"] = None
    with pytest.raises(ValueError, match="'llama' names no max_position_embeddings"):
        max_context(config)
