"""Triton kernels of a decoder layer's small operations, one launch each. Importing this module
needs the package triton. Sums are float32; each result is rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_norm_kernel(
    hidden, delta, weight, out, eps,
    SIZE: tl.constexpr, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """hidden [T, SIZE] += delta, in place; out = RMSNorm(hidden) * weight; grid (T)."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    dims = tl.arange(0, BLOCK)
    inside = dims < SIZE
    x = tl.load(hidden + row + dims, mask=inside, other=0.0)
    if HAS_DELTA:
        x = (x.to(tl.float32) + tl.load(delta + row + dims, mask=inside, other=0.0)).to(x.dtype)
        tl.store(hidden + row + dims, x, mask=inside)
    exact = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(exact * exact, 0) / SIZE + eps)
    w = tl.load(weight + dims, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + dims, exact * scale * w, mask=inside)


@triton.jit
def rotate_kernel(
    qkv, q_norm, k_norm, cosines, sines, out, token_stride, eps,
    NUM_HEADS: tl.constexpr, NUM_QK: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Heads [0, NUM_QK) of qkv, 2 * HALF wide, normed if HAS_NORM, rotated into
    out [T, NUM_QK, 2 * HALF]; grid (T, NUM_QK). The first NUM_HEADS are queries.

    cosines, sines: [T, HALF] float32, the rotary scale in them.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, BLOCK)
    inside = dims < HALF
    source = qkv + token * token_stride + head * 2 * HALF
    first = tl.load(source + dims, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + dims, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        square = tl.sum(first * first, 0) + tl.sum(second * second, 0)
        scale = tl.rsqrt(square / (2 * HALF) + eps)
        weight = q_norm if head < NUM_HEADS else k_norm
        first *= scale * tl.load(weight + dims, mask=inside, other=0.0).to(tl.float32)
        second *= scale * tl.load(weight + HALF + dims, mask=inside, other=0.0).to(tl.float32)
    cosine = tl.load(cosines + token * HALF + dims, mask=inside, other=0.0)
    sine = tl.load(sines + token * HALF + dims, mask=inside, other=0.0)
    target = out + (token * NUM_QK + head) * 2 * HALF
    tl.store(target + dims, first * cosine - second * sine, mask=inside)
    tl.store(target + HALF + dims, second * cosine + first * sine, mask=inside)


@triton.jit
def gate_kernel(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """gate_up [T, 2 * SIZE] -> silu(gate) * up [T, SIZE]; grid (T, ceil(SIZE / BLOCK))."""
    token = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = dims < SIZE
    gate = tl.load(gate_up + token * 2 * SIZE + dims, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * SIZE + SIZE + dims, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + dims, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)
