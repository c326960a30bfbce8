"""The models of a pair on their way in: found, checked, loaded; refused before weights load."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel

from specdec.attention.select import Choice
from specdec.config import EngineConfig
from specdec.kv_cache import KVLayout
from specdec.memory import Footprint
from specdec.models.families import check_family, kv_shape
from specdec.models.lean_model import lean_or_transformers
from specdec.models.loading import (
    ModelSource,
    load_model,
    load_tokenizer,
    resolve_dtype,
    resolve_source,
    source_from_model,
    weight_bytes,
)
from specdec.models.paged_model import ATTENTION_NAME, PagedModel
from specdec.models.shared_draft import check_target, is_shared, load_shared_draft, own_bytes
from specdec.models.vocabulary import check_vocabularies
from specdec.quant.backends import choose_backend

ModelName: TypeAlias = str | os.PathLike[str] | PreTrainedModel


@dataclass(slots=True)
class Part:
    """One model on its way: source, and the module once it is in memory."""

    role: str
    source: ModelSource
    model: PreTrainedModel | None
    dtype: torch.dtype
    device: torch.device
    quant_backend: str | None = None  # what packed weights run on; None: there are none

    @property
    def shared(self) -> bool:
        """Whether it is a draft that borrows the target's embedding and head."""
        return is_shared(self.source.config) and self.source.load_format != "dummy"

    def footprint(self) -> Footprint:
        shape = kv_shape(self.source.config)
        layout = KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, self.dtype)
        if self.model is not None:
            loaded = 0
        else:
            loaded = (
                own_bytes(self.source, self.dtype)
                if self.shared
                else weight_bytes(
                    self.source, self.dtype, self.device, self.quant_backend or "auto"
                )
            )
        return Footprint(self.role, loaded, layout)


def resolve_device(name: str, target: ModelName) -> torch.device:
    """The device asked for; auto takes the target's if it is loaded, else CUDA when there is
    one.
    """
    if name == "auto":
        if isinstance(target, PreTrainedModel):
            return torch.device(target.device)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device {name!r} is not known to torch; use 'cpu' or 'cuda'") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device {name!r} was asked for, torch sees no CUDA device; use device='cpu'"
        )
    return device


def find_part(
    role: str, name: ModelName, *, config: EngineConfig, device: torch.device, progress: bool
) -> Part:
    if isinstance(name, PreTrainedModel):
        check_family(name.config)
        if config.dtype != "auto" and resolve_dtype(config.dtype, None, device) != name.dtype:
            raise ValueError(
                f"the {role} is loaded in {name.dtype}, dtype={config.dtype!r} was asked for; "
                f"convert the model or leave dtype out"
            )
        if name.device != device:
            raise ValueError(
                f"the {role} is on {name.device}, the engine on {device}; move it first"
            )
        return Part(role, source_from_model(name), name, name.dtype, device)
    if not isinstance(name, str | os.PathLike) or isinstance(name, bytes):
        raise ValueError(
            f"the {role} must be an alias, folder, hub id, GGUF file or transformers model, "
            f"got {name!r}"
        )
    source = resolve_source(
        name,
        load_format=config.load_format,
        trust_remote_code=config.trust_remote_code,
        progress=progress,
    )
    packed = source.quant is not None
    dtype = resolve_dtype(config.dtype, source.config, device, packed=packed)
    backend = choose_backend(config.quant_backend, device).name if packed else None
    part = Part(role, source, None, dtype, device, backend)
    if role == "target" and part.shared:
        raise ValueError(
            f"{source.name} is a draft that borrows its target's embedding: give it as draft="
        )
    return part


def check_parts(tokenizer: Any, parts: list[Part], quant_backend: str) -> None:
    """Refuse a draft that does not fit the target, and a backend that is named where no weights are
    packed: it would do nothing.
    """
    if quant_backend != "auto" and all(part.quant_backend is None for part in parts):
        raise ValueError(
            f"quant_backend={quant_backend!r} serves GPTQ checkpoints, and no model here is one; "
            f"leave quant_backend out"
        )
    if len(parts) == 1:
        return
    target, draft = parts
    if draft.shared:  # no tokenizer of its own
        check_target(draft.source, target.source.config)
        draft.dtype = target.dtype
        return
    check_vocabularies(
        tokenizer,
        load_tokenizer(draft.source),
        target.source.config.get_text_config().vocab_size,
        draft.source.config.get_text_config().vocab_size,
    )


def load_part(
    part: Part,
    target: Part,
    choice: Choice,
    device: torch.device,
    config: EngineConfig,
    lookahead: int,
    progress: bool,
) -> tuple[PagedModel, str]:
    """The model, ready but for its KV, and how its products are kept."""
    owned = part.model is None
    if part.model is None and part.shared:
        assert target.model is not None  # loaded first
        part.model = load_shared_draft(part.source, target.model)
    elif part.model is None:
        part.model = load_model(
            part.source,
            device=device,
            dtype=part.dtype,
            progress=progress,
            quant_backend=part.quant_backend or "auto",
        )
    else:
        part.model.eval()
        part.model.set_attn_implementation(ATTENTION_NAME)
    paged, kind = lean_or_transformers(
        part.model,
        choice.backend,
        owned=owned,
        cpu_linear=config.cpu_linear,
        lookahead=lookahead,
    )
    if part.quant_backend is not None:
        kind = f"gptq {part.quant_backend}, {kind}"
    return paged, kind
