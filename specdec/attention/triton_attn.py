"""triton: kernels of our own over paged KV, on CUDA; any q, any head layout, pages from 16 tokens.

One launch appends and attends; a second adds up the splits where the keys of a row are shared out
(Flash-Decoding). See triton_kernels.py for how.
"""

from __future__ import annotations

import importlib
import math
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specdec.attention.base import AttentionBackend, AttentionOptions
from specdec.batch import ForwardBatch

LOG2_E = math.log2(math.e)
# Two programs to a multiprocessor keep its memory pipes busy; more splits than that only cost.
PROGRAMS_PER_SM = 2
MIN_SPLIT_KEYS = 128  # a split of fewer keys costs more in the sum than it saves
MAX_GUARDED_Q = 64  # longer q are prompts, which have no refused tokens
MAX_SPLITS = 64  # the sum holds [splits, head_dim] fp32 in one program


@dataclass(frozen=True, slots=True)
class TileShape:
    """How much of a problem one program holds."""

    block_m: int  # packed query rows (query * group + head of the group)
    block_n: int  # keys of one step
    num_warps: int
    num_stages: int  # one more than the tiles of keys in flight


# (padded head_dim, packed query rows at most) -> shape; the first row that fits. To be tuned on an
# H200. Compiled for it, K and V take 2 * (num_stages - 1) * block_n * head_dim * 2 bytes of shared
# memory, which has 227 KB: two programs fit on a multiprocessor up to 64 packed rows.
SHAPES = {
    (64, 16): TileShape(16, 64, 4, 4),
    (64, 32): TileShape(32, 64, 4, 4),
    (64, 64): TileShape(64, 64, 4, 3),
    (64, None): TileShape(128, 64, 8, 3),
    (128, 16): TileShape(16, 64, 4, 4),
    (128, 32): TileShape(32, 64, 4, 4),
    (128, 64): TileShape(64, 64, 4, 3),
    (128, None): TileShape(128, 64, 8, 3),
    (256, 16): TileShape(16, 32, 4, 3),
    (256, 32): TileShape(32, 32, 4, 3),
    (256, None): TileShape(64, 32, 8, 3),
}
# fp32 is for tests and odd models: exact products run without tensor cores, tiles stay small.
FP32_SHAPE = TileShape(16, 16, 4, 1)


def tile_shape(head_dim: int, dtype: torch.dtype, packed_rows: int) -> TileShape:
    if dtype == torch.float32:
        return FP32_SHAPE
    for (max_dim, max_rows), shape in SHAPES.items():
        if head_dim <= max_dim and (max_rows is None or packed_rows <= max_rows):
            return shape
    raise ValueError(f"triton takes head_dim up to 256, not {head_dim}")


@cache
def load_kernels() -> Any:
    """The module triton_kernels. Raises ImportError, with what to install, if triton is
    missing.
    """
    try:
        return importlib.import_module("specdec.attention.triton_kernels")
    except ImportError as error:
        raise ImportError(
            f"attention='triton' needs the package triton ({error}); install it with: "
            f"pip install triton (torch for CUDA brings the version that fits)"
        ) from error


def interpreted() -> bool:
    """Triton's interpreter runs kernels on the CPU: slow, for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def _num_programs(device: torch.device) -> int:
    """How many programs fill the device."""
    if device.type != "cuda":
        return 1
    return PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


def on_device(tensor: Tensor) -> AbstractContextManager[None]:
    """Triton launches on the current device: make it the tensor's."""
    if not tensor.is_cuda:
        return nullcontext()
    return torch.cuda.device(tensor.device)  # type: ignore[no-any-return]


def dense_rows(tensor: Tensor) -> Tensor:
    """[tokens, heads, head_dim] with contiguous head_dim: a copy only where it is not."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@dataclass(slots=True)
class TritonPlan:
    """What the layers of one forward share; filled by the first, which knows the heads."""

    tiles: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    partial: Tensor | None = None  # [splits, num_tokens, num_heads, head_dim] fp32
    lse: Tensor | None = None  # [splits, num_tokens, num_heads] fp32

    def ragged_tiles(self, batch: ForwardBatch, group: int, block_m: int) -> Tensor:
        """[num_tiles, 2] int32: row and first packed query row; those with most keys first, so that
        no long one is left for the end.
        """
        if (group, block_m) not in self.tiles:
            tiles = [
                (start * group + first, row, first)
                for row, (start, length) in enumerate(batch.spans)
                for first in range(0, length * group, block_m)
            ]
            tiles.sort(reverse=True)
            host = torch.tensor([tile[1:] for tile in tiles], dtype=torch.int32)
            self.tiles[group, block_m] = host.to(batch.block_table.device, non_blocking=True)
        return self.tiles[group, block_m]

    def scratch(self, num_splits: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Room for the splits' results, reused by every layer of the same heads."""
        shape = (num_splits, *q.shape)
        if self.partial is None or self.lse is None or self.partial.shape != shape:
            self.partial = torch.empty(shape, dtype=torch.float32, device=q.device)
            self.lse = torch.empty(shape[:-1], dtype=torch.float32, device=q.device)
        return self.partial, self.lse


