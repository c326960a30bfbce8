"""Find a model by name, check it, load its weights once."""

from __future__ import annotations

import difflib
import json
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.utils import cached_file

from specdec.models.default_target import ALIASES
from specdec.models.families import check_family
from specdec.models.gguf_file import convert_gguf

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
ATTENTION = "specdec"  # registered by specdec.models.paged_model


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that was found and may be loaded."""

    name: str  # what the user wrote
    path: str  # local folder with config.json, or hub id
    config: Any
    load_format: str = "auto"  # auto | dummy
    revision: str | None = None
    trust_remote_code: bool = False
    local_files_only: bool = False  # the model is in memory already: nothing is fetched for it

    def hub_options(self) -> dict[str, Any]:
        return {
            "revision": self.revision,
            "trust_remote_code": self.trust_remote_code,
            "local_files_only": self.local_files_only,
        }


def resolve_source(
    name: str | os.PathLike[str],
    *,
    load_format: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> ModelSource:
    """Turn an alias, folder, GGUF file, config.json (dummy) or hub id into a checked source; loads
    no weights.

    Raises FileNotFoundError or ValueError with the remedy: not found, unsupported family, pickled
    or damaged weights.
    """
    text = os.fspath(name)
    path = Path(text).expanduser()
    if text in ALIASES:
        path = ALIASES[text](progress)
    elif path.suffix == ".gguf" and path.is_file():
        path = convert_gguf(path, progress=progress)
    elif path.is_file() and path.suffix == ".json" and load_format == "dummy":
        path = path.parent
    found = str(path) if path.exists() else text
    if not path.exists():
        _check_hub_name(text)
    config = _read_config(found, text, revision, trust_remote_code)
    check_family(config)
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = (
            quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        )
        raise ValueError(
            f"{text} holds quantised weights ({method}), which cannot be loaded yet; use plain "
            f"weights"
        )
    if load_format != "dummy" and path.is_dir():
        check_weights(path)
    return ModelSource(text, found, config, load_format, revision, trust_remote_code)


def source_from_model(model: PreTrainedModel) -> ModelSource:
    """The source of a model that is in memory already."""
    path = model.config.name_or_path
    name = path or type(model).__name__
    return ModelSource(name, path, model.config, local_files_only=True)


def load_model(
    source: ModelSource, *, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> PreTrainedModel:
    """Load the weights onto the device, through accelerate's meta initialisation: never a second
    copy.

    Raises ValueError if a tensor is missing or has another shape than the config says.
    """
    options: dict[str, Any] = {"attn_implementation": ATTENTION, "dtype": dtype}
    if source.load_format == "dummy":
        with torch.device(device), torch.random.fork_rng():
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(
                source.config, trust_remote_code=source.trust_remote_code, **options
            )
    else:
        model = _load_checkpoint(source, device, options)
    model.requires_grad_(False)
    return model.eval()  # type: ignore[no-any-return]


def load_tokenizer(source: ModelSource) -> Any:
    """The tokenizer beside the weights; None for a source without one (dummy weights, or a model
    built in memory).
    """
    if not source.path:
        return None
    try:
        return AutoTokenizer.from_pretrained(source.path, **source.hub_options())
    except (OSError, ValueError, KeyError, TypeError) as error:
        if source.load_format == "dummy" or not os.path.isdir(source.path):
            return None
        names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
        if any((Path(source.path) / name).exists() for name in names):
            raise ValueError(f"the tokenizer in {source.path} cannot be read: {error}") from error
        return None


def weight_bytes(source: ModelSource, dtype: torch.dtype) -> int:
    """Bytes of all parameters in `dtype`, tied ones once, counted on the meta device."""
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(
            source.config, trust_remote_code=source.trust_remote_code
        )
    model.tie_weights()
    count = sum(p.numel() for p in model.parameters())
    return int(count) * dtype.itemsize


def resolve_dtype(name: str, config: Any, device: torch.device) -> torch.dtype:
    """A dtype by name; auto is float32 on the CPU and the checkpoint's own (else bfloat16) on a
    GPU.
    """
    if name == "auto":
        if device.type == "cpu":
            return torch.float32
        own = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
        return own if own in (torch.float16, torch.bfloat16) else torch.bfloat16
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is unknown; use auto, {', '.join(sorted(DTYPES))}")
    return DTYPES[name]


def eos_token_ids(
    source: ModelSource, model: PreTrainedModel | None, tokenizer: Any
) -> frozenset[int]:
    """Every end-of-text id that the generation config, the config and the tokenizer name."""
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    if generation is None and os.path.isdir(source.path):
        try:
            generation = GenerationConfig.from_pretrained(source.path)
        except OSError:
            generation = None
    text = source.config.get_text_config()
    for holder in (generation, text, tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        found.update(ids if isinstance(ids, list | tuple) else () if ids is None else (ids,))
    return frozenset(found)


def check_weights(folder: Path) -> None:
    """Refuse pickled, missing, truncated or corrupt weights before anything is loaded."""
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        for name in names:
            if not (folder / name).is_file():
                raise FileNotFoundError(
                    f"{index} names {name}, which is missing; download it again"
                )
        files = [folder / name for name in names]
    if not files:
        pickled = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
        if pickled:
            raise ValueError(
                f"{folder} has only pickled weights ({pickled[0]}), which can run code when "
                f"opened; convert them to "
                f"safetensors: load them with transformers and call save_pretrained"
            )
        raise FileNotFoundError(f"{folder} has no *.safetensors file; give a folder with weights")
    for file in files:
        _check_safetensors(file)


def _check_safetensors(file: Path) -> None:
    """Compare the header's last offset with the file's size."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > size - 8:
                raise ValueError("its header is cut off")
            header = json.loads(stream.read(length))
    except (ValueError, struct.error) as error:
        raise ValueError(
            f"{file} is not a whole safetensors file ({error}); download it again"
        ) from error
    ends = [v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"]
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise ValueError(
            f"{file} has {size} bytes, its header says {expected}: truncated; download it again"
        )


def _check_hub_name(text: str) -> None:
    if HUB_ID.fullmatch(text) and not text.startswith((".", "/", "~")):
        return
    near = difflib.get_close_matches(text, ALIASES, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known aliases: {', '.join(ALIASES)}"
    raise FileNotFoundError(
        f"no model {text!r}: no such folder or GGUF file, and no hub id (owner/name); {hint}"
    )


def _read_config(found: str, name: str, revision: str | None, trust_remote_code: bool) -> Any:
    if os.path.isdir(found) and not (Path(found) / "config.json").is_file():
        raise FileNotFoundError(f"{found} has no config.json; give a transformers model folder")
    if os.path.isfile(found):
        raise ValueError(
            f"{name} is a file that is neither GGUF nor (with load_format='dummy') a config.json"
        )
    try:
        return AutoConfig.from_pretrained(
            found, revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        local = os.path.isdir(found)
        remedy = (
            "check its config.json" if local else "give a local folder, or check name and network"
        )
        raise ValueError(
            f"the config of {name} cannot be read ({_first_line(error)}); {remedy}"
        ) from error


def _load_checkpoint(source: ModelSource, device: torch.device, options: dict[str, Any]) -> Any:
    with _errors_named(source):
        if not os.path.isdir(source.path):
            cached_file(source.path, "config.json", revision=source.revision)
        model, info = AutoModelForCausalLM.from_pretrained(
            source.path,
            config=source.config,
            device_map={"": device},
            use_safetensors=True,
            output_loading_info=True,
            **source.hub_options(),
            **options,
        )
    missing = sorted(info.get("missing_keys", ()))
    if missing:
        raise ValueError(
            f"the weights of {source.name} lack {len(missing)} tensors, first {missing[0]!r}; "
            f"check the files"
        )
    wrong = sorted(str(entry) for entry in info.get("mismatched_keys", ()))
    if wrong:
        raise ValueError(f"the weights of {source.name} do not fit its config: {wrong[0]}")
    return model


@contextmanager
def _errors_named(source: ModelSource) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, KeyError) as error:
        raise ValueError(
            f"the weights of {source.name} cannot be loaded: {_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
