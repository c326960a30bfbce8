"""How good a draft is on held-out prompts: beside the target's laws, and in the engine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.config import SamplingParams
from specdec.distill.config import DistillConfig
from specdec.distill.corpus import Conversation, pack_rows
from specdec.distill.trainer import row_inputs, target_hidden
from specdec.llm import LLM
from specdec.models.shared_draft import save_shared_draft
from specdec.sampling.pipeline import align_vocab

EVALUATION_ROWS = 4  # rows of one forward
POSITIONS = 1024  # logits held at once


@torch.no_grad()
def agreement(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    conversations: Sequence[Conversation],
    row_tokens: int,
) -> dict[str, float]:
    """{"top1": share of answer positions where both argmaxes agree, "overlap": mean sum min(p, q),
    "num_positions"} over the answers.
    """
    rows = pack_rows(conversations, row_tokens)
    agreed, overlap, count = 0.0, 0.0, 0
    for first in range(0, rows.num_rows, EVALUATION_ROWS):
        chosen = list(range(first, min(first + EVALUATION_ROWS, rows.num_rows)))
        learned = rows.learned[chosen].to(target.device)
        theirs = target_hidden(target, *row_inputs(target, rows, chosen, target.dtype))[learned]
        own = target_hidden(draft, *row_inputs(target, rows, chosen, torch.float32))[learned]
        for start in range(0, len(own), POSITIONS):
            part = slice(start, start + POSITIONS)
            p, q = _laws(target, draft, theirs[part], own[part])
            agreed += float((p.argmax(dim=-1) == q.argmax(dim=-1)).sum())
            overlap += float(torch.minimum(p, q).sum())
            count += p.shape[0]
    return {"top1": agreed / count, "overlap": overlap / count, "num_positions": count}


def _laws(
    target: PreTrainedModel, draft: PreTrainedModel, theirs: Tensor, own: Tensor
) -> tuple[Tensor, Tensor]:
    p = target.get_output_embeddings()(theirs).float().softmax(dim=-1)
    head = draft.get_output_embeddings()
    logits = align_vocab(head(own.to(head.weight.dtype)).float(), p.shape[-1], draft.token_map)
    return p, logits.softmax(dim=-1)


def in_engine(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    target_name: str,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    config: DistillConfig,
) -> dict[str, Any]:
    """Acceptance of chained drafting, K = num_draft_tokens, as the engine counts it. The draft runs
    as it would be stored, in int8.
    """
    with tempfile.TemporaryDirectory(prefix="specdec-draft.") as folder, _restored(target):
        save_shared_draft(Path(folder), draft, target, target_name, int8=True)
        llm = LLM(
            target,
            folder,
            num_draft_tokens=config.num_draft_tokens,
            max_num_seqs=min(256, config.max_num_seqs),
            memory_utilization=0.5,
            progress=False,
        )
        llm.generate(
            [list(p) for p in prompts],
            SamplingParams(temperature=temperature, max_tokens=config.max_answer_tokens, seed=0),
        )
        stats = llm.stats()
    names = ("acceptance_rate", "mean_accepted_length", "acceptance_by_position")
    return {name: stats[name] for name in names}


@contextmanager
def _restored(target: PreTrainedModel) -> Iterator[None]:
    """An engine takes the target's attention over; give it back."""
    before = target.config._attn_implementation
    try:
        yield
    finally:
        target.set_attn_implementation(before)


def report_on(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    target_name: str,
    held_out: dict[str, list[Conversation]],
    config: DistillConfig,
) -> dict[str, Any]:
    """Greedy and temperature 1: agreement on the target's own texts, acceptance in the engine."""
    training = draft.training
    draft.eval()
    found: dict[str, Any] = {}
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        texts = held_out[name]
        prompts = [c.token_ids[: c.num_prompt] for c in texts]
        found[name] = {
            **agreement(target, draft, texts, config.row_tokens),
            **in_engine(target, draft, target_name, prompts, temperature, config),
        }
    draft.train(training)
    return found
