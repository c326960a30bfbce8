"""Tiny random models and tokenizers for tests: float32, peaked logits, text that does not get stuck
on one token.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCAB_SIZE = 128
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD, BOS, EOS, UNK = range(4)
BYTE_VOCAB_SIZE = len(SPECIAL) + 256  # from here on tokenizers are byte-level
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
PAIRS = ["th", "er", "on", *(a + b for a, b in product("aeio", ascii_lowercase))]
PAIRS += [a + b for a, b in product(ascii_lowercase, repeat=2) if a + b not in PAIRS]
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,  # tied random weights repeat the last token for ever
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
ALTERNATING = ["sliding_attention", "full_attention"]
GEMMA: dict[str, Any] = {  # a scale that is not head_dim ** -0.5, a window that is soon passed
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "layer_types": ALTERNATING,
}
OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 8, "head_dim": 12},
    "gemma2": {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 8.0},
    "gemma3_text": GEMMA,
    "phi3": {},
}
FAMILIES = tuple(OWN)


def tiny_config(family: str, **overrides: Any) -> PretrainedConfig:
    """The config of a tiny model of `family`, one of FAMILIES; overrides replace single fields."""
    fields = {**COMMON, **OWN[family], **overrides}
    layers = fields["num_hidden_layers"]
    if "layer_types" in fields and "layer_types" not in overrides:
        fields["layer_types"] = [ALTERNATING[i % 2] for i in range(layers)]
    return AutoConfig.for_model(family, **fields)


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random float32 model in eval mode. Attention is eager: sdpa leaves softcaps out."""
    config = tiny_config(family, **overrides)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    randomize(model, seed)
    return model.requires_grad_(False).eval()


@torch.no_grad()
def randomize(model: PreTrainedModel, seed: int) -> None:
    """Draw every parameter anew, norms and biases too, so that none can be left out unseen."""
    generator = torch.Generator().manual_seed(seed)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter is head:
            parameter.copy_(noise * 4.0 / parameter.shape[1] ** 0.5)  # logits of deviation 4
        elif parameter is embedding:
            gemma = model.config.model_type.startswith("gemma")  # multiplies by sqrt(hidden) itself
            parameter.copy_(noise / (parameter.shape[1] ** 0.5 if gemma else 1.0))
        elif parameter.ndim > 1:
            parameter.copy_(noise * 1.5 / parameter.shape[1] ** 0.5)
        else:
            parameter.add_(noise * 0.2)
    model.tie_weights()


def tiny_tokenizer(
    vocab_size: int = VOCAB_SIZE, *, chat_template: str | None = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """A tokenizer of `vocab_size` ids, filled up with pairs of letters. It round-trips printable
    ASCII; from BYTE_VOCAB_SIZE on it is byte-level and round-trips everything.
    """
    byte_level = vocab_size >= BYTE_VOCAB_SIZE
    if byte_level:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    else:
        letters = ["\n", *map(chr, range(32, 127))]
    tokens = [*SPECIAL, *letters]
    if len(tokens) > vocab_size:
        raise ValueError(f"vocab_size {vocab_size} is too small, {len(tokens)} tokens are needed")
    pairs = PAIRS[: vocab_size - len(tokens)]
    vocab = {token: i for i, token in enumerate([*tokens, *pairs])}
    merges = [(pair[0], pair[1]) for pair in pairs]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    if byte_level:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    else:
        backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def save_tiny(model: PreTrainedModel, folder: str | Path, tokenizer: bool = True) -> Path:
    """Write config, safetensors and, if asked, a tokenizer of the model's vocabulary size."""
    folder = Path(folder)
    model.save_pretrained(folder)
    if tokenizer:
        tiny_tokenizer(model.config.vocab_size).save_pretrained(folder)
    return folder
