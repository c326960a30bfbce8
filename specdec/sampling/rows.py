"""SamplingRows: the sampling parameters of a step's rows as tensors.

A feature that no row uses is None and costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specdec.config import BAN_BIAS, SamplingParams
from specdec.sampling.noise import seed_to_int64

_ALWAYS = 2**62  # a ban that never ends
_MAX_TOPK = 1024  # a larger top_k costs as much as ordering the whole vocabulary


@dataclass(slots=True)
class RowSource:
    """What one row needs, on the host; made once for a sequence, whose `token_ids` grow."""

    params: SamplingParams
    token_ids: Sequence[int]  # prompt + emitted
    num_prompt_tokens: int
    seed: int  # 64 bits
    stop_ids: tuple[int, ...]  # banned while fewer than min_tokens are out
    bad_words: tuple[tuple[int, ...], ...]  # token ids
    greedy: bool = field(init=False)
    signed_seed: int = field(init=False)
    has_rules: bool = field(init=False)  # more than temperature

    def __post_init__(self) -> None:
        params = self.params
        self.greedy = params.greedy
        self.signed_seed = seed_to_int64(self.seed)
        truncates = params.top_k or params.top_p < 1.0 or params.min_p
        edits = params.allowed_token_ids is not None or params.min_tokens or params.logit_bias
        self.has_rules = bool(truncates or edits or self.bad_words or _penalises(params))


@dataclass(frozen=True, slots=True)
class Allowed:
    """allowed_token_ids of the rows that have them."""

    rows: Tensor  # [R] int64
    banned: Tensor  # [R, V] bool


@dataclass(frozen=True, slots=True)
class Bans:
    """Bad words, min_tokens, and logit_bias entries that remove a token.

    Row rows[i] may not emit ids[i] at a window position below until[i] if the tokens before
    that position end with prefixes[i].
    """

    rows: Tensor  # [N] int64
    ids: Tensor  # [N] int64
    until: Tensor  # [N] int64
    prefixes: Tensor  # [N, L] int64, -1 = any token, on the left
    tails: Tensor  # [B, L] int64, the last committed tokens, -1 before the first


@dataclass(frozen=True, slots=True)
class Biases:
    """Other logit_bias entries."""

    rows: Tensor  # [N] int64
    ids: Tensor  # [N] int64
    values: Tensor  # [N] float32


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalty factors per row, and the committed tokens of the rows that have any."""

    repetition: Tensor  # [B, 1, 1] float32, 1 = off
    frequency: Tensor  # [B, 1, 1] float32, 0 = off
    presence: Tensor  # [B, 1, 1] float32, 0 = off
    rows: Tensor  # [N] int64
    ids: Tensor  # [N] int64, each token of prompt and output once per row
    keys: Tensor  # [N + 1] int64, row * V + id, ascending; the last one is above all
    counts: Tensor  # [N + 1] float32, occurrences in the output


