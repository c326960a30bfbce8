"""Safetensors files of a folder: found, and their headers checked before any tensor is read."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor is and what it looks like."""

    file: Path
    dtype: str  # safetensors' own name: "F16", "I32", ...
    shape: tuple[int, ...]


def check_weights(folder: Path, *, any_name: bool = False) -> None:
    """Refuse pickled, missing, truncated or corrupt weights before anything is loaded."""
    for file in find_weights(folder, any_name=any_name):
        read_header(file)


def find_weights(folder: Path, *, any_name: bool = False) -> list[Path]:
    """The safetensors files of a model: model.safetensors, or the shards of its index.

    any_name: take another index, or else a single file of any name, too (old GPTQ checkpoints).
    Raises FileNotFoundError or ValueError with the remedy; pickled files are never opened.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():
        return [single]
    if index.is_file():
        return _shards(index)
    if any_name:
        others = sorted(folder.glob("*.safetensors.index.json"))
        if len(others) == 1:
            return _shards(others[0])
        files = sorted(folder.glob("*.safetensors"))
        if len(files) == 1:
            return files
        if files:
            names = ", ".join(file.name for file in files[:3])
            raise ValueError(
                f"{folder} has {len(files)} weight files ({names}) and no index that orders "
                f"them; keep one, or add {INDEX}"
            )
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLED)
    if pickled:
        raise ValueError(
            f"{folder} has only pickled weights ({pickled[0]}), which can run code when "
            f"opened; convert them to safetensors: load them with transformers and call "
            f"save_pretrained"
        )
    raise FileNotFoundError(
        f"{folder} has no {single.name} and no {index.name}; give a folder with weights"
    )


def read_headers(files: list[Path]) -> dict[str, TensorInfo]:
    """Every tensor of the files by name. Raises ValueError for a damaged file."""
    found: dict[str, TensorInfo] = {}
    for file in files:
        found.update(read_header(file))
    return found


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one file; its last offset must agree with its size."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > size - 8:
                raise ValueError("its header is cut off")
            header = json.loads(stream.read(length))
        entries = {k: v for k, v in header.items() if k != "__metadata__"}
        ends = [v["data_offsets"][1] for v in entries.values()]
        expected = 8 + length + int(max(ends, default=0))
        found = {k: TensorInfo(file, v["dtype"], tuple(v["shape"])) for k, v in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error) as error:
        raise ValueError(
            f"{file} is not a whole safetensors file ({error}); download it again"
        ) from error
    if size != expected:
        raise ValueError(
            f"{file} has {size} bytes, its header says {expected}: cut off or damaged; download "
            f"it again"
        )
    return found


def _shards(index: Path) -> list[Path]:
    """The files that an index names; all of them exist."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [index.parent / name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} cannot be read ({error}); download it again") from error
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(
                f"{index} names {file.name}, which is missing; download it again"
            )
    return files
