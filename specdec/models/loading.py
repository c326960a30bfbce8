"""Find a model by name, check it, load its weights once."""

from __future__ import annotations

import difflib
import os
import re
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
from transformers.utils import cached_file, logging

from specdec.models.default_target import ALIASES
from specdec.models.families import check_family
from specdec.models.gguf_file import convert_gguf
from specdec.quant.backends import choose_backend
from specdec.quant.config import QuantConfig
from specdec.quant.dummy import PREFIX, dummy_config
from specdec.quant.loading import QuantModel
from specdec.quant.source import fetch_checkpoint, take_settings
from specdec.weight_files import check_weights

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
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json"),
    *("vocab.txt", "spiece.model", "tekken.json"),
)
FILE_SUFFIXES = (".gguf", ".json", ".safetensors", ".bin", ".pt")  # never the end of a hub id
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
    quant: QuantConfig | None = None  # packed weights (GPTQ); None = plain ones

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
    """Turn an alias, folder, GGUF file, config.json (dummy), dummy:SHAPE or hub id into a checked
    source; loads no weights.

    Raises FileNotFoundError or ValueError with the remedy: not found, unsupported family, pickled
    or damaged weights.
    """
    if load_format not in ("auto", "dummy"):
        raise ValueError(f"load_format must be 'auto' or 'dummy', got {load_format!r}")
    text = os.fspath(name)
    if text.startswith(PREFIX):
        shape, packed = dummy_config(text)
        return ModelSource(text, "", shape, "dummy", local_files_only=True, quant=packed)
    path = Path(text).expanduser()
    config_file = None
    if text in ALIASES:
        path = ALIASES[text](progress)
    elif path.is_file() and _is_gguf(path):
        path = convert_gguf(path, progress=progress)
    elif path.is_file() and path.suffix == ".json" and load_format == "dummy":
        path, config_file = path.parent, str(path)
    elif path.is_file():
        raise ValueError(
            f"{text} is a file that is neither GGUF nor (with load_format='dummy') a config.json; "
            f"give the model's folder"
        )
    found = str(path) if path.exists() else text
    if not path.exists():
        _check_hub_name(text)
    config = _read_config(config_file or found, text, revision, trust_remote_code)
    check_family(config)
    quant = take_settings(config, found, text, revision, fetch=load_format != "dummy")
    if quant is not None and not path.exists() and load_format != "dummy":
        found = fetch_checkpoint(text, revision)
    if load_format != "dummy" and os.path.isdir(found):
        check_weights(Path(found), any_name=quant is not None)
    return ModelSource(text, found, config, load_format, revision, trust_remote_code, quant=quant)


def source_from_model(model: PreTrainedModel) -> ModelSource:
    """The source of a model that is in memory already."""
    path = model.config.name_or_path
    name = path or type(model).__name__
    return ModelSource(name, path, model.config, local_files_only=True)


def load_model(
    source: ModelSource,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    progress: bool = True,
    quant_backend: str = "auto",
) -> PreTrainedModel:
    """Load the weights onto the device, through accelerate's meta initialisation: never a second
    copy. `quant_backend` says what packed weights run on.

    Raises ValueError if a tensor is missing or has another shape than the config says.
    """
    options: dict[str, Any] = {"attn_implementation": ATTENTION, "dtype": dtype}
    if source.quant is not None:
        with _errors_named(source):
            packed = _quant_model(source, device, dtype, quant_backend)
            model = packed.load(device, seed=seed, progress=progress)
    elif source.load_format == "dummy":
        with torch.device(device), torch.random.fork_rng():
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(
                source.config, trust_remote_code=source.trust_remote_code, **options
            )
    else:
        model = _load_checkpoint(source, device, options, progress)
    if not getattr(model, "_supports_attention_backend", False):  # a class of remote code
        raise ValueError(
            f"{source.name}: {type(model).__name__} does not take an attention backend, so it "
            f"cannot run on paged KV; use another model"
        )
    model.requires_grad_(False)
    return model.eval()  # type: ignore[no-any-return]


def load_tokenizer(source: ModelSource) -> Any:
    """The tokenizer beside the weights; None for a source without one (dummy weights, or a model
    built in memory).
    """
    folder = Path(source.path)
    local = folder.is_dir()
    if not source.path or (local and not any((folder / n).exists() for n in TOKENIZER_FILES)):
        return None
    try:
        return AutoTokenizer.from_pretrained(source.path, **source.hub_options())
    except Exception as error:  # whatever a damaged file or a missing package leads to
        if source.load_format == "dummy" or not local:
            return None
        raise ValueError(
            f"the tokenizer in {folder} cannot be read ({_first_line(error)}); download it again"
        ) from error


