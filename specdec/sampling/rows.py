"""SamplingRows: the sampling parameters of a step's rows as tensors. A feature that no row uses is None and costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.config import BAN_BIAS, SamplingParams
from specdec.sampling.noise import seed_to_int64

NEVER = -2  # matches no token id and no padding


@dataclass(frozen=True, slots=True)
class RowSource:
    """What one row needs, on the host."""

    params: SamplingParams
    token_ids: Sequence[int]  # prompt + emitted
    num_prompt_tokens: int
    seed: int
    stop_ids: tuple[int, ...]  # banned while fewer than min_tokens are out
    bad_words: tuple[tuple[int, ...], ...]

    @property
    def output_ids(self) -> Sequence[int]:
        return self.token_ids[self.num_prompt_tokens :]


@dataclass(frozen=True, slots=True)
class Entries:
    """A sparse list of (row, token id, value): what to add to single logits."""

    rows: Tensor  # [N] int64
    ids: Tensor  # [N] int64
    values: Tensor  # [N] float32; -inf bans
    until: Tensor  # [N] int64: holds at window positions below this


@dataclass(frozen=True, slots=True)
class AllowedRows:
    """Rows that may only emit some ids."""

    rows: Tensor  # [R] int64
    mask: Tensor  # [R, V] bool


@dataclass(frozen=True, slots=True)
class BadWordRows:
    """One entry per (row, bad word)."""

    rows: Tensor  # [W] int64
    prefix: Tensor  # [W, M] int64, all but the word's last token, right-aligned; -1 = anything
    last: Tensor  # [W] int64
    tail: Tensor  # [W, M] int64, the row's last M committed tokens


@dataclass(frozen=True, slots=True)
class PenaltyRows:
    """Rows with a repetition, presence or frequency penalty. Counts hold committed tokens only."""

    rows: Tensor  # [R] int64
    repetition: Tensor  # [R, 1] float32
    presence: Tensor  # [R, 1] float32
    frequency: Tensor  # [R, 1] float32
    in_prompt: Tensor  # [R, V] bool
    output_counts: Tensor  # [R, V] int64


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters per row; B rows, vocabulary V."""

    all_greedy: bool
    greedy: Tensor  # [B] bool
    seeds: Tensor  # [B] int64
    temperature: Tensor | None  # [B] float32, 1 for greedy rows
    min_p: Tensor | None  # [B] float32, 0 = off
    top_k: Tensor | None  # [B] int64, V = off
    max_top_k: int  # the largest top_k in use
    top_p: Tensor | None  # [B] float32, 1 = off
    allowed: AllowedRows | None
    bad_words: BadWordRows | None
    min_tokens: Entries | None
    bias: Entries | None
    penalties: PenaltyRows | None

    @classmethod
    def build(
        cls, rows: Sequence[RowSource], vocab_size: int, device: torch.device
    ) -> SamplingRows:
        """Gather the rows' parameters. Penalty counts are recounted from the tokens, so nothing can go stale."""
        params = [row.params for row in rows]
        sampled = [not p.greedy for p in params]

        def column(
            value: Callable[[SamplingParams], float], off: float, dtype: torch.dtype
        ) -> Tensor | None:
            values = [value(p) if s else off for p, s in zip(params, sampled, strict=True)]
            if all(v == off for v in values):
                return None
            return torch.tensor(values, dtype=dtype).to(device)

        ks = [p.top_k for p, s in zip(params, sampled, strict=True) if s and 0 < p.top_k < vocab_size]
        return cls(
            all_greedy=not any(sampled),
            greedy=torch.tensor([not s for s in sampled]).to(device),
            seeds=torch.tensor([seed_to_int64(row.seed) for row in rows]).to(device),
            temperature=column(lambda p: p.temperature, 1.0, torch.float32),
            min_p=column(lambda p: p.min_p, 0.0, torch.float32),
            top_k=column(lambda p: min(p.top_k or vocab_size, vocab_size), vocab_size, torch.int64),
            max_top_k=max(ks, default=0),
            top_p=column(lambda p: p.top_p, 1.0, torch.float32),
            allowed=_allowed(rows, vocab_size, device),
            bad_words=_bad_words(rows, vocab_size, device),
            min_tokens=_min_tokens(rows, vocab_size, device),
            bias=_bias(rows, vocab_size, device),
            penalties=_penalties(rows, vocab_size, device),
        )


