"""From raw logits to the distribution a request asked for, exact at every window position."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.sampling.rows import BadWordRows, Entries, PenaltyRows, SamplingRows

NEG_INF = float("-inf")


def process_logits(
    logits: Tensor, rows: SamplingRows, draft_token_ids: Tensor, offset: int
) -> Tensor:
    """Apply each row's rules to logits [B, S, V]; returns float32 [B, S, V], the input is left alone.

    Row s is window position offset + s; its context is the committed tokens and draft_token_ids[:, : offset + s]
    ([B, D] int64, -1 = padding). Order: allowed ids, bad words, min_tokens, logit_bias, penalties, temperature, min_p,
    top_k, top_p. Greedy rows skip what cannot move their argmax.
    """
    z = logits.to(torch.float32, copy=True) if _changes_logits(rows) else logits.float()
    if rows.allowed is not None:
        allowed = rows.allowed
        z[allowed.rows] = z[allowed.rows].masked_fill(~allowed.mask[:, None], NEG_INF)
    if rows.bad_words is not None:
        _ban_bad_words(z, rows.bad_words, draft_token_ids, offset)
    if rows.min_tokens is not None:
        _add(z, rows.min_tokens, offset)
    if rows.bias is not None:
        _add(z, rows.bias, offset)
    if rows.penalties is not None:
        _penalise(z, rows.penalties, draft_token_ids, offset)
    if rows.temperature is not None:
        z = z / rows.temperature[:, None, None]
    return _truncate(z, rows)


def to_probs(processed: Tensor, rows: SamplingRows) -> Tensor:
    """Softmax of processed logits [B, S, V] in float32; greedy rows are exactly one-hot at the lowest-index argmax."""
    probs = torch.softmax(processed.float(), dim=-1)
    one_hot = torch.zeros_like(probs).scatter_(-1, argmax_lowest(processed)[..., None], 1.0)
    return torch.where(rows.greedy[:, None, None], one_hot, probs)


def invalid_rows(logits: Tensor) -> Tensor:
    """[B, S] bool for logits [B, S, V]: NaN or +inf somewhere, or nothing but -inf."""
    top = logits.amax(dim=-1)  # NaN wins in amax
    return ~torch.isfinite(top)


def align_vocab(logits: Tensor, vocab_size: int) -> Tensor:
    """Logits [..., V_draft] as [..., vocab_size]: ids the model lacks get -inf, ids the target lacks are cut."""
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[..., :vocab_size]
    return torch.nn.functional.pad(logits, (0, missing), value=NEG_INF)


def raw_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """log_softmax of raw logits [N, V]: at token_ids [N] -> [N]; best ids [N, num_top] and their values, best first."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    top, top_ids = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    return logprobs.gather(-1, token_ids[:, None])[:, 0], top_ids, top


def argmax_lowest(logits: Tensor) -> Tensor:
    """Argmax over the last dimension, the lowest index among equals on every device."""
    top = logits.amax(dim=-1, keepdim=True)
    return (logits == top).to(torch.uint8).argmax(dim=-1)


def _changes_logits(rows: SamplingRows) -> bool:
    in_place = (rows.allowed, rows.bad_words, rows.min_tokens, rows.bias, rows.penalties)
    return any(feature is not None for feature in in_place)


def _add(z: Tensor, entries: Entries, offset: int) -> None:
    """z[row, s, id] += value at window positions below the entry's `until`."""
    positions = torch.arange(z.shape[1], device=z.device) + offset
    active = positions < entries.until[:, None]  # [N, S]
    values = torch.where(active, entries.values[:, None], 0.0)
    index = (entries.rows[:, None], torch.arange(z.shape[1], device=z.device), entries.ids[:, None])
    z.index_put_(index, values, accumulate=True)


def _ban_bad_words(z: Tensor, words: BadWordRows, draft_token_ids: Tensor, offset: int) -> None:
    """Ban the last token of each bad word whose other tokens end the context of that position."""
    width = words.prefix.shape[1]
    context = torch.cat((words.tail, draft_token_ids[words.rows]), dim=1)  # [W, M + D]
    for s in range(z.shape[1]):
        end = context[:, offset + s : offset + s + width]  # the last M tokens before position offset + s
        match = ((end == words.prefix) | (words.prefix == -1)).all(dim=1)
        ban = torch.where(match, NEG_INF, 0.0)
        index = (words.rows, torch.full_like(words.rows, s), words.last)
        z.index_put_(index, ban, accumulate=True)


def _penalise(z: Tensor, penalty: PenaltyRows, draft_token_ids: Tensor, offset: int) -> None:
    """Penalise position by position, counting the drafts before each."""
    drafts = draft_token_ids[penalty.rows]
    counts = penalty.output_counts.clone()  # [R, V]
    for i in range(offset):
        _count(counts, drafts[:, i])
    for s in range(z.shape[1]):
        if s:
            _count(counts, drafts[:, offset + s - 1])
        row = z[penalty.rows, s]
        seen = penalty.in_prompt | (counts > 0)
        scaled = torch.where(row > 0, row / penalty.repetition, row * penalty.repetition)
        row = torch.where(seen, scaled, row)
        row = row - penalty.frequency * counts - penalty.presence * (counts > 0)
        z[penalty.rows, s] = row


def _count(counts: Tensor, token_ids: Tensor) -> None:
    """Add one at each row's token; -1 adds nothing."""
    ids = token_ids.clamp(0, counts.shape[1] - 1)[:, None]
    counts.scatter_add_(1, ids, (token_ids >= 0).to(counts.dtype)[:, None])


def _truncate(z: Tensor, rows: SamplingRows) -> Tensor:
    if rows.min_p is not None:
        floor = z.amax(dim=-1, keepdim=True) + torch.log(rows.min_p)[:, None, None]
        z = z.masked_fill(z < floor, NEG_INF)
    if rows.top_k is not None:
        best = z.topk(rows.max_top_k, dim=-1).values  # [B, S, max_top_k]
        at = (rows.top_k.clamp(max=rows.max_top_k) - 1)[:, None, None].expand(*z.shape[:2], 1)
        off = (rows.top_k > rows.max_top_k)[:, None, None]
        floor = torch.where(off, NEG_INF, best.gather(-1, at))
        z = z.masked_fill(z < floor, NEG_INF)
    if rows.top_p is not None:
        values, _ = z.sort(dim=-1)
        below = torch.softmax(values, dim=-1).cumsum(dim=-1) <= (1.0 - rows.top_p)[:, None, None]
        below[..., -1] = False
        first = (~below).to(torch.uint8).argmax(dim=-1, keepdim=True)
        off = (rows.top_p >= 1.0)[:, None, None]
        z = z.masked_fill(z < torch.where(off, NEG_INF, values.gather(-1, first)), NEG_INF)
    return z
