"""GPTQ checkpoints written by an independent slow packer: Python integers, one column at a time."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny, tiny_model
from torch import Tensor, nn
from transformers import PreTrainedModel

Lists = list[list[int]]
MODEL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}


def slow_pack(codes: Lists, bits: int) -> Lists:
    """Codes [count][columns] -> words [words][columns], signed: one long number a column."""
    columns = []
    for column in zip(*codes, strict=True):
        number = sum(code << (i * bits) for i, code in enumerate(column))
        length = -(-len(column) * bits // 32)
        words = [(number >> (32 * i)) & 0xFFFFFFFF for i in range(length)]
        columns.append([w - (1 << 32) if w >> 31 else w for w in words])
    return [list(row) for row in zip(*columns, strict=True)]


def slow_unpack(words: Lists, bits: int, count: int) -> Lists:
    columns = []
    for column in zip(*words, strict=True):
        number = sum((word & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(column))
        columns.append([(number >> (i * bits)) & ((1 << bits) - 1) for i in range(count)])
    return [list(row) for row in zip(*columns, strict=True)]


def turned(rows: Lists) -> Lists:
    return [list(row) for row in zip(*rows, strict=True)]


def stored_zeros(zeros: Lists, bits: int, v2: bool) -> Lists:
    """Zero points [G][N] as they are stored; v1 takes one off each, with a borrow from the next
    code of the word (2, 4 and 8 bits), as gptqmodel does.
    """
    words = turned(slow_pack(turned(zeros), bits))
    if v2:
        return words
    if 32 % bits:
        return turned(slow_pack(turned([[z - 1 for z in row] for row in zeros]), bits))
    ones = sum(1 << i for i in range(0, 32, bits))
    found = [[((w & 0xFFFFFFFF) - ones) & 0xFFFFFFFF for w in row] for row in words]
    return [[w - (1 << 32) if w >> 31 else w for w in row] for row in found]


def int32(rows: Lists) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def pack_linear(
    weight: Tensor,
    bits: int,
    group_size: int,
    *,
    sym: bool = True,
    act_order: bool = False,
    v2: bool = False,
    seed: int = 0,
    zero_point: int | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of a packed module for a weight [N, K], and the weight that they stand for.

    zero_point: this one in some groups, whatever the weights are.
    """
    num_rows, num_columns = weight.shape
    size = num_columns if group_size == -1 else group_size
    generator = torch.Generator().manual_seed(seed)
    g_idx = [i // size for i in range(num_columns)]
    if act_order:
        g_idx = [g_idx[i] for i in torch.randperm(num_columns, generator=generator).tolist()]
    top, half = (1 << bits) - 1, 1 << (bits - 1)
    num_groups = max(g_idx) + 1
    rows = weight.detach().tolist()
    scales = [[0.0] * num_rows for _ in range(num_groups)]
    zeros = [[half] * num_rows for _ in range(num_groups)]
    codes = [[0] * num_rows for _ in range(num_columns)]
    dense = [[0.0] * num_columns for _ in range(num_rows)]
    for group in range(num_groups):
        members = [k for k in range(num_columns) if g_idx[k] == group]
        for n, row in enumerate(rows):
            scale = max(2 * max(abs(row[k]) for k in members) / top, 1e-4)
            scale = struct.unpack("e", struct.pack("e", scale))[0]  # as float16
            scales[group][n] = scale
            if not sym:
                zeros[group][n] = 1 + (half + 3 * group + n) % (top - 1)
            if zero_point is not None and n % 3 == 0:
                zeros[group][n] = zero_point
            zero = zeros[group][n]
            for k in members:
                code = min(max(round(row[k] / scale) + zero, 0), top)
                codes[k][n] = code
                dense[n][k] = (code - zero) * scale
    tensors = {
        "qweight": int32(slow_pack(codes, bits)),
        "qzeros": int32(stored_zeros(zeros, bits, v2)),
        "scales": torch.tensor(scales, dtype=torch.float16),
        "g_idx": torch.tensor(g_idx, dtype=torch.int32),
    }
    return tensors, torch.tensor(dense)


def inputs_of(name: str) -> int:
    """Modules of one input share a permutation: this is its seed."""
    kinds = ("q_proj k_proj v_proj", "o_proj", "gate_proj up_proj", "down_proj", "lm_head")
    return next(i for i, kind in enumerate(kinds) if name.rpartition(".")[2] in kind)


def write_gptq(
    folder: Path,
    model: PreTrainedModel | None = None,
    *,
    bits: int = 4,
    group_size: int = 32,
    dynamic: dict[str, dict[str, int]] | None = None,
    head: bool = False,
    config: dict[str, Any] | None = None,
    own_file: bool = False,
    **how: Any,
) -> PreTrainedModel:
    """Write a checkpoint of `model` (a tiny Llama by default); returns the model with the weights
    that the checkpoint stands for.

    Args:
        dynamic: bits and group_size of modules whose names end so.
        config: more fields of quantization_config.
        own_file: write quantize_config.json and leave config.json plain.
        how: of pack_linear.
    """
    dense = copy.deepcopy(model or tiny_model("llama", **MODEL))
    save_tiny(dense, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, module in dense.named_modules():
        if not isinstance(module, nn.Linear) or (name == "lm_head" and not head):
            continue
        setting = {"bits": bits, "group_size": group_size}
        for ending, own in (dynamic or {}).items():
            setting |= own if name.endswith(ending) else {}
        packed, weight = pack_linear(module.weight, **setting, seed=inputs_of(name), **how)
        module.weight = nn.Parameter(weight, requires_grad=False)
        tensors.pop(f"{name}.weight", None)
        tensors |= {f"{name}.{part}": tensor for part, tensor in packed.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    fields = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": how.get("sym", True),
        "desc_act": how.get("act_order", False),
        **({"checkpoint_format": "gptq_v2"} if how.get("v2") else {}),
        **({"dynamic": {f".*{k}": v for k, v in dynamic.items()}} if dynamic else {}),
        **(config or {}),
    }
    if own_file:
        (folder / "quantize_config.json").write_text(json.dumps(fields))
    else:
        edit_config(folder, quantization_config=fields)
    return dense.eval()


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def edit_settings(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= fields
    path.write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@torch.inference_mode()
def plain_logits(model: PreTrainedModel, ids: Iterable[int]) -> Tensor:
    """Logits [T, vocab] of transformers' own forward."""
    model.set_attn_implementation("eager")
    logits: Tensor = model(torch.tensor([list(ids)])).logits[0]
    return logits.float()