@dataclass(frozen=True, slots=True)
class Truncation:
    """top_k and top_p of rows whose cut lies among the `width` largest logits."""

    rows: Tensor | None  # [R] int64; None = all rows
    width: int
    top_k: Tensor  # [R, 1] int64, at most width
    removed_mass: Tensor | None  # [R, 1, 1] float32, 1 - top_p, -1 = off; None = off for all


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of B rows; neutral values for rows without the feature and for greedy rows."""

    all_greedy: bool
    any_greedy: bool
    greedy: Tensor  # [B] bool
    seeds: Tensor  # [B] int64, the bits of the 64-bit seeds
    allowed: Allowed | None
    bans: Bans | None
    biases: Biases | None
    penalties: Penalties | None
    temperature: Tensor | None  # [B, 1, 1] float32
    log_min_p: Tensor | None  # [B, 1, 1] float32, -inf = off
    truncations: tuple[Truncation, ...]

    @classmethod
    def build(
        cls, rows: Sequence[RowSource], vocab_size: int, device: torch.device | str
    ) -> SamplingRows:
        """Gather the rows' parameters; rule entries at or above vocab_size are ignored.

        Nothing is carried from step to step: penalty counts come from token_ids each time, so
        they hold committed tokens only. Rows without allowed_token_ids cost nothing that grows
        with the vocabulary. Raises ValueError for a seed of more than 64 bits.
        """
        greedy = [row.greedy for row in rows]
        temperature = [1.0 if row.greedy else row.params.temperature for row in rows]
        divides = any(t != 1.0 for t in temperature)
        rules = any(row.has_rules for row in rows)
        sampled = [None if row.greedy else row.params for row in rows] if rules else []
        return cls(
            all_greedy=all(greedy),
            any_greedy=any(greedy),
            greedy=torch.tensor(greedy, dtype=torch.bool).to(device),
            seeds=_ints([row.signed_seed for row in rows], device),
            allowed=_allowed(rows, vocab_size, device) if rules else None,
            bans=_bans(rows, vocab_size, device) if rules else None,
            biases=_biases(rows, vocab_size, device) if rules else None,
            penalties=_penalties(rows, vocab_size, device) if rules else None,
            temperature=_floats(temperature, device)[:, None, None] if divides else None,
            log_min_p=_log_min_p(sampled, device),
            truncations=_truncations(sampled, vocab_size, device),
        )


def _ints(values: Iterable[int], device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.fromiter(values, np.int64)).to(device)


def _floats(values: Iterable[float], device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.fromiter(values, np.float32)).to(device)


def _allowed(
    rows: Sequence[RowSource], vocab_size: int, device: torch.device | str
) -> Allowed | None:
    using = [i for i, row in enumerate(rows) if row.params.allowed_token_ids is not None]
    if not using:
        return None
    banned = torch.ones(len(using), vocab_size, dtype=torch.bool)
    for r, i in enumerate(using):
        ids = rows[i].params.allowed_token_ids or ()
        banned[r, [t for t in ids if t < vocab_size]] = False
    return Allowed(_ints(using, device), banned.to(device))


def _bans(rows: Sequence[RowSource], vocab_size: int, device: torch.device | str) -> Bans | None:
    found: list[tuple[int, int, int, tuple[int, ...]]] = []  # row, id, until, prefix
    for i, row in enumerate(rows):
        found += [(i, word[-1], _ALWAYS, word[:-1]) for word in row.bad_words if word]
        missing = row.params.min_tokens - (len(row.token_ids) - row.num_prompt_tokens)
        if missing > 0:
            found += [(i, token, missing, ()) for token in row.stop_ids]
        bias = row.params.logit_bias
        found += [(i, token, _ALWAYS, ()) for token, value in bias.items() if value <= BAN_BIAS]
    found = [entry for entry in found if entry[1] < vocab_size]
    if not found:
        return None
    width = max(len(entry[3]) for entry in found)
    tails = []
    for row in rows:
        tail = list(row.token_ids[max(0, len(row.token_ids) - width) :])
        tails.append([-1] * (width - len(tail)) + tail)
    prefixes = [[-1] * (width - len(entry[3])) + list(entry[3]) for entry in found]
    return Bans(
        rows=_ints((entry[0] for entry in found), device),
        ids=_ints((entry[1] for entry in found), device),
        until=_ints((entry[2] for entry in found), device),
        prefixes=torch.tensor(prefixes, dtype=torch.int64).view(len(found), width).to(device),
        tails=torch.tensor(tails, dtype=torch.int64).view(len(rows), width).to(device),
    )


def _biases(
    rows: Sequence[RowSource], vocab_size: int, device: torch.device | str
) -> Biases | None:
    found = [
        (i, token, value)
        for i, row in enumerate(rows)
        for token, value in row.params.logit_bias.items()
        if value > BAN_BIAS and token < vocab_size
    ]
    if not found:
        return None
    indices, ids, values = zip(*found, strict=True)
    return Biases(_ints(indices, device), _ints(ids, device), _floats(values, device))


def _penalises(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
    )


def _penalties(
    rows: Sequence[RowSource], vocab_size: int, device: torch.device | str
) -> Penalties | None:
    using = [i for i, row in enumerate(rows) if _penalises(row.params)]
    if not using:
        return None
    keys, counts = [], []
    for i in using:
        tokens = np.array(rows[i].token_ids, dtype=np.int64)
        ids, places = np.unique(tokens, return_inverse=True)
        known = ids < vocab_size
        keys.append(i * vocab_size + ids[known])
        in_output = np.bincount(places[rows[i].num_prompt_tokens :], minlength=len(ids))
        counts.append(in_output[known])
    keys.append(np.array([len(rows) * vocab_size]))
    counts.append(np.zeros(1, dtype=np.int64))
    key = torch.from_numpy(np.concatenate(keys)).to(device)

    def factor(name: str) -> Tensor:
        return _floats((getattr(row.params, name) for row in rows), device)[:, None, None]

    return Penalties(
        repetition=factor("repetition_penalty"),
        frequency=factor("frequency_penalty"),
        presence=factor("presence_penalty"),
        rows=key[:-1] // vocab_size,
        ids=key[:-1] % vocab_size,
        keys=key,
        counts=torch.from_numpy(np.concatenate(counts)).float().to(device),
    )


def _log_min_p(
    sampled: Sequence[SamplingParams | None], device: torch.device | str
) -> Tensor | None:
    min_p = [0.0 if params is None else params.min_p for params in sampled]
    if not any(min_p):
        return None
    logs = torch.tensor(min_p, dtype=torch.float64).log().float()
    return logs.to(device)[:, None, None]


def _truncations(
    sampled: Sequence[SamplingParams | None], vocab_size: int, device: torch.device | str
) -> tuple[Truncation, ...]:
    """Rows of a small top_k need that many logits; top_p alone, or a large top_k, needs all."""
    narrow: list[tuple[int, int, float]] = []  # row, top_k, top_p
    whole: list[tuple[int, int, float]] = []
    for i, params in enumerate(sampled):
        if params is None:
            continue
        top_k = min(params.top_k or vocab_size, vocab_size)
        if top_k == vocab_size and params.top_p == 1.0:
            continue
        (narrow if top_k <= _MAX_TOPK else whole).append((i, top_k, params.top_p))
    groups = []
    for group in filter(None, (narrow, whole)):
        indices, top_ks, top_ps = zip(*group, strict=True)
        removed = _floats((-1.0 if p == 1.0 else 1.0 - p for p in top_ps), device)
        groups.append(
            Truncation(
                rows=None if len(group) == len(sampled) else _ints(indices, device),
                width=max(top_ks),
                top_k=_ints(top_ks, device)[:, None],
                removed_mass=removed[:, None, None] if min(top_ps) < 1.0 else None,
            )
        )
    return tuple(groups)
