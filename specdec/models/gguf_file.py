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


def convert_gguf(path: Path, *, progress: bool = True) -> Path:
    """The folder with the file's weights, config and tokenizer; converted at first use, then only
    found.

    Raises ValueError for a damaged file or an architecture other than llama, qwen2, qwen3.
    """
    stat = path.stat()
    key = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{FORMAT}"
    name = f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    return build_once(
        cache_dir() / "gguf" / name, lambda folder: write_folder(path, folder, progress=progress)
    )


def build_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """Make `folder` by `write(temporary folder)`, whole or not at all, also when two processes
    start at once.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_suffix(".lock")):
        if folder.is_dir():
            return folder
        temporary = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
        try:
            write(temporary)
            temporary.replace(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def write_folder(path: Path, folder: Path, *, progress: bool = True) -> None:
    """Write config.json, model.safetensors and the tokenizer of a GGUF file into a folder."""
    reader = _open(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(path, fields, {tensor.name for tensor in reader.tensors})
    # float32: a dequantised Q4 or Q8 value (scale * integer + offset) needs more bits than float16
    # has.
    save_file(
        _tensors(path, reader, config, progress), folder / "model.safetensors", {"format": "pt"}
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    eos = {name: config[name] for name in ("bos_token_id", "eos_token_id") if name in config}
    (folder / "generation_config.json").write_text(json.dumps(eos), encoding="utf-8")
    write_tokenizer(path, fields, folder)


def _open(path: Path) -> Any:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        end = max((int(t.data_offset) + int(t.n_bytes) for t in reader.tensors), default=0)
    except Exception as error:  # the reader raises whatever a damaged byte leads to
        raise ValueError(f"{path} is not a whole GGUF file ({error}); download it again") from error
    if end > path.stat().st_size:
        raise ValueError(
            f"{path} has {path.stat().st_size} bytes, its header needs {end}; download it again"
        )
    return reader


def _config(path: Path, fields: dict[str, Any], tensor_names: set[str]) -> dict[str, Any]:
    arch = fields.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ValueError(
            f"{path} has architecture {arch!r}; GGUF files are read for "
            f"{', '.join(ARCHITECTURES)}: "
            f"give the model as a transformers folder"
        )

    def get(name: str, default: Any = None) -> Any:
        value = fields.get(f"{arch}.{name}", default)
        if value is None:
            raise ValueError(f"{path} lacks the field {arch}.{name}; download it again")
        return value

    heads = int(get("attention.head_count"))
    hidden = int(get("embedding_length"))
    config = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_size": hidden,
        "intermediate_size": int(get("feed_forward_length")),
        "num_hidden_layers": int(get("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(get("attention.head_count_kv", heads)),
        "head_dim": int(fields.get(f"{arch}.attention.key_length") or hidden // heads),
        "max_position_embeddings": int(get("context_length")),
        "rms_norm_eps": float(get("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(get("rope.freq_base", 10000.0)),
        "vocab_size": len(fields.get("tokenizer.ggml.tokens") or ()) or int(get("vocab_size")),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = fields.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            config[f"{name}_token_id"] = int(token)
    return config


def _tensors(
    path: Path, reader: Any, config: dict[str, Any], progress: bool
) -> dict[str, torch.Tensor]:
    from gguf.quants import dequantize

    found = {}
    console = Console(stderr=True, quiet=not progress)
    for tensor in track(reader.tensors, f"converting {path.name}", console=console, transient=True):
        name = _tensor_name(tensor.name)
        if name is None:
            continue
        shape = tuple(int(n) for n in reversed(tensor.shape))
        try:
            values = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        except (ValueError, NotImplementedError) as error:
            raise ValueError(f"{path}: tensor {tensor.name} cannot be read ({error})") from error
        values = np.asarray(values, dtype=np.float32)
        if config["model_type"] == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            values = unpermute(values, config[heads])
        found[name] = torch.from_numpy(np.array(values))
    return found


def unpermute(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Undo the row order that llama.cpp stores q and k in (rotary pairs interleaved) for
    transformers' halves.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _tensor_name(name: str) -> str | None:
    if name in TENSORS:
        return TENSORS[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_TENSORS:
        return f"model.layers.{parts[1]}.{LAYER_TENSORS[parts[2]]}.{parts[3]}"
    if name == "rope_freqs.weight":
        return None
    raise ValueError(f"GGUF tensor {name!r} is not known for this architecture")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file lock where the platform has one; elsewhere the atomic rename alone decides."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
