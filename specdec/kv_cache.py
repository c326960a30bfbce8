"""KVCache: the K and V tensors of one model over the blocks of the shared pool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What one token's KV of a model looks like."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block, K and V of all layers."""
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return per_token * block_size


class KVCache:
    """k[layer], v[layer]: [num_blocks + 1, block_size, num_kv_heads, head_dim], zero at first.

    The last block belongs to nobody: slot -1 lies in it, so that padded tokens write to no real
    slot, and block tables are padded with its id. A slot is block * block_size + offset.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        shape = (num_blocks + 1, block_size, layout.num_kv_heads, layout.head_dim)
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self.k = [_zeros(shape, layout.dtype, device) for _ in range(layout.num_layers)]
        self.v = [_zeros(shape, layout.dtype, device) for _ in range(layout.num_layers)]

    @property
    def padding_block(self) -> int:
        return self.num_blocks

    def write(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Store k, v [num_tokens, num_kv_heads, head_dim] at slot_mapping [num_tokens] int64."""
        store(self.k[layer], k, slot_mapping)
        store(self.v[layer], v, slot_mapping)

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero blocks that are handed out, and the padding block: kernels multiply masked keys by
        a weight of 0, and what an earlier owner left there may be NaN.
        """
        index = torch.tensor([*blocks, self.padding_block], dtype=torch.int64, device=self.device)
        for tensor in (*self.k, *self.v):
            tensor.index_fill_(0, index, 0)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU the system zeroes pages at their first use: gigabytes that may never be needed are
    not written at start.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)


def store(cache: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
    """Scatter values [num_tokens, num_kv_heads, head_dim] into a cache [num_blocks, block_size,
    ...] in place.
    """
    cache.view(-1, *cache.shape[2:])[slot_mapping] = values
