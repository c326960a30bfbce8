"""GGUF files: read once with the `gguf` package, kept as a safetensors folder in the user's
cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from safetensors.torch import save_file

from specdec.models.gguf_tokenizer import write_tokenizer

FORMAT = 1  # raise when the converted folder changes
SHARD_BYTES = 2 << 30
STORED = {"F16": torch.float16, "BF16": torch.bfloat16}  # GGUF type -> kept as it is
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def cache_dir() -> Path:
    """Where converted models are kept: $XDG_CACHE_HOME/specdec, by default ~/.cache/specdec."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "specdec"


def convert_gguf(path: Path, *, progress: bool = True, cache: Path | None = None) -> Path:
    """The folder with the file's weights, config and tokenizer; converted at first use, then only
    found. It lies in `cache`; None = cache_dir().

    Raises ValueError for a damaged file, an architecture other than llama, qwen2, qwen3, or a
    variant of these that the config cannot say.
    """
    stat = path.stat()
    key = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{FORMAT}"
    name = f"{path.stem[:80]}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    return build_once(
        (cache or cache_dir()) / "gguf" / name,
        lambda folder: write_folder(path, folder, progress=progress),
    )


def build_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """Make `folder` by `write(temporary folder)`, whole or not at all, also when two processes
    start at once.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f"{folder.name}.lock") as alone:
            if folder.is_dir():
                return folder
            if alone:  # what a killed process left behind
                for stale in folder.parent.iterdir():
                    if stale.name.startswith(f"{folder.name}.") and stale.is_dir():
                        shutil.rmtree(stale, ignore_errors=True)
            _build(folder, write)
    except PermissionError as error:
        raise ValueError(
            f"the cache {folder.parent} cannot be written ({error}); set XDG_CACHE_HOME to a "
            f"folder that can"
        ) from error
    return folder


def _build(folder: Path, write: Callable[[Path], None]) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        write(temporary)
        try:
            temporary.replace(folder)
        except OSError:
            if not folder.is_dir():  # else another process without a lock was quicker
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_folder(path: Path, folder: Path, *, progress: bool = True) -> None:
    """Write config.json, safetensors and the tokenizer of a GGUF file into a folder."""
    reader, fields = _open(path)
    config = gguf_config(path, fields, {tensor.name: tensor for tensor in reader.tensors})
    _write_tensors(path, reader, config, folder, progress)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    ends = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    generation: dict[str, Any] = {
        "eos_token_id": sorted({int(end) for end in ends if end is not None})
    }
    if "bos_token_id" in config:
        generation["bos_token_id"] = config["bos_token_id"]
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    try:
        write_tokenizer(path, fields, folder)
    except KeyError as error:
        raise ValueError(f"{path} lacks the field {error}; download it again") from error


def _open(path: Path) -> tuple[Any, dict[str, Any]]:
    """The reader and the metadata."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        end = max((int(t.data_offset) + int(t.n_bytes) for t in reader.tensors), default=0)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the reader raises whatever a damaged byte leads to
        raise ValueError(f"{path} is not a whole GGUF file ({error}); download it again") from error
    if end > path.stat().st_size:
        raise ValueError(
            f"{path} has {path.stat().st_size} bytes, its header needs {end}; download it again"
        )
    return reader, fields


def _write_tensors(
    path: Path, reader: Any, config: dict[str, Any], folder: Path, progress: bool
) -> None:
    """Dequantise into files of about SHARD_BYTES: a large model is never in memory as a whole."""
    console = Console(stderr=True, quiet=not progress)
    shard: dict[str, torch.Tensor] = {}
    files: dict[str, str] = {}  # tensor -> file
    size = 0
    last = reader.tensors[-1] if reader.tensors else None
    for tensor in track(reader.tensors, f"converting {path.name}", console=console, transient=True):
        name = _tensor_name(tensor.name)
        if name is not None:
            shard[name] = _values(path, tensor, name, config)
            size += shard[name].nbytes
        if shard and (size > SHARD_BYTES or tensor is last):
            file = f"model-{len(set(files.values())) + 1:05d}.safetensors"
            save_file(shard, folder / file, {"format": "pt"})
            files |= dict.fromkeys(shard, file)
            shard, size = {}, 0
    if len(set(files.values())) == 1:
        (folder / file).rename(folder / "model.safetensors")
        return
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _values(path: Path, tensor: Any, name: str, config: dict[str, Any]) -> torch.Tensor:
    """One tensor. float32, since a dequantised value (scale * integer + offset) needs more bits
    than the 16-bit formats have; what is stored in one of these stays in it.
    """
    from gguf.quants import dequantize

    shape = tuple(int(n) for n in reversed(tensor.shape))
    try:
        values = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"{path}: tensor {tensor.name} cannot be read ({error})") from error
    values = np.asarray(values, dtype=np.float32)
    if config["model_type"] == "llama" and ".q_proj." in name:
        values = unpermute(values, config["num_attention_heads"])
    if config["model_type"] == "llama" and ".k_proj." in name:
        values = unpermute(values, config["num_key_value_heads"])
    return torch.from_numpy(np.array(values)).to(STORED.get(tensor.tensor_type.name, torch.float32))