def weight_bytes(
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device | None = None,
    quant_backend: str = "auto",
) -> int:
    """Bytes of all parameters in `dtype`, packed ones as they will be kept on `device` (None: the
    CPU), tied ones once, counted on the meta device.

    Raises ValueError for a config that no model can be built from, or that packed tensors
    contradict.
    """
    if source.quant is not None:
        place = device or torch.device("cpu")
        return _quant_model(source, place, dtype, quant_backend).num_bytes()
    try:
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(
                source.config, trust_remote_code=source.trust_remote_code
            )
    except Exception as error:  # transformers raises whatever a wrong field leads to
        raise ValueError(
            f"no model can be built from the config of {source.name} "
            f"({type(error).__name__}: {_first_line(error)}); check its config.json"
        ) from error
    model.tie_weights()
    count = sum(p.numel() for p in model.parameters())
    return int(count) * dtype.itemsize


def resolve_dtype(
    name: str, config: Any, device: torch.device, *, packed: bool = False
) -> torch.dtype:
    """A dtype by name; auto is float32 on the CPU and the checkpoint's own (else bfloat16) on a
    GPU, float16 for packed weights, whose scales are that.
    """
    if name == "auto":
        if device.type == "cpu":
            return torch.float32
        if packed:
            return torch.float16
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


def _is_gguf(file: Path) -> bool:
    if file.suffix.lower() == ".gguf":
        return True
    with file.open("rb") as stream:
        return stream.read(4) == b"GGUF"


def _check_hub_name(text: str) -> None:
    if text.endswith(FILE_SUFFIXES):
        raise FileNotFoundError(f"no file {text!r}; check the path")
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
    try:
        return AutoConfig.from_pretrained(
            found, revision=revision, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # a config's fields may be wrong in any way
        if "trust_remote_code" in str(error) and not trust_remote_code:
            raise ValueError(
                f"{name} brings Python code of its own, which is not run unasked; read it, then "
                f"set trust_remote_code=True"
            ) from error
        local = os.path.exists(found)
        remedy = (
            "check its config.json" if local else "give a local folder, or check name and network"
        )
        raise ValueError(
            f"the config of {name} cannot be read ({_first_line(error)}); {remedy}"
        ) from error


def _quant_model(
    source: ModelSource, device: torch.device, dtype: torch.dtype, backend: str
) -> QuantModel:
    assert source.quant is not None
    return QuantModel(
        source.config,
        source.quant,
        None if source.load_format == "dummy" else Path(source.path),
        source.name,
        backend=choose_backend(backend, device),
        dtype=dtype,
        attn_implementation=ATTENTION,
        trust_remote_code=source.trust_remote_code,
    )


def _load_checkpoint(
    source: ModelSource, device: torch.device, options: dict[str, Any], progress: bool
) -> Any:
    with _errors_named(source), _quiet(progress):
        if not os.path.isdir(source.path):
            cached_file(source.path, "config.json", revision=source.revision)
        model, info = AutoModelForCausalLM.from_pretrained(
            source.path,
            config=source.config,
            device_map={"": device},
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported below, with the tensor's name
            output_loading_info=True,
            **source.hub_options(),
            **options,
        )
    missing = sorted(info.get("missing_keys", ()))
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(
            f"the weights of {source.name} lack {', '.join(missing[:3])}{more}; download them again"
        )
    extra = sorted(k for k in info.get("unexpected_keys", ()) if ".layers." in k)
    if extra:
        raise ValueError(
            f"the weights of {source.name} hold tensors that its config has no place for, first "
            f"{extra[0]}; check that config and weights belong together"
        )
    for entry in info.get("mismatched_keys", ()):  # transformers 4.57 gives the name alone
        name, *shapes = (entry,) if isinstance(entry, str) else entry
        detail = f" is {list(shapes[0])}, {list(shapes[1])} is needed" if shapes else ""
        raise ValueError(
            f"the weights of {source.name} do not fit its config: tensor {name}{detail}; check "
            f"that config and weights belong together"
        )
    return model


@contextmanager
def _errors_named(source: ModelSource) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, KeyError) as error:
        raise ValueError(
            f"the weights of {source.name} cannot be loaded: {_first_line(error)}"
        ) from error


@contextmanager
def _quiet(progress: bool) -> Iterator[None]:
    """Without transformers' report of missing tensors: they are errors here, told in one line.
    Its progress bar is left out too unless `progress`.
    """
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not progress:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
