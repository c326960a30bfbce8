"""What a checkpoint says about its quantisation, checked by name and value."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger("specdec")

BITS = (2, 3, 4, 8)
FILE = "quantize_config.json"  # beside the weights, in checkpoints of 2023
FORMATS = ("gptq", "gptq_v2")
METHOD = "gptq"


@dataclass(frozen=True, slots=True)
class ModuleSetting:
    """Bits and group size of one module; group_size -1 = the whole input is one group."""

    bits: int
    group_size: int


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """A GPTQ checkpoint's settings. The tensors say which modules they hold for."""

    bits: int
    group_size: int
    sym: bool = True
    desc_act: bool = False
    v2: bool = False  # zero points are stored as they are; v1 stores them less one
    quantizer: str = ""  # the program that wrote it, lower case
    dynamic: tuple[tuple[str, ModuleSetting | None], ...] = ()  # (pattern, None = left dense)

    def for_module(self, name: str) -> ModuleSetting:
        """The setting of a module: that of the first `dynamic` pattern that matches its name from
        the start, else the common one.
        """
        for pattern, setting in self.dynamic:
            if setting is not None and re.match(pattern, name):
                return setting
        return ModuleSetting(self.bits, self.group_size)


def quantization_fields(config: Any, folder: Path | None) -> dict[str, Any] | None:
    """The raw settings: config.json's quantization_config, else quantize_config.json, else None.

    Args:
        config: transformers' config object.
        folder: the local folder, None if there is none.

    With both and a difference in what they say, config.json wins and a warning says so.
    """
    own = getattr(config, "quantization_config", None)
    if own is not None and not isinstance(own, dict):
        own = own.to_dict() if hasattr(own, "to_dict") else {"quant_method": str(own)}
    file = None if folder is None else folder / FILE
    if file is None or not file.is_file():
        return own
    try:
        beside = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(beside, dict):
            raise ValueError("it holds no object")
    except ValueError as error:
        if own is not None:
            logger.warning("%s cannot be read (%s); config.json is used", file, error)
            return own
        raise ValueError(f"{file} cannot be read ({error}); download it again") from error
    if own is None:
        return {"quant_method": METHOD, **beside}
    for key in ("bits", "group_size", "sym", "desc_act"):
        if key in own and key in beside and own[key] != beside[key]:
            logger.warning(
                "config.json says %s=%r, %s says %r; config.json is used",
                *(key, own[key], FILE, beside[key]),
            )
    return own


def read_quant_config(fields: Mapping[str, Any], name: str) -> QuantConfig:
    """Check the settings of the model `name`. Raises ValueError for a format that is not read, with
    its name.
    """
    method = str(fields.get("quant_method", METHOD)).lower()
    layout = str(fields.get("checkpoint_format") or fields.get("format") or "gptq").lower()
    if method != METHOD:
        raise ValueError(
            f"{name} holds quantised weights ({method}), which cannot be loaded yet; use plain "
            f"weights or a GPTQ checkpoint"
        )
    if fields.get("is_marlin_format") or layout == "marlin":
        raise ValueError(
            f"{name} is packed in Marlin's own format (is_marlin_format), which only its kernel "
            f"reads; use the GPTQ checkpoint that it was made from"
        )
    if layout not in FORMATS:
        raise ValueError(
            f"{name} is packed in the format {layout!r}, which cannot be loaded; use a checkpoint "
            f"in the format gptq or gptq_v2"
        )
    pack = str(fields.get("pack_dtype", "int32")).removeprefix("torch.")
    if pack != "int32":
        raise ValueError(
            f"{name} is packed in {pack} words (pack_dtype), only int32 can be read; quantise it "
            f"again with pack_dtype int32"
        )
    setting = _setting(fields, name, name)
    meta = fields.get("meta")
    quantizer = meta.get("quantizer", "") if isinstance(meta, Mapping) else ""
    return QuantConfig(
        setting.bits,
        setting.group_size,
        sym=bool(fields.get("sym", True)),
        desc_act=bool(fields.get("desc_act", False)),
        v2=layout == "gptq_v2",
        quantizer=str(quantizer).lower(),
        dynamic=_dynamic(fields, name),
    )


def _setting(fields: Mapping[str, Any], name: str, where: str) -> ModuleSetting:
    bits, group_size = fields.get("bits"), fields.get("group_size", 128)
    if bits not in BITS or isinstance(bits, bool):
        raise ValueError(
            f"{name} says bits={bits!r}{_at(name, where)}; {', '.join(map(str, BITS[:-1]))} and "
            f"{BITS[-1]} can be read"
        )
    whole = isinstance(group_size, int) and not isinstance(group_size, bool)
    if not whole or (group_size < 1 and group_size != -1):
        raise ValueError(
            f"{name} says group_size={group_size!r}{_at(name, where)}; a group has 1 weight or "
            f"more, or -1 for a whole row"
        )
    assert isinstance(bits, int) and isinstance(group_size, int)
    return ModuleSetting(bits, group_size)


def _at(name: str, where: str) -> str:
    return "" if name == where else f" for {where}"


def _dynamic(fields: Mapping[str, Any], name: str) -> tuple[tuple[str, ModuleSetting | None], ...]:
    """Rules per module: {"+:pattern" or "pattern": fields to replace, "-:pattern": left dense}."""
    rules = fields.get("dynamic") or {}
    found: list[tuple[str, ModuleSetting | None]] = []
    try:
        for key, replaced in rules.items():
            if key.startswith("-:"):
                found.append((key[2:], None))
            else:
                setting = _setting({**fields, **(replaced or {})}, name, key)
                found.append((key.removeprefix("+:"), setting))
        for pattern, _ in found:
            re.compile(pattern)
    except (AttributeError, TypeError, re.error) as error:
        raise ValueError(
            f"the rules per module (dynamic) of {name} cannot be read ({error}); check its "
            f"quantization_config"
        ) from error
    return tuple(found)
