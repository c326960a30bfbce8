"""dummy:NAME: models of true geometry with random packed weights, for measurements without a
checkpoint.
"""

from __future__ import annotations

import difflib
from typing import Any

import torch
from transformers import LlamaConfig

from specdec.quant.checkpoint import ModuleSpec
from specdec.quant.config import QuantConfig
from specdec.quant.packing import QuantWeight, num_words

PREFIX = "dummy:"
LLAMA: dict[str, dict[str, Any]] = {
    "llama-2-70b": {
        "vocab_size": 32000,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    "tinyllama-1.1b": {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
    },
    "llama-3.1-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
}
GPTQ = "-gptq"
SETTING = QuantConfig(bits=4, group_size=128)


def dummy_config(name: str) -> tuple[Any, QuantConfig]:
    """The config and quantisation of `dummy:NAME`. Raises ValueError with the known names."""
    known = [PREFIX + shape + GPTQ for shape in LLAMA]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise ValueError(f"no shape {name!r}; {hint}")
    fields = LLAMA[name.removeprefix(PREFIX).removesuffix(GPTQ)]
    return LlamaConfig(**fields, tie_word_embeddings=False), SETTING


def dummy_spec(
    name: str, in_features: int, out_features: int, has_bias: bool, config: QuantConfig
) -> ModuleSpec:
    """What plan_modules gives for a module of a checkpoint of this config."""
    setting = config.for_module(name)
    size = in_features if setting.group_size == -1 else min(setting.group_size, in_features)
    return ModuleSpec(name, setting.bits, size, in_features, out_features, has_bias)


def random_weight(
    spec: ModuleSpec, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> QuantWeight:
    """Uniform codes, symmetric, made on the device; products of unit input have about unit
    deviation.
    """
    shape = (num_words(spec.in_features, spec.bits), spec.out_features)
    words = torch.randint(
        -(1 << 31), 1 << 31, shape, dtype=torch.int32, device=device, generator=generator
    )
    deviation = (((1 << spec.bits) ** 2 - 1) / 12) ** 0.5  # of uniform codes
    scale = 1.0 / (deviation * spec.in_features**0.5)
    scales = torch.full((spec.num_groups, spec.out_features), scale, dtype=dtype, device=device)
    bias = torch.zeros(spec.out_features, dtype=dtype, device=device) if spec.has_bias else None
    return QuantWeight(
        *(spec.bits, spec.group_size, spec.in_features, spec.out_features),
        words=words,
        scales=scales,
        zeros=None,
        perm=None,
        bias=bias,
    )
