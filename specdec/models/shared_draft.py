"""A draft that borrows the target's embedding and output head: a folder that holds only the draft's
own layers, perhaps in int8, and the ids that a cut head can give.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec.models.loading import ATTENTION, ModelSource

KEY = "specdec_draft"  # in config.json: {"target": name, "fingerprint": [...]}
WEIGHTS = "model.safetensors"
TOKEN_MAP = "token_map"  # int32 [M]: the target's id of each logit
SCALE = ".scale"  # float32 [rows], beside an int8 tensor of that name
FINGERPRINT_ROWS = 16
TOLERANCE = 0.02  # bf16 or 4-bit copies of one model agree better, other models do not


def is_shared(config: Any) -> bool:
    """Whether a config belongs to a folder that this module wrote."""
    return isinstance(getattr(config, KEY, None), dict)


def fingerprint(target: PreTrainedModel) -> list[float]:
    """Mean absolute value of some rows of the target's embedding: tells models apart, not
    precisions.
    """
    weight = target.get_input_embeddings().weight
    rows = torch.linspace(0, weight.shape[0] - 1, FINGERPRINT_ROWS).long().to(weight.device)
    return [float(f"{v:.6g}") for v in weight[rows].detach().float().abs().mean(dim=1).tolist()]


def new_draft(
    config: Any,
    target: PreTrainedModel,
    token_map: Tensor | None,
    *,
    dtype: torch.dtype,
    attention: str = ATTENTION,
) -> PreTrainedModel:
    """A draft of `config` on the target's device: layers uninitialised, embedding the target's own
    tensor, head the target's own or its rows `token_map` [M] int64. `model.token_map` says which.
    """
    with torch.device("meta"):
        draft: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention
        )
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    with torch.device(target.device):
        rotary = type(draft.base_model.rotary_emb)(config)
    draft.base_model.layers.to_empty(device=target.device)
    draft.base_model.norm.to_empty(device=target.device)
    draft.base_model.rotary_emb = rotary
    draft.base_model.embed_tokens = embedding
    if token_map is None:
        draft.lm_head = head
    else:
        ids = token_map.to(head.weight.device)
        cut = nn.Linear(head.in_features, len(ids), bias=head.bias is not None, device="meta")
        cut.weight = nn.Parameter(head.weight.detach()[ids], requires_grad=False)
        if head.bias is not None:
            cut.bias = nn.Parameter(head.bias.detach()[ids], requires_grad=False)
        draft.lm_head = cut
    draft.token_map = token_map
    return draft


def save_shared_draft(
    folder: Path, draft: PreTrainedModel, target: PreTrainedModel, target_name: str, *, int8: bool
) -> None:
    """Write config.json and the draft's own tensors; matrices as int8 with one scale a row, or
    bfloat16.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in _own(draft).items():
        value = parameter.detach().float().cpu()
        if value.ndim == 1:
            tensors[name] = value
        elif int8:
            scale = (value.abs().amax(dim=1) / 127).clamp(min=1e-12)
            tensors[name] = (value / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
            tensors[name + SCALE] = scale
        else:
            tensors[name] = value.bfloat16()
    token_map = getattr(draft, TOKEN_MAP)
    if token_map is not None:
        tensors[TOKEN_MAP] = token_map.to(torch.int32).cpu()
    folder.mkdir(parents=True, exist_ok=True)
    config = {**draft.config.to_dict(), "dtype": "float32"}
    config[KEY] = {"target": target_name, "fingerprint": fingerprint(target)}
    temporary = folder / (WEIGHTS + ".part")
    save_file(tensors, temporary, metadata={"format": "pt"})
    os.replace(temporary, folder / WEIGHTS)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_shared_draft(
    source: ModelSource, target: PreTrainedModel, *, cut_head: bool = True
) -> PreTrainedModel:
    """The draft, ready to run, in the dtype of `target`, whose embedding and head it uses; the
    whole head unless `cut_head`.

    Raises ValueError if it was made for another target, or a tensor is missing or misshapen.
    """
    check_target(source, target.config)
    _check_fingerprint(source, target)
    tensors = load_file(Path(source.path) / WEIGHTS)
    token_map = tensors.pop(TOKEN_MAP, None)
    ids = None if token_map is None or not cut_head else token_map.long()
    draft = new_draft(source.config, target, ids, dtype=target.dtype)
    for name, parameter in _own(draft).items():
        value = tensors.pop(name, None)
        if value is None or value.shape != parameter.shape:
            got = "missing" if value is None else f"{list(value.shape)}"
            raise ValueError(
                f"the weights of {source.name} do not fit its config: tensor {name} is {got}, "
                f"{list(parameter.shape)} is needed; make the draft again"
            )
        scale = tensors.pop(name + SCALE, None)
        value = value.float() if scale is None else value.float() * scale[:, None]
        with torch.no_grad():
            parameter.copy_(value)
    return draft.requires_grad_(False).eval()


def check_target(source: ModelSource, target_config: Any) -> None:
    """Refuse, before any weight is loaded, a target that the draft cannot have been made for."""
    made_for = getattr(source.config, KEY)["target"]
    for name in ("hidden_size", "vocab_size"):
        own, theirs = getattr(source.config, name), getattr(target_config, name, None)
        if own != theirs:
            raise ValueError(
                f"the draft {source.name} was made for {made_for!r} with {name} {own}, this "
                f"target has {theirs}; use that target, or distill a draft for this one"
            )


def own_bytes(source: ModelSource, dtype: torch.dtype) -> int:
    """Bytes that the draft adds to its target: layers, norm, and the rows of a cut head."""
    with torch.device("meta"):
        draft = AutoModelForCausalLM.from_config(source.config)
    count = sum(p.numel() for p in _own(draft).values())
    file = Path(source.path) / WEIGHTS
    token_map = load_file(file).get(TOKEN_MAP) if file.is_file() else None
    if token_map is not None:
        count += len(token_map) * source.config.hidden_size
    return int(count) * dtype.itemsize


def _check_fingerprint(source: ModelSource, target: PreTrainedModel) -> None:
    made_for = getattr(source.config, KEY)
    found = fingerprint(target)
    expected = made_for.get("fingerprint", [])
    if len(found) != len(expected) or any(
        abs(a - b) > TOLERANCE * abs(b) + 1e-12 for a, b in zip(found, expected, strict=True)
    ):
        raise ValueError(
            f"the draft {source.name} borrows the embedding of {made_for['target']!r}, and this "
            f"target's embedding is another; use that target, or distill a draft for this one"
        )


def _own(draft: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The parameters that are not the target's."""
    return {
        name: parameter
        for name, parameter in draft.base_model.named_parameters()
        if not name.startswith("embed_tokens.")
    }
