"""A GPTQ checkpoint's modules: planned from the files' headers, then read one at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from specdec.quant.config import BITS, QuantConfig
from specdec.quant.packing import (
    WORD,
    QuantWeight,
    num_words,
    pack,
    unpack,
    unpack_zeros,
)
from specdec.weight_files import TensorInfo

logger = logging.getLogger("specdec")

PACKED = ".qweight"
PARTS = ("qweight", "qzeros", "scales", "g_idx")  # and bias, under its usual name
FLOATS = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear layer of the model's own tree."""

    in_features: int
    out_features: int
    has_bias: bool


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """A packed module, as its tensors say; group_size is 1..in_features."""

    name: str
    bits: int
    group_size: int
    in_features: int
    out_features: int
    has_bias: bool
    has_order: bool = False  # it has a g_idx, and more than one group
    zero_bias: bool = False  # it stores a bias that the model has no place for

    @property
    def num_groups(self) -> int:
        return -(-self.in_features // self.group_size)


def plan_modules(
    linears: Mapping[str, LinearShape],
    tensors: Mapping[str, TensorInfo],
    config: QuantConfig,
    source: str,
) -> dict[str, ModuleSpec]:
    """The packed modules by name, in the model's order: those whose qweight is in the files.

    Args:
        linears: the linear layers of the model, by name.
        tensors: the files' headers.
        source: the checkpoint's name, for errors.

    Raises ValueError, with the module's name, where tensors are missing, have another shape or
    dtype, or contradict the config; nothing has been loaded by then.
    """
    names = [name.removesuffix(PACKED) for name in tensors if name.endswith(PACKED)]
    if not names:
        raise ValueError(
            f"{source} says that it is quantised (gptq), and no tensor of it is packed "
            f"(*{PACKED}); take quantization_config out of its config.json, or download it again"
        )
    for name in names:
        if name not in linears:
            raise ValueError(
                f"{source} holds packed weights of {name}, which is no linear layer of the model "
                f"in its config; check that config and weights belong together"
            )
    packed = set(names)
    return {
        name: _plan_module(name, shape, tensors, config, source)
        for name, shape in linears.items()
        if name in packed
    }


def _plan_module(
    name: str,
    shape: LinearShape,
    tensors: Mapping[str, TensorInfo],
    config: QuantConfig,
    source: str,
) -> ModuleSpec:
    def refuse(problem: str) -> NoReturn:
        raise ValueError(
            f"{source}: {name} {problem}; check its config and files, or download it again"
        )

    for part in ("qzeros", "scales"):
        if f"{name}.{part}" not in tensors:
            refuse(f"lacks its tensor {part}")
    setting = config.for_module(name)
    inputs, outputs, bits = shape.in_features, shape.out_features, setting.bits
    rows, _ = _shape_of(tensors, f"{name}.qweight", 2, refuse)
    if inputs * bits % WORD:
        refuse(f"has {inputs} inputs, which fill no whole words at {bits} bits")
    if rows * WORD != inputs * bits:
        held, rest = divmod(rows * WORD, inputs)
        if rest == 0 and held in BITS:
            refuse(f"holds {held} bits a weight, its config says {bits}")
        refuse(
            f"has {rows} words a column, {inputs} inputs at {bits} bits take {_words(inputs, bits)}"
        )
    groups, _ = _shape_of(tensors, f"{name}.scales", 2, refuse)
    size = inputs if setting.group_size == -1 else min(setting.group_size, inputs)
    wanted = -(-inputs // size)
    if groups != wanted:
        refuse(f"has {groups} groups, group_size {setting.group_size} gives {wanted}")
    _check(tensors, f"{name}.qweight", (rows, outputs), ("I32",), refuse)
    _check(tensors, f"{name}.scales", (groups, outputs), FLOATS, refuse)
    _check(tensors, f"{name}.qzeros", (groups, num_words(outputs, bits)), ("I32",), refuse)
    ordered = f"{name}.g_idx" in tensors
    if ordered:
        _check(tensors, f"{name}.g_idx", (inputs,), ("I32", "I64"), refuse)
    biased = f"{name}.bias" in tensors
    if biased:
        _check(tensors, f"{name}.bias", (outputs,), FLOATS, refuse)
    elif shape.has_bias:
        refuse("lacks its tensor bias")
    return ModuleSpec(
        *(name, bits, size, inputs, outputs, shape.has_bias),
        has_order=ordered and groups > 1,
        zero_bias=biased and not shape.has_bias,
    )


def _words(count: int, bits: int) -> int:
    return count * bits // WORD


def _shape_of(
    tensors: Mapping[str, TensorInfo], name: str, ndim: int, refuse: Callable[[str], NoReturn]
) -> tuple[int, ...]:
    shape = tensors[name].shape
    if len(shape) != ndim:
        refuse(f"has a tensor {name.rpartition('.')[2]} of shape {list(shape)}")
    return shape


def _check(
    tensors: Mapping[str, TensorInfo],
    name: str,
    shape: tuple[int, ...],
    dtypes: tuple[str, ...],
    refuse: Callable[[str], NoReturn],
) -> None:
    info, part = tensors[name], name.rpartition(".")[2]
    if info.shape != shape:
        refuse(f"has a tensor {part} of shape {list(info.shape)}, {list(shape)} is needed")
    if info.dtype not in dtypes:
        refuse(f"has a tensor {part} of dtype {info.dtype}, {' or '.join(dtypes)} is needed")


class ModuleReader:
    """Reads packed modules into canonical form.

    read gives a tensor of the files by name, on the device that the model is made for.
    """

    def __init__(
        self, read: Callable[[str], Tensor], config: QuantConfig, dtype: torch.dtype, source: str
    ) -> None:
        self._read, self._config, self._dtype, self._source = read, config, dtype, source
        self._warned: set[str] = set()

    def permutation(self, spec: ModuleSpec) -> Tensor | None:
        """int64 [K]: the input columns sorted by group; None if they are sorted already.

        Raises ValueError if g_idx names groups that do not exist, or of another size.
        """
        if not spec.has_order:
            return None
        g_idx = self._read(f"{spec.name}.g_idx").long()
        if not bool(g_idx.any()):  # some exporters left it empty
            self._warn(f"{spec.name}: g_idx is all zeros; inputs are taken in order")
            return None
        sizes = torch.full((spec.num_groups,), spec.group_size, device=g_idx.device)
        sizes[-1] = spec.in_features - spec.group_size * (spec.num_groups - 1)
        inside = bool(((g_idx >= 0) & (g_idx < spec.num_groups)).all())
        if not inside or not torch.equal(torch.bincount(g_idx, minlength=spec.num_groups), sizes):
            raise ValueError(
                f"{self._source}: {spec.name} has a g_idx that does not give {spec.num_groups} "
                f"groups of {spec.group_size} inputs; check its config and files, or download it "
                f"again"
            )
        perm = g_idx.argsort(stable=True)
        in_order = bool((perm[1:] > perm[:-1]).all())
        return None if in_order else perm

    def weight(self, spec: ModuleSpec) -> QuantWeight:
        """The module, its rows sorted by group, zero points dropped where all are in the middle."""
        words = self._read(f"{spec.name}.qweight")
        perm = self.permutation(spec)
        if perm is not None:
            codes = unpack(words, spec.bits, spec.in_features)
            words = pack(codes[perm], spec.bits)
        zeros: Tensor | None = self._zeros(spec)
        if zeros is not None and bool((zeros == 1 << (spec.bits - 1)).all()):
            zeros = None
        return QuantWeight(
            bits=spec.bits,
            group_size=spec.group_size,
            in_features=spec.in_features,
            out_features=spec.out_features,
            words=words.contiguous(),
            scales=self._read(f"{spec.name}.scales").to(self._dtype),
            zeros=zeros,
            perm=perm,
            bias=self._bias(spec),
        )

    def _zeros(self, spec: ModuleSpec) -> Tensor:
        stored = self._read(f"{spec.name}.qzeros")
        config, last = self._config, (1 << spec.bits) - 1
        if not config.v2 and not config.sym and "gptqmodel" not in config.quantizer:
            codes = unpack(stored.t(), spec.bits, spec.out_features)
            if bool((codes == last).any()):
                self._warn(
                    f"{spec.name} stores a zero point of {last}: this file was perhaps damaged "
                    f"when it was written (a zero point of 0 in the v1 format)"
                )
        return unpack_zeros(stored, spec.bits, spec.out_features, v2=config.v2)

    def _bias(self, spec: ModuleSpec) -> Tensor | None:
        if not spec.has_bias and not spec.zero_bias:
            return None
        bias = self._read(f"{spec.name}.bias")
        if spec.has_bias:
            return bias.to(self._dtype)
        if bool(bias.any()):
            raise ValueError(
                f"{self._source}: {spec.name} has a bias, and the model in its config has none "
                f"there; check that config and weights belong together"
            )
        return None

    def _warn(self, text: str) -> None:
        """Once a checkpoint for each kind of trouble; the first module is named."""
        kind = text.split(" ", 2)[1]
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s: %s", self._source, text)
