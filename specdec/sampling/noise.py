"""Counter-based noise: Philox4x32-10 (Salmon et al., SC 2011), so that draws depend on request and position alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def seed_to_int64(seed: int) -> int:
    """The 64-bit pattern of a seed in [-2^63, 2^64) as a signed integer."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed


def philox4x32(
    seeds: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words (int64, 0 <= word < 2^32) per counter.

    seeds: int64 bit patterns of the 64-bit keys; c0..c3: int64 counters below 2^32; all broadcast together.
    """
    k0, k1 = seeds & _MASK, (seeds >> 32) & _MASK
    for _ in range(10):
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # wrap modulo 2^64 with the right bits
        high_a, high_b = (a >> 32) & _MASK, (b >> 32) & _MASK
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, b & _MASK, high_a ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(words: Tensor) -> Tensor:
    """32-bit words -> float32 in [2^-24, 1 - 2^-24], 23 bits, exact."""
    return ((words >> 9).to(torch.float32) + 0.5) * 2.0**-23


@dataclass(frozen=True, slots=True)
class WindowUniforms:
    """Three independent uniforms per window position, [rows, positions] float32 each."""

    draft: Tensor
    accept: Tensor
    recover: Tensor


def window_uniforms(seeds: Tensor, starts: Tensor, num_positions: int) -> WindowUniforms:
    """Noise of the windows that start at `starts` [B] int64 under `seeds` [B] int64.

    Keyed by (seed, window start, offset, stream): window starts strictly increase, so each draw of a request is fresh
    whatever K is, and nothing depends on batch, order or preemption.
    """
    offsets = torch.arange(num_positions, device=starts.device)[None]
    zero = torch.zeros_like(offsets)
    words = philox4x32(seeds[:, None], offsets, starts[:, None] & _MASK, zero, zero)
    return WindowUniforms(*(uniform(word) for word in words[:3]))


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """Draw one index per row: the first with cumsum > u * total and a weight above 0, else the heaviest.

    weights: [..., V], not negative, unnormalised; u: [...] in (0, 1). Sums in float64: fp32 over 10^5 ids errs by 1e-4.
    """
    total = torch.cumsum(weights, dim=-1, dtype=torch.float64)
    hit = (total > u[..., None].double() * total[..., -1:]) & (weights > 0)
    first = hit.to(torch.uint8).argmax(dim=-1)
    return torch.where(hit.any(dim=-1), first, weights.argmax(dim=-1))
