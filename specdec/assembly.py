"""From names to a running engine: resolve, check, plan memory, load, connect. Every refusal comes
before weights load.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel

from specdec.attention.select import Choice, select_backend
from specdec.block_pool import BlockPool
from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.kv_cache import KVLayout
from specdec.memory import (
    CPU_KV_BYTES,
    Footprint,
    MemoryPlan,
    free_bytes,
    plan_memory,
    workspace_bytes,
)
from specdec.models.families import check_family, kv_shape, max_context
from specdec.models.lean_model import lean_or_transformers
from specdec.models.loading import (
    ModelSource,
    eos_token_ids,
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
from specdec.proposers.base import Proposer
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.hybrid import HybridProposer
from specdec.proposers.ngram import NgramProposer
from specdec.proposers.none import NoProposer
from specdec.registry import Registry
from specdec.scheduler import Scheduler
from specdec.verifiers.base import AcceptanceRule
from specdec.verifiers.greedy import refuse_sampling
from specdec.verifiers.rejection import rejection
from specdec.verifiers.target_model import TargetModelVerifier

logger = logging.getLogger("specdec")

ModelName: TypeAlias = str | os.PathLike[str] | PreTrainedModel


@dataclass(slots=True)
class ProposerContext:
    """What a proposer factory may use."""

    config: EngineConfig
    draft: PagedModel | None


@dataclass(slots=True)
class Assembled:
    """A running engine and what the user may ask about it."""

    engine: Engine
    tokenizer: Any
    attention: Choice
    memory: MemoryPlan
    description: dict[str, Any] = field(default_factory=dict)


def _draft_model(context: ProposerContext) -> Proposer:
    assert context.draft is not None
    return DraftModelProposer(context.draft, context.config.max_num_batched_tokens)


def _hybrid(context: ProposerContext) -> Proposer:
    assert context.draft is not None
    lookup = NgramProposer(context.config.hybrid_ngram, context.config.hybrid_ngram)
    model = DraftModelProposer(context.draft, context.config.max_num_batched_tokens)
    return HybridProposer(lookup, model)


def _ngram(context: ProposerContext) -> Proposer:
    return NgramProposer(context.config.ngram_min, context.config.ngram_max)


PROPOSERS: Registry[Callable[[ProposerContext], Proposer]] = Registry(
    "proposer",
    "specdec.proposers",
    {
        "draft_model": _draft_model,
        "hybrid": _hybrid,
        "ngram": _ngram,
        "none": lambda context: NoProposer(),
    },
)
NEEDS_DRAFT = ("draft_model", "hybrid")
NEEDS_NO_DRAFT = ("ngram", "none")
# Steps in which every row is greedy compare with the argmax under any rule; the rule is for others.
ACCEPTANCE_RULES: Registry[AcceptanceRule] = Registry(
    "acceptance rule",
    "specdec.verifiers",
    {"rejection": rejection, "greedy": refuse_sampling},
)


@dataclass(slots=True)
class _Part:
    """One model on its way: source, and the module once it is in memory."""

    role: str
    source: ModelSource
    model: PreTrainedModel | None
    dtype: torch.dtype

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
            loaded = (own_bytes if self.shared else weight_bytes)(self.source, self.dtype)
        return Footprint(self.role, loaded, layout)


def assemble(
    target: ModelName,
    draft: ModelName | None,
    config: EngineConfig,
    *,
    tokenizer: Any = None,
    progress: bool = True,
) -> Assembled:
    """Build an engine. Raises ValueError, ImportError or FileNotFoundError with a remedy."""
    device = resolve_device(config.device, target)
    proposer_name = _proposer_name(config, draft is not None)
    make_proposer = PROPOSERS.get(proposer_name)
    if proposer_name in NEEDS_NO_DRAFT and draft is not None:
        logger.info("the draft stays unloaded: proposer %r does not use it", proposer_name)
        draft = None
    rule = ACCEPTANCE_RULES.get(config.acceptance)
    part = partial(_part, config=config, device=device, progress=progress)
    target_part = part("target", target)
    parts = [target_part] if draft is None else [target_part, part("draft", draft)]
    own_tokenizer = tokenizer or load_tokenizer(target_part.source)
    if draft is not None:
        _check_pair(own_tokenizer, *parts)
    geometry = [(p.dtype, kv_shape(p.source.config).head_dim) for p in parts]
    choice = select_backend(config.attention, device, geometry)
    block_size = _block_size(config.block_size, choice)
    memory = _plan(parts, config, device, block_size)
    loaded = [_load(p, parts[0], choice, device, config, progress) for p in parts]
    models = [model for model, _ in loaded]
    for model in models:
        model.attach(memory.num_blocks, block_size)
    pool = BlockPool(memory.num_blocks, block_size, config.enable_prefix_caching)
    proposer = make_proposer(ProposerContext(config, models[1] if draft is not None else None))
    engine = Engine(
        models[0],
        proposer,
        TargetModelVerifier(models[0], rule, config.acceptance),
        pool,
        Scheduler(
            pool,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=memory.max_model_len,
            num_draft_tokens=config.num_draft_tokens,
            proposer_max_len=proposer.max_model_len,
        ),
        tokenizer=own_tokenizer,
        eos_ids=eos_token_ids(target_part.source, target_part.model, own_tokenizer),
    )
    description = {
        **_describe(parts, config, memory),
        "proposer": proposer_name,
        "linears": loaded[0][1],
        "attention": choice.backend.name,
        "attention_reason": choice.reason,
        "device": str(device),
        "block_size": block_size,
    }
    return Assembled(engine, own_tokenizer, choice, memory, description)


def _check_pair(tokenizer: Any, target: _Part, draft: _Part) -> None:
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


def _proposer_name(config: EngineConfig, has_draft: bool) -> str:
    """The proposer that will run. Raises ValueError if it needs a draft and there is none."""
    if config.proposer != "auto":
        PROPOSERS.get(config.proposer)  # a wrong name is refused at K = 0 too
    if config.num_draft_tokens == 0:
        return "none"
    if config.proposer == "auto":
        return "draft_model" if has_draft else "ngram"
    if config.proposer in NEEDS_DRAFT and not has_draft:
        raise ValueError(f"proposer={config.proposer!r} needs a draft model: give draft=...")
    return config.proposer


def _describe(parts: list[_Part], config: EngineConfig, memory: MemoryPlan) -> dict[str, Any]:
    return {
        "target": parts[0].source.name,
        "draft": parts[1].source.name if len(parts) > 1 else None,
        "num_draft_tokens": config.num_draft_tokens,
        "acceptance": config.acceptance,
        "dtype": str(parts[0].dtype).removeprefix("torch."),
        "num_blocks": memory.num_blocks,
        "max_model_len": memory.max_model_len,
    }


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


def _part(
    role: str, name: ModelName, *, config: EngineConfig, device: torch.device, progress: bool
) -> _Part:
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
        return _Part(role, source_from_model(name), name, name.dtype)
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
    part = _Part(role, source, None, resolve_dtype(config.dtype, source.config, device))
    if role == "target" and part.shared:
        raise ValueError(
            f"{source.name} is a draft that borrows its target's embedding: give it as draft="
        )
    return part


def _block_size(asked: int | None, choice: Choice) -> int:
    sizes = choice.backend.block_sizes()
    if asked is None:
        return sizes[0]
    if asked not in sizes:
        raise ValueError(
            f"block_size {asked} cannot be read by attention {choice.backend.name!r}, which takes "
            f"{', '.join(map(str, sizes))}; change block_size or attention"
        )
    return asked


def _plan(
    parts: list[_Part], config: EngineConfig, device: torch.device, block_size: int
) -> MemoryPlan:
    text = parts[0].source.config.get_text_config()
    native = max_context(parts[0].source.config)
    if config.max_model_len is not None and config.max_model_len > native:
        raise ValueError(
            f"max_model_len {config.max_model_len} is past the target's context of {native} "
            f"tokens; lower it"
        )
    width = text.hidden_size + getattr(text, "intermediate_size", 4 * text.hidden_size)
    return plan_memory(
        [part.footprint() for part in parts],
        available_bytes=free_bytes(device),
        utilization=config.memory_utilization,
        workspace=workspace_bytes(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.num_draft_tokens,
            text.vocab_size,
            width,
        ),
        block_size=block_size,
        max_model_len=config.max_model_len or native,
        shrink=config.max_model_len is None,
        max_num_seqs=config.max_num_seqs,
        num_draft_tokens=config.num_draft_tokens,
        num_blocks=config.num_blocks,
        kv_limit=CPU_KV_BYTES if device.type == "cpu" else None,
    )


def _load(
    part: _Part,
    target: _Part,
    choice: Choice,
    device: torch.device,
    config: EngineConfig,
    progress: bool,
) -> tuple[PagedModel, str]:
    """The model, ready but for its KV, and how its products are kept."""
    owned = part.model is None
    if part.model is None and part.shared:
        assert target.model is not None  # loaded first
        part.model = load_shared_draft(part.source, target.model)
    elif part.model is None:
        part.model = load_model(part.source, device=device, dtype=part.dtype, progress=progress)
    else:
        part.model.eval()
        part.model.set_attn_implementation(ATTENTION_NAME)
    paged = lean_or_transformers(
        part.model,
        choice.backend,
        owned=owned,
        cpu_linear=config.cpu_linear,
        lookahead=config.num_draft_tokens,
    )
    return paged