def unpermute(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Undo the row order that llama.cpp stores q and k in (rotary pairs interleaved) for
    transformers' halves.
    """
    pairs = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def gguf_config(path: Path, fields: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """The transformers config that the metadata and the tensors describe."""
    arch = fields.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ValueError(
            f"{path} has architecture {arch!r}; GGUF files are read for "
            f"{', '.join(ARCHITECTURES)}: give the model as a transformers folder"
        )
    if "token_embd.weight" not in tensors:
        raise ValueError(f"{path} lacks the tensor token_embd.weight; download it again")
    own = {k.removeprefix(f"{arch}."): v for k, v in fields.items() if k.startswith(f"{arch}.")}
    try:
        config = _dimensions(own)
    except KeyError as error:
        raise ValueError(
            f"{path} lacks the field {arch}.{error.args[0]}; download it again"
        ) from error
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: {error}, which is not read from GGUF; give the model as a transformers folder"
        ) from error
    types = {t.tensor_type.name for name, t in tensors.items() if len(t.shape) > 1}
    stored = STORED.get(types.pop(), torch.float32) if len(types) == 1 else torch.float32
    config |= {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
        "torch_dtype": str(stored).removeprefix("torch."),
    }
    if arch == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    scaling = _rope_scaling(path, own, config, tensors.get("rope_freqs.weight"))
    if scaling:
        config["rope_scaling"] = scaling
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = fields.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            config[f"{name}_token_id"] = int(token)
    return config


def _dimensions(own: dict[str, Any]) -> dict[str, Any]:
    heads = int(own["attention.head_count"])
    hidden = int(own["embedding_length"])
    head_dim = int(own.get("attention.key_length") or hidden // heads)
    context = int(own["context_length"])
    if int(own.get("rope.dimension_count") or head_dim) != head_dim:
        raise ValueError("rotary positions cover a part of each head")
    if 0 < int(own.get("attention.sliding_window") or 0) < context:
        raise ValueError("attention has a sliding window")
    counts = ("feed_forward_length", "block_count", "attention.head_count_kv")
    if any(isinstance(own.get(name), list) for name in counts):
        raise ValueError("layers differ in size")
    return {
        "hidden_size": hidden,
        "intermediate_size": int(own["feed_forward_length"]),
        "num_hidden_layers": int(own["block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(own.get("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": float(own["attention.layer_norm_rms_epsilon"]),
        "rope_theta": float(own.get("rope.freq_base", 10000.0)),
    }


def _rope_scaling(
    path: Path, own: dict[str, Any], config: dict[str, Any], freqs: Any
) -> dict[str, Any] | None:
    """The rotary scaling, from the metadata or, as Llama 3.1 and later have it, from divisors of
    the frequencies. What cannot be said in a config is refused, never left out.
    """
    kind = own.get("rope.scaling.type", "none")
    factor = float(own.get("rope.scaling.factor") or 1.0)
    original = own.get("rope.scaling.original_context_length")
    if freqs is not None:
        divisors = np.array(freqs.data, dtype=np.float32).reshape(-1)
        scaling = {**LLAMA3_ROPE, "factor": float(divisors.max())}
        if np.allclose(divisors, _llama3_divisors(scaling, config), rtol=1e-3):
            return scaling
        kind = "rope_freqs.weight"
    if kind == "none" or (factor == 1.0 and kind in ("linear", "yarn")):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and original:
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": int(original),
        }
    raise ValueError(
        f"{path} scales its rotary positions by {kind!r}, which is not read from GGUF; give the "
        f"model as a transformers folder"
    )


def _llama3_divisors(scaling: dict[str, Any], config: dict[str, Any]) -> np.ndarray[Any, Any]:
    """What Llama 3 divides its rotary frequencies by: 1 for short waves, factor for long ones,
    blended between.
    """
    pairs = np.arange(0, config["head_dim"], 2) / config["head_dim"]
    waves = 2 * np.pi * config["rope_theta"] ** pairs
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / waves
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    divisors: np.ndarray[Any, Any] = 1.0 / ((1.0 - blend) / scaling["factor"] + blend)
    return divisors


def _tensor_name(name: str) -> str | None:
    if name in TENSORS:
        return TENSORS[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_TENSORS:
        return f"model.layers.{parts[1]}.{LAYER_TENSORS[parts[2]]}.{parts[3]}"
    if name == "rope_freqs.weight":
        return None  # becomes part of the config
    raise ValueError(f"GGUF tensor {name!r} is not known for this architecture")


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold a file lock where the platform has one (True); elsewhere the atomic rename decides."""
    try:
        import fcntl
    except ImportError:
        yield False
        return
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield True
