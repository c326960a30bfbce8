"""What packed weights run on: one small interface, the backends there are, and which one is taken.

A kernel is added as a QuantBackend in BACKENDS and, to be chosen by itself, in AUTO.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import nn

from specdec.config import QUANT_BACKENDS
from specdec.quant.checkpoint import ModuleSpec
from specdec.quant.linear import INT4_COLUMNS, AtenInt4Linear, DequantLinear, dense_linear
from specdec.quant.packing import QuantWeight, num_words

logger = logging.getLogger("specdec")


class QuantBackend(ABC):
    """Makes modules from canonical weights."""

    name: ClassVar[str]
    packed: ClassVar[bool] = True  # keeps codes: permutations are folded where that is free

    def missing(self, device: torch.device) -> str | None:
        """Why it cannot be used on this device or installation at all; None = it can."""
        return None

    def obstacle(self, spec: ModuleSpec, dtype: torch.dtype) -> str | None:
        """Why it cannot serve this module; None = it can."""
        return None

    def num_bytes(self, spec: ModuleSpec, dtype: torch.dtype, *, sym: bool) -> int:
        """Bytes that the module keeps, bias left out."""
        count = num_words(spec.in_features, spec.bits) * spec.out_features * 4
        per_group = dtype.itemsize + (0 if sym else 1)
        order = 8 * spec.in_features if spec.has_order else 0
        return count + spec.num_groups * spec.out_features * per_group + order

    @abstractmethod
    def build(self, weight: QuantWeight) -> nn.Module:
        """A module [..., K] -> [..., N]; it may keep the weight's tensors."""


class Dequant(QuantBackend):
    """Weights stay packed and are dequantised at each call: little memory, slow, runs anywhere."""

    name = "dequant"

    def build(self, weight: QuantWeight) -> nn.Module:
        return DequantLinear(weight)


class Dense(QuantBackend):
    """Weights are dequantised once and kept: the memory of a model that is not quantised."""

    name = "dense"
    packed = False

    def num_bytes(self, spec: ModuleSpec, dtype: torch.dtype, *, sym: bool) -> int:
        return spec.in_features * spec.out_features * dtype.itemsize

    def build(self, weight: QuantWeight) -> nn.Module:
        return dense_linear(weight)


class AtenInt4(QuantBackend):
    """torch's int4 kernel on the CPU."""

    name = "aten_int4"
    group_sizes = (32, 64, 128, 256)

    def missing(self, device: torch.device) -> str | None:
        if device.type != "cpu":
            return "it is a kernel for CPUs"
        if not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
            return "this build of torch has no int4 kernel for CPUs"
        return None

    def obstacle(self, spec: ModuleSpec, dtype: torch.dtype) -> str | None:
        if spec.bits != 4:
            return "it takes 4 bits"
        if spec.group_size not in self.group_sizes:
            return "it takes groups of 32, 64, 128 or 256"
        if spec.in_features % spec.group_size:
            return "its groups divide the inputs"
        return None

    def num_bytes(self, spec: ModuleSpec, dtype: torch.dtype, *, sym: bool) -> int:
        columns = -(-spec.out_features // INT4_COLUMNS) * INT4_COLUMNS
        order = 8 * spec.in_features if spec.has_order else 0
        scales = 2 * dtype.itemsize * spec.num_groups * columns
        return spec.in_features * columns // 2 + scales + order

    def build(self, weight: QuantWeight) -> nn.Module:
        return AtenInt4Linear(weight)


BACKENDS: dict[str, QuantBackend] = {b.name: b for b in (Dequant(), Dense(), AtenInt4())}
AUTO = {"cpu": ("dense",), "cuda": ("dequant",)}  # the first that is not missing
PLANNED = {  # the rest of QUANT_BACKENDS, and what they will run on
    "humming": "humming-kernels on CUDA",
    "triton": "a Triton kernel of specdec's own on CUDA",
    "gptqmodel": "the package gptqmodel",
    "auto_gptq": "the package auto-gptq, which cannot be imported beside transformers 5",
}


def choose_backend(name: str, device: torch.device) -> QuantBackend:
    """The backend of that name, or for "auto" the first of AUTO that this machine has.

    Raises ValueError if it is named and cannot be used: nothing else is taken in its place.
    """
    if name == "auto":
        for candidate in AUTO.get(device.type, ("dequant",)):
            if BACKENDS[candidate].missing(device) is None:
                return BACKENDS[candidate]
        return BACKENDS["dequant"]
    usable = (
        f"quant_backend='auto' runs this checkpoint with {choose_backend('auto', device).name!r}"
    )
    if name in PLANNED:
        raise ValueError(
            f"quant_backend={name!r} is not built yet (it will need {PLANNED[name]}); {usable}"
        )
    if name not in BACKENDS:
        raise ValueError(
            f"quant_backend must be one of {', '.join(QUANT_BACKENDS)}, got {name!r}; {usable}"
        )
    reason = BACKENDS[name].missing(device)
    if reason is not None:
        raise ValueError(f"quant_backend={name!r} cannot run on {device}: {reason}; {usable}")
    return BACKENDS[name]


def assign_backends(
    specs: dict[str, ModuleSpec], backend: QuantBackend, dtype: torch.dtype
) -> dict[str, QuantBackend]:
    """The backend of each module: the chosen one, or dequant where that cannot serve it, told in
    one warning.

    Raises ValueError if it can serve none of them.
    """
    reasons = {name: backend.obstacle(spec, dtype) for name, spec in specs.items()}
    others = {name: reason for name, reason in reasons.items() if reason is not None}
    if others:
        first, reason = next(iter(others.items()))
        about = f"{first} ({specs[first].bits} bits, groups of {specs[first].group_size})"
        if len(others) == len(specs):
            raise ValueError(
                f"quant_backend={backend.name!r} cannot serve {about}: {reason}; leave "
                f"quant_backend out"
            )
        logger.warning(
            "quant_backend=%r cannot serve %s%s: %s; dequant serves them",
            *(backend.name, about, f" and {len(others) - 1} more" if others else "", reason),
        )
    return {name: BACKENDS["dequant"] if name in others else backend for name in specs}


def packed_bytes(
    specs: dict[str, ModuleSpec], backend: QuantBackend, dtype: torch.dtype, *, sym: bool
) -> int:
    """Bytes that all the modules keep, biases left out."""
    chosen = assign_backends(specs, backend, dtype)
    return sum(chosen[name].num_bytes(spec, dtype, sym=sym) for name, spec in specs.items())
