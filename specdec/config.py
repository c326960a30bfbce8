"""EngineConfig and SamplingParams: frozen, validated when built, unknown keys refused by name."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

GREEDY_TEMPERATURE = 1e-5  # below this a request is greedy
BAN_BIAS = -100.0  # a logit_bias at or below this removes the token
MAX_NUM_DRAFT_TOKENS = 64


def build(cls: type[Any], options: Mapping[str, Any]) -> Any:
    """Build a config dataclass from a mapping; an unknown key raises ValueError with the nearest
    known one.
    """
    known = {f.name for f in fields(cls) if f.init}
    for key in options:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = (
                f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"
            )
            raise ValueError(f"{cls.__name__} has no option {key!r}{hint}")
    return cls(**options)


def check_number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    if value < low or value > high or (open_low and value == low):
        left = "above" if open_low else "at least"
        raise ValueError(f"{name} must be {left} {low:g} and at most {high:g}, got {value!r}")


def check_whole(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} must be {limit}, got {value}")


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def _texts(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, bytes) or not hasattr(value, "__iter__"):
        raise ValueError(f"{name} must be a list, got {value!r}")
    return tuple(value)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
        raise ValueError(f"{name} must be a list of token ids, got {value!r}")
    ids = tuple(value)
    for token in ids:
        check_whole(f"{name} entry", token, 0)
    return ids


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Every field holds at each draft position, speculation on or off.

    The distribution is built in this order: allowed_token_ids, bad_words, min_tokens, logit_bias,
    repetition / frequency / presence penalty, temperature, min_p, top_k, top_p. Wrong values raise
    ValueError with the field, the value and the limit.
    """

    n: int = 1  # samples per prompt; sample j uses seed + j
    temperature: float = 1.0  # below 1e-5: greedy, lowest index among equals
    top_k: int = 0  # keep the k largest logits, ties kept; 0 = all
    top_p: float = 1.0  # keep the smallest set with this mass; 1 = all
    min_p: float = 0.0  # keep tokens with p >= min_p * max p; 0 = all
    repetition_penalty: float = 1.0  # over prompt and output; z/r if z > 0 else z*r
    presence_penalty: float = 0.0  # over the output: z - s if the token occurs
    frequency_penalty: float = 0.0  # over the output: z - f * count
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to logits; <= -100 bans
    allowed_token_ids: tuple[int, ...] | None = None  # None = the whole vocabulary
    bad_words: tuple[tuple[int, ...] | str, ...] = ()  # texts, or token id sequences, never emitted
    min_tokens: int = 0  # no end-of-text and no stop token before this many output tokens
    max_tokens: int | None = 256  # None = up to the context's end
    stop: tuple[str, ...] = ()  # stop strings; the text ends before them
    include_stop_text: bool = False  # keep the stop string in the text
    stop_token_ids: tuple[int, ...] = ()  # kept as the last output token
    ignore_eos: bool = False
    seed: int | None = None  # None: 64 random bits, reported with the output
    logprobs: int | None = (
        None  # the target's raw log-probabilities: emitted token + this many best
    )
    prompt_logprobs: int | None = None  # same for each prompt token but the first
    num_draft_tokens: int | None = (
        None  # this request's own lookahead; 0 = no speculation; None = the engine's
    )
    skip_special_tokens: bool = True  # leave special tokens out of the text

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        check_whole("n", self.n, 1, 1024)
        check_number("temperature", self.temperature, 0.0, 1e4)
        if self.top_k == -1:
            put("top_k", 0)
        check_whole("top_k", self.top_k, 0)
        check_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        check_number("presence_penalty", self.presence_penalty, -1e4, 1e4)
        check_number("frequency_penalty", self.frequency_penalty, -1e4, 1e4)
        check_whole("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            check_whole("max_tokens", self.max_tokens, 0)
            if self.min_tokens > self.max_tokens:
                raise ValueError(
                    f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}"
                )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 0, 1024)
        if self.num_draft_tokens is not None:
            check_whole("num_draft_tokens", self.num_draft_tokens, 0, MAX_NUM_DRAFT_TOKENS)
        if self.seed is not None:
            check_whole("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("include_stop_text", "ignore_eos", "skip_special_tokens"):
            _flag(name, getattr(self, name))
        put("stop", (self.stop,) if isinstance(self.stop, str) else _texts("stop", self.stop or ()))
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop must hold non-empty strings, got {text!r}")
        put("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids or ()))
        self._check_token_rules(put)

    def _check_token_rules(self, put: Any) -> None:
        if self.allowed_token_ids is not None:
            put("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise ValueError(
                    "allowed_token_ids is empty: nothing could be emitted; use None for all"
                )
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
        bias = {}
        for token, value in self.logit_bias.items():
            check_whole("logit_bias key", token, 0)
            check_number(f"logit_bias[{token}]", value, -1e4, 1e4)
            bias[token] = float(value)
        put("logit_bias", bias)
        if isinstance(self.bad_words, str):
            raise ValueError(f"bad_words must be a list, got the string {self.bad_words!r}")
        words: list[tuple[int, ...] | str] = []
        for word in _texts("bad_words", self.bad_words or ()):
            if not word:
                raise ValueError("bad_words must not hold an empty entry")
            words.append(word if isinstance(word, str) else _token_ids("bad_words", word))
        put("bad_words", tuple(words))

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE


CPU_LINEARS = ("auto", "fp32", "fp16_weight", "int8_weight", "bf16")
QUANT_BACKENDS = (
    *("auto", "humming", "triton", "dequant", "dense", "aten_int4", "gptqmodel", "auto_gptq"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine needs beside its models. None = chosen by the engine from the models, backend
    and memory.
    """

    num_draft_tokens: int | None = None  # K, the lookahead; 0 = plain decoding, None: by cost
    proposer: str = "auto"  # draft_model with a draft, else ngram; hybrid, none, a plugin's name
    acceptance: str = "rejection"  # the acceptance rule
    attention: str = "auto"
    device: str = "auto"
    dtype: str = "auto"  # auto: float32 on the CPU, the checkpoint's on a GPU
    load_format: str = "auto"  # auto | dummy
    cpu_linear: str = "auto"  # how a CPU keeps weights: fp32 | fp16_weight | int8_weight | bf16
    quant_backend: str = "auto"  # what packed (GPTQ) weights run on, one of QUANT_BACKENDS
    trust_remote_code: bool = False
    block_size: int | None = None  # tokens per KV block, 16..256
    num_blocks: int | None = None  # KV blocks shared by both models
    max_model_len: int | None = None  # tokens per sequence, prompt included
    max_num_seqs: int = 64  # sequences running at once
    max_num_batched_tokens: int = 2048  # tokens of one step, prefill and decode together
    memory_utilization: float = (
        0.9  # share of the device's free memory for weights, KV and workspace
    )
    enable_prefix_caching: bool = True
    cuda_graphs: bool = True  # on CUDA: replay whole decode steps as graphs
    ngram_min: int = 2  # prompt lookup: shortest and longest match
    ngram_max: int = 4
    hybrid_ngram: int = 6  # hybrid: a match of this many tokens comes before the draft model

    def __post_init__(self) -> None:
        if self.num_draft_tokens is not None:
            check_whole("num_draft_tokens", self.num_draft_tokens, 0, MAX_NUM_DRAFT_TOKENS)
        if self.block_size is not None:
            check_whole("block_size", self.block_size, 16, 256)
            if self.block_size & (self.block_size - 1):
                raise ValueError(
                    f"block_size must be 16, 32, 64, 128 or 256, got {self.block_size}"
                )
        for name in ("num_blocks", "max_model_len"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
        check_whole("max_num_seqs", self.max_num_seqs, 1)
        check_whole("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        check_number("memory_utilization", self.memory_utilization, 0.0, 1.0, open_low=True)
        check_whole("ngram_min", self.ngram_min, 1, 64)
        check_whole("ngram_max", self.ngram_max, self.ngram_min, 64)
        check_whole("hybrid_ngram", self.hybrid_ngram, 1, 64)
        for name in ("trust_remote_code", "enable_prefix_caching", "cuda_graphs"):
            _flag(name, getattr(self, name))
        if self.max_model_len == 1:
            raise ValueError("max_model_len is 1, a prompt token and an output token need 2")
        for name in ("proposer", "acceptance", "attention", "device", "dtype"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a string, got {getattr(self, name)!r}")
        if self.cpu_linear not in CPU_LINEARS:
            raise ValueError(
                f"cpu_linear must be one of {', '.join(CPU_LINEARS)}, got {self.cpu_linear!r}"
            )
        if self.quant_backend not in QUANT_BACKENDS:
            raise ValueError(
                f"quant_backend must be one of {', '.join(QUANT_BACKENDS)}, got "
                f"{self.quant_backend!r}"
            )
        if self.load_format not in ("auto", "dummy"):
            raise ValueError(f"load_format must be 'auto' or 'dummy', got {self.load_format!r}")
        # verify K + 1 tokens, and the draft's second first-feed token
        step = (self.num_draft_tokens or 0) + 2
        if self.max_num_batched_tokens < step:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, one sequence's step "
                f"takes {step} "
                f"(num_draft_tokens + 2); raise it or lower num_draft_tokens"
            )
