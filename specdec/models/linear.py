"""Linear layers of a forward of our own: y = x W^T + b, with the weight kept as the CPU reads it
fastest.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq

import torch
import torch.nn.functional as F
from torch import Tensor

SAME_PRECISION = ("fp32", "fp16_weight")  # "auto" chooses among these
PARITY = {"fp16_weight": 2e-3, "int8_weight": 3e-2, "bf16": 2e-2}  # relative to the largest output
CALIBRATION_SECONDS = 0.12  # per kind


class Linear(ABC):
    """x [T, in] -> [T, out] in x's dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.in_features = weight.shape[1]

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor: ...


class PlainLinear(Linear):
    """torch's own product, on any device and dtype; shares `weight` and `bias`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight)
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Fp16WeightLinear(Linear):
    """float16 weights, float32 activations and sums (fbgemm; x86 CPUs)."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight)
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float().contiguous(), bias)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return y


class Int8WeightLinear(Linear):
    """int8 weights with one scale per output row, bfloat16 activations. Activations are never
    quantised.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight)
        scales = (weight.float().abs().amax(dim=1) / 127).clamp(min=1e-12)
        self._weight = (weight.float() / scales[:, None]).round().clamp(-127, 127).to(torch.int8)
        self._scales = scales.to(torch.bfloat16)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        y = torch._weight_int8pack_mm(x.bfloat16(), self._weight, self._scales).to(x.dtype)
        return y if self._bias is None else y + self._bias


class Bf16Linear(Linear):
    """bfloat16 weights and activations; the result is widened again."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight)
        self._weight = weight.bfloat16()
        self._bias = None if bias is None else bias.bfloat16()

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.bfloat16(), self._weight, self._bias).to(x.dtype)


KINDS: dict[str, type[Linear]] = {
    "fp32": PlainLinear,
    "fp16_weight": Fp16WeightLinear,
    "int8_weight": Int8WeightLinear,
    "bf16": Bf16Linear,
}


def obstacle(kind: str, weight: Tensor) -> str | None:
    """Why this kind cannot serve here: the op is absent, fails, or gives another product. None =
    it can.
    """
    if kind == "fp32":
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, weight.shape[1], generator=generator)
    exact = F.linear(x, weight.float())
    try:
        error = float((KINDS[kind](weight)(x) - exact).abs().max())
    except (RuntimeError, AttributeError, NotImplementedError) as failure:
        return f"this build of torch cannot run it ({str(failure).splitlines()[0][:120]})"
    limit = PARITY[kind] * float(exact.abs().max())
    if not error <= limit:
        return f"its products are off by {error:.3g}, the limit is {limit:.3g}"
    return None


def choose_kind(weights: Seq[Tensor], num_tokens: Seq[int]) -> tuple[str, dict[str, float]]:
    """The fastest kind that keeps the weights' precision, and the seconds measured per kind.

    Args:
        weights: some weights [out, in] of the model, float32, of different layers.
        num_tokens: row counts of the products to time, such as [1, K + 1]; they weigh alike.

    Takes about CALIBRATION_SECONDS per kind.
    """
    seconds = {"fp32": _seconds([PlainLinear(w) for w in weights], num_tokens)}
    for kind in SAME_PRECISION[1:]:
        if obstacle(kind, weights[0]) is None:
            seconds[kind] = _seconds([KINDS[kind](w) for w in weights], num_tokens)
    return min(seconds, key=seconds.__getitem__), seconds


def _seconds(linears: Seq[Linear], num_tokens: Seq[int]) -> float:
    """Best time of one pass through all linears, summed over the row counts."""
    total = 0.0
    for count in num_tokens:
        inputs = [torch.ones(count, linear.in_features) for linear in linears]
        best = float("inf")
        end = time.perf_counter() + CALIBRATION_SECONDS / len(num_tokens)
        while time.perf_counter() < end:
            start = time.perf_counter()
            for linear, x in zip(linears, inputs, strict=True):
                linear(x)
            best = min(best, time.perf_counter() - start)
        total += best
    return total
