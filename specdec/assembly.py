"""From names to a running engine: resolve, check, plan memory, load, connect. Every refusal comes
before weights load.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from specdec.attention.select import Choice, select_backend
from specdec.block_pool import BlockPool
from specdec.calibration import step_costs
from specdec.config import EngineConfig
from specdec.decode_step import DecodeStep
from specdec.engine import Engine
from specdec.lookahead import MAX_LOOKAHEAD, PRIORS, SEEDED_LOOKAHEAD, LookaheadChooser
from specdec.memory import (
    CPU_KV_BYTES,
    MemoryPlan,
    free_bytes,
    plan_memory,
    workspace_bytes,
)
from specdec.model_pair import (
    ModelName,
    Part,
    check_parts,
    find_part,
    load_part,
    resolve_device,
)
from specdec.models.families import kv_shape, max_context
from specdec.models.loading import eos_token_ids, load_tokenizer
from specdec.models.paged_model import PagedModel
from specdec.proposers.base import Proposer
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.hybrid import HybridProposer
from specdec.proposers.ngram import NgramProposer
from specdec.proposers.none import NoProposer
from specdec.registry import Registry
from specdec.scheduler import Scheduler
from specdec.step_graph import GraphStep
from specdec.verifiers.base import AcceptanceRule
from specdec.verifiers.greedy import refuse_sampling
from specdec.verifiers.rejection import rejection
from specdec.verifiers.target_model import TargetModelVerifier

logger = logging.getLogger("specdec")


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
DEFAULT_LOOKAHEAD = 5  # of a proposer, or on a device, whose costs are not measured
NEEDS_DRAFT = ("draft_model", "hybrid")
NEEDS_NO_DRAFT = ("ngram", "none")
# Steps in which every row is greedy compare with the argmax under any rule; the rule is for others.
ACCEPTANCE_RULES: Registry[AcceptanceRule] = Registry(
    "acceptance rule",
    "specdec.verifiers",
    {"rejection": rejection, "greedy": refuse_sampling},
)


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
    draft = _used(draft, proposer_name)
    rule = ACCEPTANCE_RULES.get(config.acceptance)
    part = partial(find_part, config=config, device=device, progress=progress)
    target_part = part("target", target)
    parts = [target_part] if draft is None else [target_part, part("draft", draft)]
    own_tokenizer = tokenizer or load_tokenizer(target_part.source)
    check_parts(own_tokenizer, parts, config.quant_backend)
    geometry = [(p.dtype, kv_shape(p.source.config).head_dim) for p in parts]
    choice = select_backend(config.attention, device, geometry)
    block_size = _block_size(config.block_size, choice)
    lookahead = _largest_lookahead(config, proposer_name, device)
    memory = _plan(parts, config, device, block_size, lookahead)
    typical = SEEDED_LOOKAHEAD if config.num_draft_tokens is None else lookahead
    load = partial(load_part, target=target_part, choice=choice, device=device, config=config)
    loaded = [load(p, lookahead=typical, progress=progress) for p in parts]
    models, linears = [model for model, _ in loaded], loaded[0][1]
    for model in models:
        model.attach(memory.num_blocks, block_size)
    chooser = _chooser(config, proposer_name, device, parts, models, [choice.backend.name, linears])
    pool = BlockPool(memory.num_blocks, block_size, config.enable_prefix_caching)
    context = ProposerContext(config, models[1] if draft is not None else None)
    proposer = PROPOSERS.get(proposer_name)(context)
    verifier = TargetModelVerifier(models[0], rule, config.acceptance)
    engine = Engine(
        _step(config, models[0], proposer, verifier, lookahead),
        pool,
        Scheduler(
            pool,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=memory.max_model_len,
            num_draft_tokens=lookahead,
            proposer_max_len=proposer.max_model_len,
            chooser=chooser,
        ),
        tokenizer=own_tokenizer,
        eos_ids=eos_token_ids(target_part.source, target_part.model, own_tokenizer),
    )
    description = {
        **_describe(parts, config, memory, choice),
        "device": str(device),
        "proposer": proposer_name,
        "linears": linears,
        **_describe_lookahead(lookahead, chooser),
        "block_size": block_size,
    }
    return Assembled(engine, own_tokenizer, choice, memory, description)


def _step(
    config: EngineConfig,
    target: PagedModel,
    proposer: Proposer,
    verifier: TargetModelVerifier,
    lookahead: int,
) -> DecodeStep:
    """Graphs on CUDA, unless they are switched off; else eager."""
    if target.device.type != "cuda" or not config.cuda_graphs:
        return DecodeStep(target, proposer, verifier)
    return GraphStep(target, proposer, verifier, lookahead=lookahead, max_rows=config.max_num_seqs)


def _used(draft: ModelName | None, proposer_name: str) -> ModelName | None:
    """The draft, unless the proposer has no use for it: then it is not loaded."""
    if proposer_name in NEEDS_NO_DRAFT and draft is not None:
        logger.info("the draft stays unloaded: proposer %r does not use it", proposer_name)
        return None
    return draft


def _largest_lookahead(config: EngineConfig, proposer: str, device: torch.device) -> int:
    """The K asked for, else the largest that may be chosen, or DEFAULT_LOOKAHEAD where costs are
    not measured.
    """
    if config.num_draft_tokens is not None:
        return config.num_draft_tokens
    if proposer == "none":
        return 0
    largest = MAX_LOOKAHEAD if measures_costs(proposer, device) else DEFAULT_LOOKAHEAD
    return min(largest, config.max_num_batched_tokens - 2)


def measures_costs(proposer: str, device: torch.device) -> bool:
    """Whether K, left open, is chosen from measured costs."""
    return proposer in PRIORS and device.type == "cpu"


def _chooser(
    config: EngineConfig,
    proposer: str,
    device: torch.device,
    parts: list[Part],
    models: list[PagedModel],
    kernels: list[str],
) -> LookaheadChooser | None:
    """K by measured costs, unless the user gave K."""
    if config.num_draft_tokens is not None or not measures_costs(proposer, device):
        return None
    about = {
        "models": [
            [p.source.name, str(kv_shape(p.source.config)), str(p.dtype), p.quant_backend]
            for p in parts
        ],
        "kernels": kernels,
    }
    costs = step_costs(models[0], models[1] if len(models) > 1 else None, about)
    return LookaheadChooser(costs, PRIORS[proposer])


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


def _describe(
    parts: list[Part], config: EngineConfig, memory: MemoryPlan, choice: Choice
) -> dict[str, Any]:
    return {
        "attention": choice.backend.name,
        "attention_reason": choice.reason,
        "target": parts[0].source.name,
        "draft": parts[1].source.name if len(parts) > 1 else None,
        "acceptance": config.acceptance,
        "dtype": str(parts[0].dtype).removeprefix("torch."),
        "num_blocks": memory.num_blocks,
        "max_model_len": memory.max_model_len,
    }


def _describe_lookahead(lookahead: int, chooser: LookaheadChooser | None) -> dict[str, Any]:
    if chooser is None:
        return {"num_draft_tokens": lookahead, "lookahead": "given"}
    return {"num_draft_tokens": chooser.best(1), "lookahead": chooser.summary()}


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
    parts: list[Part],
    config: EngineConfig,
    device: torch.device,
    block_size: int,
    lookahead: int,
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
            lookahead,
            text.vocab_size,
            width,
        ),
        block_size=block_size,
        max_model_len=config.max_model_len or native,
        shrink=config.max_model_len is None,
        max_num_seqs=config.max_num_seqs,
        num_draft_tokens=lookahead,
        num_blocks=config.num_blocks,
        kv_limit=CPU_KV_BYTES if device.type == "cpu" else None,
    )
