"""The contract of an attention backend. `reference` is its executable specification."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How one layer attends."""

    softmax_scale: float
    window: int | None = None  # a query sees itself and the window - 1 tokens before it; None = all
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap); None = unchanged


class AttentionBackend(ABC):
    """Writes new K/V into the paged cache and attends through the block table.

    For row i with q_i new tokens and cache_seqlens[i] older ones, query j (0-based) sees key t iff

        t <= cache_seqlens[i] + j      (causal, aligned to the bottom right)
        t >  cache_seqlens[i] + j - window

                  keys:  0 1 2 | 3 4 5        cache_seqlens = 3, q = 3
        query 0          x x x   x . .
        query 1          x x x   x x .
        query 2          x x x   x x x
    """

    name: str

    @abstractmethod
    def supports(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """None if the backend can serve such a model, else the reason why not."""

    @abstractmethod
    def block_sizes(self) -> tuple[int, ...]:
        """Block sizes it can read, the preferred one first."""

    def plan(self, batch: ForwardBatch, block_size: int, padding_block: int) -> Any:
        """Prepare what all layers of one forward share (indices, masks, lengths)."""
        return None

    @abstractmethod
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
        """Append k, v to the caches and return softmax(q K^T * scale) V.

        Args:
            q: [num_tokens, num_heads, head_dim], rotary already applied.
            k, v: [num_tokens, num_kv_heads, head_dim]; num_heads is a multiple of num_kv_heads.
            k_cache, v_cache: [num_blocks + 1, block_size, num_kv_heads, head_dim], written in
                place.
            batch: where the tokens go and what they see; `batch.plan` is this backend's plan.
            options: scale, window, softcap.

        Returns:
            [num_tokens, num_heads, head_dim] in q's dtype. Rows of padded tokens are arbitrary but
            finite.
        """
