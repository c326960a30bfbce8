"""FusedLayerOps: LayerOps by Triton kernels, one launch each, for CUDA."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.attention.triton_attn import interpreted, on_device
from specdec.models.layer_ops import LayerOps, LayerShape

GATE_BLOCK = 1024


@cache
def _kernels() -> Any:
    return importlib.import_module("specdec.models.layer_kernels")


def layer_ops(shape: LayerShape) -> LayerOps:
    """Fused where Triton can run, else torch."""
    device = shape.frequencies.device
    if shape.activation is not F.silu or not (device.type == "cuda" or interpreted()):
        return LayerOps(shape)
    try:
        _kernels()
    except ImportError:
        return LayerOps(shape)
    return FusedLayerOps(shape)


class FusedLayerOps(LayerOps):
    """The results of LayerOps up to rounding; q and k keep the order of their dimensions."""

    def rotation(self, positions: Tensor) -> Any:
        angles = positions[:, None].float() * self.shape.frequencies
        scale = self.shape.rotary_scale
        return angles.cos() * scale, angles.sin() * scale

    def norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return self._add_norm(hidden.contiguous(), None, weight)

    def add_norm(self, hidden: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
        return self._add_norm(hidden, delta, weight)

    def rotate(
        self, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, rotation: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.shape
        num_qk, half = shape.num_heads + shape.num_kv_heads, shape.head_dim // 2
        num_tokens = qkv.shape[0]
        out = torch.empty(num_tokens, num_qk, shape.head_dim, dtype=qkv.dtype, device=qkv.device)
        has_norm = q_norm is not None and k_norm is not None
        cosines, sines = rotation
        with on_device(qkv):
            _kernels().rotate_kernel[num_tokens, num_qk](
                qkv, q_norm if has_norm else qkv, k_norm if has_norm else qkv, cosines, sines, out,
                qkv.stride(0), shape.eps, shape.num_heads, num_qk, half, has_norm,
                _power_of_two(half), num_warps=1,
            )  # fmt: skip
        q, k = out.split((shape.num_heads, shape.num_kv_heads), dim=1)
        heads = qkv.view(num_tokens, -1, shape.head_dim)
        return q, k, heads[:, num_qk:]

    def gate(self, gate_up: Tensor) -> Tensor:
        num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
        block = min(GATE_BLOCK, _power_of_two(size))
        with on_device(gate_up):
            _kernels().gate_kernel[num_tokens, -(-size // block)](gate_up, out, size, block)
        return out

    def _add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        out = torch.empty_like(hidden)
        size = hidden.shape[-1]
        with on_device(hidden):
            _kernels().add_norm_kernel[hidden.numel() // size,](
                hidden, hidden if delta is None else delta, weight, out, self.shape.eps,
                size, delta is not None, _power_of_two(size), num_warps=4 if size <= 4096 else 8,
            )  # fmt: skip
        return out


def _power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()