class TritonBackend(AttentionBackend):
    """MHA, GQA and MQA, window and softcap; fp16, bf16 and fp32.

    Safe to capture in a CUDA graph: nothing of a launch depends on a value on the device.
    `num_splits` sets the number of splits (for tests and tuning); None = by shape.
    """

    name = "triton"

    def __init__(self, num_splits: int | None = None) -> None:
        self._num_splits = num_splits

    def supports(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Raises ImportError if the device would do and triton is missing."""
        if device.type != "cuda" and not (device.type == "cpu" and interpreted()):
            return f"triton needs a CUDA device, not {device.type}"
        if dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return f"triton takes float16, bfloat16 or float32, not {dtype}"
        if head_dim > 256 or head_dim % 8:
            return f"triton takes head_dim up to 256 in steps of 8, not {head_dim}"
        load_kernels()
        return None

    def block_sizes(self) -> tuple[int, ...]:
        """64 first: a tile of keys is one block then, found by one look-up; larger blocks only
        leave more of each sequence's last one empty.
        """
        return (64, 128, 256, 32, 16)

    def plan(self, batch: ForwardBatch, block_size: int, padding_block: int) -> TritonPlan:
        return TritonPlan()

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: ForwardBatch,
        options: AttentionOptions,
    ) -> Tensor:
        kernels, plan = load_kernels(), batch.plan
        q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
        num_tokens, num_heads, head_dim = q.shape
        page, num_kv_heads = k_cache.shape[1:3]
        group = num_heads // num_kv_heads
        shape = tile_shape(head_dim, q.dtype, batch.max_seqlen_q * group)
        tiles, tiles_per_row = batch.cu_seqlens_q, 0
        if batch.q_len is None:
            tiles = plan.ragged_tiles(batch, group, shape.block_m)
            num_tiles = tiles.shape[0]
        else:
            tiles_per_row = -(-batch.q_len * group // shape.block_m)
            num_tiles = batch.num_seqs * tiles_per_row
        max_keys = min(batch.max_seqlen_k, batch.block_table.shape[1] * page)
        num_splits = self._splits(num_tiles * num_kv_heads, max_keys, q.device)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        partial, lse = (out, out) if num_splits == 1 else plan.scratch(num_splits, q)
        scale, softcap = options.softmax_scale, options.softcap or 0.0
        # A window of a few tokens is read in a small tile, a prompt in tiles like the cache's.
        block_new = min(shape.block_n, max(16, _power_of_two(batch.max_seqlen_q)))
        block_d = max(16, _power_of_two(head_dim))
        with on_device(q):
            kernels.attend_kernel[num_tiles, num_kv_heads, num_splits](
                q, k, v, k_cache, v_cache, partial, lse,
                batch.slot_mapping, batch.cu_seqlens_q, batch.cache_seqlens, batch.block_table,
                tiles, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
                batch.block_table.stride(0), tiles_per_row, num_tokens,
                scale / softcap if softcap else scale * LOG2_E,
                group, head_dim, page, options.window or 0, softcap,
                num_splits > 1, batch.q_len is None, batch.max_seqlen_q <= MAX_GUARDED_Q,
                shape.block_m, shape.block_n, block_new, block_d,
                num_warps=shape.num_warps, num_stages=shape.num_stages,
            )  # fmt: skip
            if num_splits > 1:
                kernels.combine_kernel[num_tokens * num_heads,](
                    partial, lse, out, num_splits, head_dim, _power_of_two(num_splits), block_d
                )
        return out

    def _splits(self, num_programs: int, max_keys: int, device: torch.device) -> int:
        """How many programs share the keys of one tile: as many as fill the device. A function of
        shapes only; each row cuts its own length.
        """
        if self._num_splits is not None:
            return self._num_splits
        useful = min(-(-max_keys // MIN_SPLIT_KEYS), MAX_SPLITS)
        return max(1, min(_num_programs(device) // num_programs, useful))


def merge_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    prefix: Tensor,
    prefix_lse: Tensor,
    batch: ForwardBatch,
    softmax_scale: float,
) -> Tensor:
    """Append k, v and complete attention over the cached keys by the causal part over the new ones.

    Args:
        q, k, v, k_cache, v_cache: as in AttentionBackend.attend; the batch's rows have equal q.
        prefix: [rows, q_len * group, num_kv_heads, head_dim], attention of packed queries (query *
            group + head of the group) over the cached keys alone.
        prefix_lse: [rows, num_kv_heads, q_len * group] fp32, natural; arbitrary, as prefix is, for
            a row without cached keys.

    Returns:
        [num_tokens, num_heads, head_dim] in q's dtype.
    """
    assert batch.q_len is not None
    q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
    head_dim, num_kv_heads = q.shape[2], k.shape[1]
    group = q.shape[1] // num_kv_heads
    shape = tile_shape(head_dim, q.dtype, batch.q_len * group)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_tiles = -(-batch.q_len * group // shape.block_m)
    with on_device(q):
        load_kernels().merge_window_kernel[num_tiles, num_kv_heads, batch.num_seqs](
            q, k, v, k_cache, v_cache, prefix.contiguous(), prefix_lse.contiguous(), out,
            batch.slot_mapping, batch.cache_seqlens,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], batch.q_len, softmax_scale * LOG2_E,
            group, head_dim, shape.block_m, 16, max(16, _power_of_two(head_dim)), num_warps=4,
        )  # fmt: skip
    return out


def _power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()
