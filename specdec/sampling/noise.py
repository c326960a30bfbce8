"""Counter-based noise: Philox4x32-10 in int64 tensors, bit-equal on every device.

A number depends on (request seed, counter) alone, so results do not depend on batch, order,
slot or preemption. One call per window position yields the three independent streams of a step:
the draft's, the acceptance test's and the last token's.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    pair = torch.arange(2, device=seeds.device)
    multipliers, key_steps = (lo + (hi - lo) * pair for lo, hi in (_MULTIPLIERS, _KEY_STEPS))
    keys = torch.stack((seeds & _WORD, (seeds >> 32) & _WORD), dim=-1)
    w0, w1, w2, w3 = (((torch.zeros_like(seeds) + c) & _WORD)[..., None] for c in (c0, c1, c2, c3))
    x, y = torch.where(pair == 0, w0, w2), torch.where(pair == 0, w1, w3)
    for i in range(_NUM_ROUNDS):
        # x = (x0, x2), y = (x1, x3). Both factors are below 2^32: the int64 product wraps to
        # the right 64 bits. Its high words, swapped, go to x and its low words to y.
        product = (x * multipliers).flip(-1)
        x = ((product >> 32) & _WORD) ^ y ^ ((keys + i * key_steps) & _WORD)
        y = product & _WORD
    return x[..., 0], y[..., 0], x[..., 1], y[..., 1]


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
