"""Writes a checkpoint in AutoGPTQ's format, v1 zero points, as other engines read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

import specdec
from specdec.quant.config import FILE
from specdec.quant.packing import pack, pack_zeros
from specdec.quantize.gptq import Codes, Grid
from specdec.weight_files import INDEX, SINGLE

SHARD_BYTES = 4 << 30
META = {"format": "pt"}


def packed_tensors(codes: Codes, bits: int) -> dict[str, Tensor]:
    """qweight, qzeros, scales and g_idx on the CPU."""
    return {
        "qweight": pack(codes.codes.t(), bits).contiguous().cpu(),
        "qzeros": pack_zeros(codes.zeros.t(), bits, v2=False).contiguous().cpu(),
        "scales": codes.scales.t().contiguous().cpu(),
        "g_idx": codes.g_idx.to(torch.int32).contiguous().cpu(),
    }


def write_checkpoint(
    folder: Path,
    model: PreTrainedModel,
    packed: Mapping[str, Mapping[str, Tensor]],
    grid: Grid,
    damping: float,
) -> None:
    """Write weights, config.json and quantize_config.json into an existing folder.

    packed: packed_tensors of each module by name; all other tensors are taken from the model and
    become float16. Raises ValueError for one that float16 cannot hold.
    """
    tensors = {f"{name}.{part}": t for name, parts in packed.items() for part, t in parts.items()}
    head_tied = getattr(model.config, "tie_word_embeddings", False)
    for name, value in model.state_dict().items():
        if name.removesuffix(".weight") in packed or (head_tied and name == "lm_head.weight"):
            continue
        half = value.detach().to(torch.float16).contiguous().cpu()
        if not bool(half.isfinite().all()):
            raise ValueError(
                f"{name} holds numbers that float16 cannot; this model cannot be written in GPTQ's "
                f"format"
            )
        tensors[name] = half
    _save(folder, tensors)
    fields = _settings(grid, damping)
    (folder / FILE).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    config = {**_portable(model.config.to_dict()), "quantization_config": fields}
    text = json.dumps(config, indent=2, default=str) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def _settings(grid: Grid, damping: float) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": grid.bits,
        "group_size": grid.group_size,
        "sym": grid.sym,
        "desc_act": grid.act_order,
        "static_groups": False,
        "true_sequential": True,
        "damp_percent": damping,
        "lm_head": False,
        "model_file_base_name": SINGLE.removesuffix(".safetensors"),
        "meta": {"quantizer": [f"specdec:{specdec.__version__}"]},
    }


def _portable(config: dict[str, Any]) -> dict[str, Any]:
    """Fields under the names of transformers 4 too, which other engines read."""
    config = {**config, "dtype": "float16", "torch_dtype": "float16"}
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
        if rope.get("rope_type", "default") != "default":
            config["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return config


def _save(folder: Path, tensors: dict[str, Tensor]) -> None:
    """One file, or shards with an index."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(tensors, folder / SINGLE, metadata=META)
        return
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata=META)
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
