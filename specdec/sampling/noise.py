"""Counter-based noise: Philox4x32-10 in 64-bit integers, bit-equal on every device.

A number depends on (request seed, counter) alone, so results do not depend on batch, order,
slot or preemption. One call per window position yields the three independent streams of a step:
the draft's, the acceptance test's and the last token's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_NUM_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


@dataclass(frozen=True, slots=True)
class WindowUniforms:
    """Uniforms of one step, [B, num_positions] float32 each, all inside (0, 1)."""

    draft: Tensor  # draws draft i
    accept: Tensor  # tests draft i
    recover: Tensor  # draws the recovered or bonus token at offset i


def seed_to_int64(seed: int) -> int:
    """The int64 with the same 64 bits; any integer in [-2^63, 2^64), else ValueError."""
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed must be at least -2^63 and below 2^64, got {seed}")
    return seed - 2**64 if seed >= 2**63 else seed


def philox4x32(
    seeds: Tensor, c0: Tensor | int, c1: Tensor | int, c2: Tensor | int, c3: Tensor | int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 (Salmon et al., SC 2011).

    seeds [...] int64: the bit pattern of the 64-bit key; counters: whole numbers of 32 bits,
    int64 tensors or ints, broadcast against seeds (higher bits are dropped). Returns four int64
    tensors, each a word in [0, 2^32).
    """
    if seeds.device.type == "cpu":  # a few numbers: numpy's calls cost a tenth of torch's
        counters = [np.asarray(c, dtype=np.int64) for c in (c0, c1, c2, c3)]
        words = _philox(seeds.numpy().view(np.uint64), [c.view(np.uint64) for c in counters])
        arrays = (np.asarray(word).view(np.int64) for word in words)
        w0, w1, w2, w3 = (torch.from_numpy(array) for array in arrays)
        return w0, w1, w2, w3
    w0, w1, w2, w3 = _philox(seeds, [torch.zeros_like(seeds) + c for c in (c0, c1, c2, c3)])
    return w0, w1, w2, w3


def _philox(seeds: Any, counters: Sequence[Any]) -> list[Any]:
    """The rounds, in numpy's uint64 or torch's int64: a product of two numbers below 2^32 keeps its
    64 bits in both.
    """
    k0, k1 = seeds & _WORD, (seeds >> 32) & _WORD
    x0, x1, x2, x3 = (c & _WORD for c in counters)
    for _ in range(_NUM_ROUNDS):
        p0, p1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1 = ((p1 >> 32) & _WORD) ^ x1 ^ k0, p1 & _WORD
        x2, x3 = ((p0 >> 32) & _WORD) ^ x3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return [x0, x1, x2, x3]


def uniform(words: Tensor) -> Tensor:
    """32-bit words [...] int64 -> [...] float32 in [2^-24, 1 - 2^-24], of the upper 23 bits."""
    return ((words >> 9).float() + 0.5) * 2.0**-23  # exact


def window_uniforms(seeds: Tensor, starts: Tensor, num_positions: int) -> WindowUniforms:
    """Noise of one step, keyed by (seed, start of the window, offset in it).

    seeds [B] int64, starts [B] int64 -> three [B, num_positions] float32. A start is the number
    of committed tokens before the step; starts strictly increase, so no number is used twice
    for one request, whatever K is.
    """
    offsets = torch.arange(num_positions, device=seeds.device)
    draft, accept, recover, _ = philox4x32(seeds[:, None], offsets, starts[:, None], 0, 0)
    return WindowUniforms(uniform(draft), uniform(accept), uniform(recover))


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """Draw one index per row from unnormalised weights by one uniform each.

    weights [..., V] >= 0, u [...] in (0, 1) -> [...] int64: the first index with cumulative
    weight > u * total and a weight above 0, accumulated in float64 (float32 errs by 1e-4 over
    10^5 ids). A row without such an index (all zero, or NaN) gives that of its largest weight.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    threshold = u.double()[..., None] * cumulative[..., -1:]
    # The weight test also covers parallel scans, whose sums need not be monotone.
    hit = (cumulative > threshold) & (weights > 0)
    first = hit.view(torch.uint8).argmax(-1)
    found = hit.gather(-1, first[..., None])[..., 0]
    return torch.where(found, first, weights.argmax(-1))
