"""LayerOps: what a decoder layer does beside its products and its attention, in torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(slots=True)
class LayerShape:
    """The parts of a config that the operations need."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float  # of RMSNorm
    frequencies: Tensor  # [head_dim / 2] float32, rotary
    rotary_scale: float
    activation: Callable[[Tensor], Tensor]


class LayerOps:
    """torch on any device: few calls, since each costs a CPU more than its arithmetic."""

    def __init__(self, shape: LayerShape) -> None:
        self.shape = shape

    def rotation(self, positions: Tensor) -> Any:
        """What `rotate` needs to know of positions [T]; computed once a forward."""
        shape = self.shape
        angles = positions[:, None].float() * shape.frequencies
        return torch.polar(torch.full_like(angles, shape.rotary_scale), angles)[:, None]

    def norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the last dimension."""
        return F.rms_norm(hidden, weight.shape, weight, self.shape.eps)

    def add_norm(self, hidden: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
        """Add delta to hidden [T, H], in place, and give the norm of the sum."""
        hidden += delta
        return self.norm(hidden, weight)

    def rotate(
        self, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, rotation: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [T, (heads + 2 kv_heads) * head_dim] -> q, k, v [T, heads, head_dim], each head of q
        and k normed if there are weights [head_dim], then rotated.

        The halves of a rotated pair come to lie side by side, in q as in k, so that one complex
        product rotates both; scores do not change.
        """
        shape = self.shape
        heads = qkv.view(qkv.shape[0], -1, shape.head_dim)
        num_heads, num_kv_heads = shape.num_heads, shape.num_kv_heads
        q_k, v = heads.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        if q_norm is not None and k_norm is not None:
            q, k = q_k.split((num_heads, num_kv_heads), dim=1)
            q_k = torch.cat((self.norm(q, q_norm), self.norm(k, k_norm)), dim=1)
        first, second = q_k.float().chunk(2, dim=-1)
        turned = torch.view_as_real(torch.complex(first, second) * rotation)
        q, k = turned.flatten(-2).to(qkv.dtype).split((num_heads, num_kv_heads), dim=1)
        return q, k, v

    def gate(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2 I] -> activation(gate) * up [T, I]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return self.shape.activation(gate) * up
