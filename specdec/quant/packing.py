"""Codes in 32-bit words, zero points, and one canonical form that every kernel takes.

AutoGPTQ's layout for y = x W, W [K, N]: codes along K in a little-endian stream of bits over int32
words (3 bits: 32 codes in 3 words), one stream per column; zero points the same along N.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

WORD = 32
LOW = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class QuantWeight:
    """One module's weight in canonical form: rows sorted by group, true zero points.

    Row i of the codes belongs to group i // group_size and to input column perm[i].
    """

    bits: int
    group_size: int  # 1..in_features; the last group may be shorter
    in_features: int  # K
    out_features: int  # N
    words: Tensor  # int32 [ceil(K * bits / 32), N]
    scales: Tensor  # [G, N], the compute dtype
    zeros: Tensor | None  # uint8 [G, N]; None: all are 2 ** (bits - 1)
    perm: Tensor | None  # int64 [K]; None: the input's own order
    bias: Tensor | None = None  # [N], the compute dtype

    @property
    def num_groups(self) -> int:
        return -(-self.in_features // self.group_size)


def num_words(count: int, bits: int) -> int:
    """Words that `count` codes take, the last one perhaps not full."""
    return -(-count * bits // WORD)


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Codes of a bit stream along dimension 0: int32 [num_words(count, bits), N] -> uint8 [count,
    N].
    """
    mask = (1 << bits) - 1
    if WORD % bits == 0:
        shifts = torch.arange(0, WORD, bits, dtype=torch.int32, device=words.device)
        codes = (words[:, None] >> shifts[:, None]).bitwise_and_(mask).to(torch.uint8)
        return codes.flatten(0, 1)[:count]
    first = torch.arange(count, device=words.device) * bits
    word, shift = first // WORD, (first % WORD)[:, None]
    wide = words.to(torch.int64) & LOW
    following = torch.cat((wide[1:], torch.zeros_like(wide[:1])))
    # At shift 0 the second term is shifted past the mask; both terms are non-negative.
    both = (wide[word] >> shift) | (following[word] << (WORD - shift))
    return (both & mask).to(torch.uint8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """The inverse of unpack: codes [count, N] of any integer dtype -> int32 [num_words, N]."""
    count, columns = codes.shape
    length = num_words(count, bits)
    words = torch.zeros(length + 1, columns, dtype=torch.int64, device=codes.device)
    first = torch.arange(count, device=codes.device) * bits
    shifted = codes.to(torch.int64) << (first % WORD)[:, None]  # below 2 ** 40
    words.index_add_(0, first // WORD, shifted & LOW)
    words.index_add_(0, first // WORD + 1, shifted >> WORD)
    return to_int32(words[:length])


def to_int32(words: Tensor) -> Tensor:
    """Unsigned words in int64 -> the same bits in int32."""
    words = words & LOW
    return torch.where(words >= 1 << 31, words - (1 << WORD), words).to(torch.int32)


def unpack_zeros(qzeros: Tensor, bits: int, columns: int, *, v2: bool) -> Tensor:
    """True zero points: int32 [G, num_words(N, bits)] -> uint8 [G, N].

    v1 stores them less one. The one is added on whole words, with wrap: writers subtract it that
    way, so a zero point of 0, which borrows from its neighbours, comes back as it was. Codes of 3
    bits straddle words, there it is added to each code.
    """
    if not v2 and WORD % bits == 0:
        qzeros = to_int32((qzeros.to(torch.int64) & LOW) + _ones(bits))
    codes = unpack(qzeros.t().contiguous(), bits, columns)
    if not v2 and WORD % bits:
        codes = (codes + 1) & ((1 << bits) - 1)
    return codes.t().contiguous()


def pack_zeros(zeros: Tensor, bits: int, *, v2: bool) -> Tensor:
    """The inverse of unpack_zeros: integer [G, N] -> int32 [G, num_words(N, bits)]."""
    codes = zeros.t().to(torch.int64)
    if not v2 and WORD % bits:
        codes = (codes - 1) & ((1 << bits) - 1)
    words = pack(codes, bits).t().contiguous()
    if v2 or WORD % bits:
        return words
    return to_int32((words.to(torch.int64) & LOW) - _ones(bits))


def _ones(bits: int) -> int:
    """A word in which every code is 1: 0x11111111 for 4 bits."""
    return sum(1 << i for i in range(0, WORD, bits))


def group_rows(values: Tensor, group_size: int, rows: int) -> Tensor:
    """One value per group [G, N] -> one per row [rows, N]; the last group may be short."""
    return values.repeat_interleave(group_size, dim=0)[:rows]


def dequantize(weight: QuantWeight, dtype: torch.dtype) -> Tensor:
    """(code - zero) * scale, [K, N] in `dtype`, rows as they are stored: see restore_rows."""
    codes = unpack(weight.words, weight.bits, weight.in_features).to(dtype)
    zeros = weight.zeros
    if zeros is None:
        codes -= 1 << (weight.bits - 1)
    else:
        codes -= group_rows(zeros, weight.group_size, weight.in_features)
    scales = weight.scales.to(dtype)
    if weight.in_features % weight.group_size:
        return codes.mul_(group_rows(scales, weight.group_size, weight.in_features))
    grouped = codes.view(weight.num_groups, weight.group_size, -1)
    return grouped.mul_(scales[:, None]).flatten(0, 1)


def restore_rows(rows: Tensor, perm: Tensor | None) -> Tensor:
    """Undo the sorting by group of [K, N]: row perm[i] of the result is row i."""
    if perm is None:
        return rows
    restored = torch.empty_like(rows)
    restored[perm] = rows
    return restored


def fuse(weights: Sequence[QuantWeight]) -> QuantWeight | str:
    """One weight [K, N1 + N2 + ...] for modules of the same input, or why they must stay apart:
    another permutation, bits or group size.
    """
    first = weights[0]
    for other in weights[1:]:
        same_perm = (
            first.perm is other.perm
            if first.perm is None or other.perm is None
            else torch.equal(first.perm, other.perm)
        )
        if not same_perm:
            return "their permutations (desc_act) differ"
        if (first.bits, first.group_size) != (other.bits, other.group_size):
            return "their bits or group sizes differ"
        if first.in_features != other.in_features or first.scales.dtype != other.scales.dtype:
            return "their inputs or dtypes differ"
        if (first.bias is None) != (other.bias is None):
            return "one has a bias, the other none"
    zeros = None
    if any(w.zeros is not None for w in weights):
        zeros = torch.cat([all_zeros(w) for w in weights], dim=1)
    biases = [w.bias for w in weights if w.bias is not None]
    return replace(
        first,
        out_features=sum(w.out_features for w in weights),
        words=torch.cat([w.words for w in weights], dim=1),
        scales=torch.cat([w.scales for w in weights], dim=1),
        zeros=zeros,
        bias=torch.cat(biases) if biases else None,
    )


def all_zeros(weight: QuantWeight) -> Tensor:
    """The zero points uint8 [G, N], also where they were dropped."""
    if weight.zeros is not None:
        return weight.zeros
    return torch.full_like(weight.scales, 1 << (weight.bits - 1), dtype=torch.uint8)


def select_columns(weight: QuantWeight, order: Tensor) -> QuantWeight:
    """Output j becomes the old output order[j]: how a consumer's permutation is folded into its
    producer.
    """
    return replace(
        weight,
        words=weight.words[:, order],
        scales=weight.scales[:, order],
        zeros=None if weight.zeros is None else weight.zeros[:, order],
        bias=None if weight.bias is None else weight.bias[order],
    )
