"""Linear layers on packed weights, as modules of the transformers tree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.quant.packing import QuantWeight, all_zeros, dequantize, restore_rows, unpack

INT4_COLUMNS = 16  # torch's CPU kernel takes multiples of this many outputs


class QuantLinear(nn.Module, ABC):
    """y = x W + b for x [..., K] in the compute dtype.

    `perm` sorts the input by group; modules of one input whose perm is equal may share a gather:
    `product(gather(x))` is forward(x). Packed integers are buffers, scales a parameter: casting the
    module to another dtype leaves the integers alone.
    """

    perm: Tensor | None
    bias: nn.Parameter | None

    def __init__(self, weight: QuantWeight) -> None:
        super().__init__()
        self.bits, self.group_size = weight.bits, weight.group_size
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self.register_buffer("perm", weight.perm)
        self.bias = None if weight.bias is None else nn.Parameter(weight.bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self.gather(x))

    def gather(self, x: Tensor) -> Tensor:
        """x with its last dimension sorted by group."""
        return x if self.perm is None else x.index_select(-1, self.perm)

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """[..., K], gathered -> [..., N], bias added."""

    @abstractmethod
    def dense(self) -> Tensor:
        """The weight [N, K] as nn.Linear keeps it, in the compute dtype."""

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}, "
            f"group_size={self.group_size}, act_order={self.perm is not None}"
        )


class DequantLinear(QuantLinear):
    """Every call dequantises the whole weight: any bits, group size, shape, dtype and device."""

    words: Tensor
    zeros: Tensor | None

    def __init__(self, weight: QuantWeight) -> None:
        super().__init__(weight)
        self.register_buffer("words", weight.words)
        self.register_buffer("zeros", weight.zeros)
        self.scales = nn.Parameter(weight.scales, requires_grad=False)

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x, dequantize(self.packed(), x.dtype).t(), self.bias)

    def dense(self) -> Tensor:
        rows = dequantize(self.packed(), self.scales.dtype)
        return restore_rows(rows, self.perm).t().contiguous()

    def packed(self) -> QuantWeight:
        """The canonical form; its tensors are this module's own."""
        return QuantWeight(
            *(self.bits, self.group_size, self.in_features, self.out_features),
            words=self.words,
            scales=self.scales.detach(),
            zeros=self.zeros,
            perm=self.perm,
            bias=self.bias,
        )


class AtenInt4Linear(QuantLinear):
    """torch's own int4 kernel for CPUs (_weight_int4pack_mm_for_cpu): saves memory, not time.

    4 bits, groups of 32, 64, 128 or 256 that divide K, float32, float16 or bfloat16. Outputs are
    padded to a multiple of 16.
    """

    tiles: Tensor

    def __init__(self, weight: QuantWeight) -> None:
        super().__init__(weight)
        padded = _pad_outputs(weight, INT4_COLUMNS)
        codes = unpack(padded.words, 4, padded.in_features).t().contiguous().to(torch.int32)
        tiles = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        self.register_buffer("tiles", tiles)
        # The kernel computes (code - 8) * scale + offset.
        offset = (8 - all_zeros(padded).to(padded.scales.dtype)) * padded.scales
        both = torch.stack((padded.scales, offset), dim=-1).contiguous()  # [G, N, 2]
        self.scales = nn.Parameter(both, requires_grad=False)

    def product(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).contiguous()
        scales = self.scales.detach()
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows, self.tiles, self.group_size, scales
        )
        y = y[:, : self.out_features].view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def dense(self) -> Tensor:
        eye = torch.eye(self.in_features, dtype=self.scales.dtype)
        bias = self.bias
        rows = self.product(eye) if bias is None else self.product(eye) - bias
        return restore_rows(rows, self.perm).t().contiguous()


def dense_linear(weight: QuantWeight) -> nn.Linear:
    """An ordinary linear layer with the dequantised weight, inputs in their own order."""
    rows = dequantize(weight, weight.scales.dtype)
    linear = nn.Linear(
        weight.in_features, weight.out_features, bias=weight.bias is not None, device="meta"
    )
    dense = restore_rows(rows, weight.perm).t().contiguous()
    linear.weight = nn.Parameter(dense, requires_grad=False)
    if weight.bias is not None:
        linear.bias = nn.Parameter(weight.bias, requires_grad=False)
    return linear


def _pad_outputs(weight: QuantWeight, multiple: int) -> QuantWeight:
    """More outputs, of scale 0, up to a multiple; the bias stays as it is."""
    more = -weight.out_features % multiple
    if more == 0:
        return weight
    return replace(
        weight,
        words=F.pad(weight.words, (0, more)),
        scales=F.pad(weight.scales, (0, more)),
        zeros=None if weight.zeros is None else F.pad(weight.zeros, (0, more)),
    )
