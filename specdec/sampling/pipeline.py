"""Logits to distributions: a request's own rules at every draft position, the same for p and q.

Order: allowed ids, bad words, min_tokens, logit_bias, repetition / frequency / presence penalty,
temperature, min_p, top_k, top_p. Tensors only, no host synchronisation, inputs never mutated.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specdec.sampling.rows import Allowed, Bans, Biases, Penalties, SamplingRows, Truncation

_REMOVED = -float("inf")


def process_logits(
    logits: Tensor, rows: SamplingRows, draft_token_ids: Tensor, offset: int
) -> Tensor:
    """Apply the rows' sampling parameters.

    logits [B, S, V] float: row s is window position offset + s, whose context is the committed
    tokens and draft_token_ids[:, :offset + s]. draft_token_ids [B, D] int64, -1 = padding,
    D >= offset + S - 1. Returns [B, S, V] float32, -inf for removed tokens; without a rule in use
    it is the input itself. Temperature and truncation leave greedy rows alone. A row of which
    nothing is left is all -inf: see invalid_rows.
    """
    edits = any((rows.allowed, rows.bans, rows.biases, rows.penalties))
    out = logits.to(torch.float32, copy=edits, memory_format=torch.contiguous_format)
    drafts = draft_token_ids[:, : offset + logits.shape[1] - 1]
    if rows.allowed is not None:
        _apply_allowed(out, rows.allowed)
    if rows.bans is not None:
        _apply_bans(out, rows.bans, drafts, offset)
    if rows.biases is not None:
        _apply_biases(out, rows.biases)
    if rows.penalties is not None:
        _apply_penalties(out, rows.penalties, drafts, offset)
    if rows.temperature is not None:
        out = out / rows.temperature
    if rows.log_min_p is not None:
        below_best = out - out.amax(dim=-1, keepdim=True)  # log of p(x) / max p
        out = out.masked_fill(below_best < rows.log_min_p, _REMOVED)
    for group in rows.truncations:
        if group.rows is None:
            out = _truncate(out, group)
        else:
            out = out.index_copy(0, group.rows, _truncate(out[group.rows], group))
    return out


def to_probs(processed: Tensor, rows: SamplingRows) -> Tensor:
    """Processed logits [B, S, V] float32 -> distributions [B, S, V] float32.

    Softmax for sampled rows; for greedy rows exactly one-hot at the lowest-index argmax.
    """
    if not rows.any_greedy:
        return processed.softmax(dim=-1)
    best = argmax_lowest(processed)[..., None]
    one_hot = torch.zeros_like(processed).scatter_(-1, best, 1.0)
    if rows.all_greedy:
        return one_hot
    return torch.where(rows.greedy[:, None, None], one_hot, processed.softmax(dim=-1))


def invalid_rows(logits: Tensor) -> Tensor:
    """Raw or processed logits [..., V] -> [...] bool: NaN or +inf anywhere, or all -inf."""
    return ~logits.amax(dim=-1).isfinite()  # NaN wins every maximum


def argmax_lowest(logits: Tensor) -> Tensor:
    """Logits [..., V] -> [...] int64: index of the largest value, the lowest among equals."""
    return logits.argmax(dim=-1)  # torch documents the first index


def align_vocab(logits: Tensor, vocab_size: int, token_map: Tensor | None = None) -> Tensor:
    """Logits [..., V'] -> [..., vocab_size]: logit i is that of token_map[i] [V'] int64, or of id
    i. Ids without one get -inf.
    """
    if token_map is not None:
        whole = logits.new_full((*logits.shape[:-1], vocab_size), _REMOVED)
        return whole.index_copy_(-1, token_map.to(logits.device), logits)
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[..., :vocab_size]
    return torch.nn.functional.pad(logits, (0, missing), value=_REMOVED)


def raw_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities before any sampling parameter.

    logits [N, V], token_ids [N] int64 -> (logprobs [N] float32, top_ids [N, n] int64,
    top_logprobs [N, n] float32, best first) with n = min(num_top, V).
    """
    logprobs = logits.float().log_softmax(dim=-1)
    own = logprobs.gather(-1, token_ids[:, None])[:, 0]
    top = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    return own, top.indices, top.values


def _flat_index(rows: Tensor, ids: Tensor, shape: torch.Size) -> Tensor:
    """Entries (row, id) [N] at every position: indices [N, S] into the flattened [B, S, V]."""
    positions = torch.arange(shape[1], device=rows.device)
    return (rows[:, None] * shape[1] + positions) * shape[2] + ids[:, None]


def _apply_allowed(out: Tensor, allowed: Allowed) -> None:
    kept = out[allowed.rows].masked_fill_(allowed.banned[:, None], _REMOVED)
    out.index_copy_(0, allowed.rows, kept)


def _apply_bans(out: Tensor, bans: Bans, drafts: Tensor, offset: int) -> None:
    positions = torch.arange(offset, offset + out.shape[1], device=out.device)
    active = positions < bans.until[:, None]  # [N, S]
    width = bans.prefixes.shape[1]
    if width:
        context = torch.cat((bans.tails, drafts), dim=1)  # [B, L + offset + S - 1]
        before = context.unfold(1, width, 1)[:, offset:]  # [B, S, L]
        wanted = bans.prefixes[:, None]  # [N, 1, L]
        active = active & ((before[bans.rows] == wanted) | (wanted < 0)).all(dim=-1)
    # A minimum: several bans may name one token, and min(z, inf) = z bit for bit.
    limits = torch.where(active, _REMOVED, -_REMOVED)
    index = _flat_index(bans.rows, bans.ids, out.shape)
    out.view(-1).scatter_reduce_(0, index.view(-1), limits.view(-1), "amin")


def _apply_biases(out: Tensor, biases: Biases) -> None:
    index = _flat_index(biases.rows, biases.ids, out.shape)
    flat = out.view(-1)
    flat[index] = flat[index] + biases.values[:, None]


def _penalise(z: Tensor, counts: Tensor, factors: list[Tensor]) -> Tensor:
    """Seen tokens: z / r if z > 0 else z * r, then - f * count - s * [count > 0]."""
    repetition, frequency, presence = factors
    scaled = torch.where(z > 0, z / repetition, z * repetition)
    return scaled - frequency * counts - presence * (counts > 0)


def _apply_penalties(out: Tensor, penalties: Penalties, drafts: Tensor, offset: int) -> None:
    """Only tokens of the context change: the committed ones, then the drafts before s."""
    num_rows, num_positions, vocab_size = out.shape
    factors = [penalties.repetition, penalties.frequency, penalties.presence]
    ids = drafts.clamp(0, vocab_size - 1)  # [B, D]
    touched = ids[:, None].expand(-1, num_positions, -1)  # [B, S, D]
    z = out.gather(2, touched)

    index = _flat_index(penalties.rows, penalties.ids, out.shape)  # [N, S]
    own = [factor[penalties.rows, 0] for factor in factors]
    flat = out.view(-1)
    flat[index] = _penalise(flat[index], penalties.counts[:-1, None], own)

    keys = torch.arange(num_rows, device=out.device)[:, None] * vocab_size + ids
    at = torch.searchsorted(penalties.keys, keys)  # [B, D]
    committed = penalties.keys[at] == keys
    counts = torch.where(committed, penalties.counts[at], 0.0)[:, None]  # [B, 1, D]
    # repeats[b, s, m]: how often draft m stands among the offset + s drafts before position s.
    positions = torch.arange(offset, offset + num_positions, device=out.device)
    before = torch.arange(ids.shape[1], device=out.device) < positions[:, None]  # [S, D]
    same = ids[:, :, None] == drafts[:, None]  # [B, D, D]; padding equals nothing
    repeats = (same[:, None] & before[:, None]).sum(dim=-1)
    # Each value is right for its token at its position, drafted before or not, so tokens that
    # occur twice, also those that stand for padding, are written twice alike.
    seen = committed[:, None] | (repeats > 0)
    out.scatter_(2, touched, torch.where(seen, _penalise(z, counts + repeats, factors), z))


def _truncate(z: Tensor, group: Truncation) -> Tensor:
    """top_k, then top_p, on z [R, S, V].

    Both cut by value, so logits equal to the k-th all stay. top_p removes tokens in ascending
    order, equal ones by ascending id, while their cumulative probability is <= 1 - top_p.
    """
    largest = _largest(z, group.width)  # [R, S, C]
    kth = group.width - group.top_k[:, None].expand(-1, z.shape[1], -1)
    floor = largest.gather(-1, kth)
    if group.removed_mass is None:
        return z.masked_fill(z < floor, _REMOVED)
    cut, num_equal = _top_p_cut(z, largest, floor, group.removed_mass)
    at_cut = z == cut
    rank = at_cut.cumsum(dim=-1, dtype=torch.int32)
    return z.masked_fill((z < cut) | (at_cut & (rank <= num_equal)), _REMOVED)


def _top_p_cut(
    z: Tensor, largest: Tensor, floor: Tensor, removed_mass: Tensor
) -> tuple[Tensor, Tensor]:
    """The smallest logit that stays, and how many tokens of just this logit go, [R, S, 1] each.

    Masses are summed in float64 and compared in float32.
    """
    complete = largest.shape[-1] == z.shape[-1]
    ascending = largest.masked_fill(largest < floor, _REMOVED)
    weights = (ascending - ascending[..., -1:]).exp()
    total = weights.sum(dim=-1, keepdim=True)
    # Tokens equal to the k-th largest that are not among the C largest; they go first.
    spare = torch.zeros_like(total, dtype=torch.int64)
    if not complete:
        spare = (z >= floor).sum(dim=-1, keepdim=True)
        spare = spare - (ascending >= floor).sum(dim=-1, keepdim=True)
        total = total + spare * weights[..., :1]
    probs = (weights / total).double()
    lowest = probs[..., :1]
    removed = (probs.cumsum(dim=-1) + spare * lowest).float() <= removed_mass
    removed[..., -1] = False  # at least one stays
    cut = ascending.gather(-1, removed.sum(dim=-1, keepdim=True)).maximum(floor)
    num_equal = (removed & (ascending == cut)).sum(dim=-1, keepdim=True)
    if not complete:
        # Of the spare ones as many as their mass n * p stays within the limit.
        n = (removed_mass / lowest.float()).round().clamp(0, 2.0**31).double()
        n = torch.where((n * lowest).float() <= removed_mass, n, n - 1).clamp(min=0)
        num_equal = num_equal + torch.where(cut == floor, n.long().minimum(spare), 0)
    return cut, num_equal


def _largest(z: Tensor, width: int) -> Tensor:
    """The `width` largest values of the last dimension, ascending."""
    if width < z.shape[-1] or z.device.type != "cpu":
        return z.topk(width, dim=-1).values.flip(-1)
    # numpy's vectorised sort takes a third of the time of torch's.
    return torch.from_numpy(np.sort(z.numpy(), axis=-1))