def _entries(
    found: list[tuple[int, int, float, int]], vocab_size: int, device: torch.device
) -> Entries | None:
    kept = [entry for entry in found if entry[1] < vocab_size]
    if not kept:
        return None
    rows, ids, values, until = zip(*kept, strict=True)
    return Entries(
        torch.tensor(rows).to(device),
        torch.tensor(ids).to(device),
        torch.tensor(values, dtype=torch.float32).to(device),
        torch.tensor(until).to(device),
    )


def _bias(rows: Sequence[RowSource], vocab_size: int, device: torch.device) -> Entries | None:
    always = torch.iinfo(torch.int64).max
    found = [
        (i, token, float("-inf") if value <= BAN_BIAS else value, always)
        for i, row in enumerate(rows)
        for token, value in row.params.logit_bias.items()
    ]
    return _entries(found, vocab_size, device)


def _min_tokens(rows: Sequence[RowSource], vocab_size: int, device: torch.device) -> Entries | None:
    found = []
    for i, row in enumerate(rows):
        missing = row.params.min_tokens - (len(row.token_ids) - row.num_prompt_tokens)
        if missing > 0:
            found += [(i, token, float("-inf"), missing) for token in row.stop_ids]
    return _entries(found, vocab_size, device)


def _allowed(
    rows: Sequence[RowSource], vocab_size: int, device: torch.device
) -> AllowedRows | None:
    using = [i for i, row in enumerate(rows) if row.params.allowed_token_ids is not None]
    if not using:
        return None
    mask = torch.zeros(len(using), vocab_size, dtype=torch.bool)
    for r, i in enumerate(using):
        ids = [t for t in rows[i].params.allowed_token_ids or () if t < vocab_size]
        mask[r, ids] = True
    return AllowedRows(torch.tensor(using).to(device), mask.to(device))


def _bad_words(
    rows: Sequence[RowSource], vocab_size: int, device: torch.device
) -> BadWordRows | None:
    found = [
        (i, word)
        for i, row in enumerate(rows)
        for word in row.bad_words
        if all(token < vocab_size for token in word)
    ]
    if not found:
        return None
    width = max(len(word) for _, word in found) - 1
    prefix = [[-1] * (width - len(word) + 1) + list(word[:-1]) for _, word in found]
    tail = []
    for i, _ in found:
        end = list(rows[i].token_ids[-width:]) if width else []
        tail.append([NEVER] * (width - len(end)) + end)
    return BadWordRows(
        rows=torch.tensor([i for i, _ in found]).to(device),
        prefix=torch.tensor(prefix, dtype=torch.int64).view(len(found), width).to(device),
        last=torch.tensor([word[-1] for _, word in found]).to(device),
        tail=torch.tensor(tail, dtype=torch.int64).view(len(found), width).to(device),
    )


def _penalties(
    rows: Sequence[RowSource], vocab_size: int, device: torch.device
) -> PenaltyRows | None:
    using = [i for i, row in enumerate(rows) if _penalised(row.params)]
    if not using:
        return None
    params = [rows[i].params for i in using]

    def column(name: str) -> Tensor:
        return torch.tensor([[getattr(p, name)] for p in params], dtype=torch.float32).to(device)

    def count(ids: Sequence[int]) -> Tensor:
        return torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=vocab_size)[:vocab_size]

    prompts = [count(rows[i].token_ids[: rows[i].num_prompt_tokens]) > 0 for i in using]
    outputs = [count(rows[i].output_ids) for i in using]
    return PenaltyRows(
        rows=torch.tensor(using).to(device),
        repetition=column("repetition_penalty"),
        presence=column("presence_penalty"),
        frequency=column("frequency_penalty"),
        in_prompt=torch.stack(prompts).to(device),
        output_counts=torch.stack(outputs).to(device),
    )


def _penalised(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )
