"""How many KV blocks fit beside both models' weights and the workspace: counted before any weight
is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

from specdec.kv_cache import KVLayout
from specdec.sequence import blocks_for

CPU_KV_BYTES = 4 << 30  # on a CPU the pool takes no more than this unless num_blocks is given
LOGITS_COPIES = 4  # raw, processed, probabilities, one temporary


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of one model."""

    role: str  # target | draft
    weight_bytes: int  # still to be loaded
    layout: KVLayout


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What the planner decided, in bytes and blocks."""

    num_blocks: int
    max_model_len: int
    block_bytes: int  # one block in all models
    weight_bytes: int
    workspace_bytes: int
    budget_bytes: int


def free_bytes(device: torch.device) -> int:
    """Free memory of the device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def workspace_bytes(
    max_num_seqs: int, max_num_batched_tokens: int, num_draft_tokens: int, vocab: int, width: int
) -> int:
    """Logits of a full verification batch and the activations of a full prefill batch, in float32.

    `width` is the widest activation of a layer (hidden + intermediate size).
    """
    rows = max_num_seqs * (num_draft_tokens + 1)
    return 4 * (LOGITS_COPIES * rows * vocab + 3 * max_num_batched_tokens * width)


def plan_memory(
    models: Sequence[Footprint],
    *,
    available_bytes: int,
    utilization: float,
    workspace: int,
    block_size: int,
    max_model_len: int,
    shrink: bool,
    max_num_seqs: int,
    num_draft_tokens: int,
    num_blocks: int | None = None,
    kv_limit: int | None = None,
) -> MemoryPlan:
    """Decide the number of blocks, enough for max_num_seqs sequences of max_model_len tokens or as
    many as fit.

    One sequence of max_model_len tokens must fit: with `shrink` max_model_len is lowered until it
    does, otherwise, or if nothing fits, ValueError with the numbers and what to change.
    """
    budget = int(available_bytes * utilization)
    weights = sum(model.weight_bytes for model in models)
    block_bytes = sum(model.layout.block_bytes(block_size) for model in models)
    left = budget - weights - workspace
    lookahead = num_draft_tokens + 1

    def refuse(problem: str, remedy: str) -> ValueError:
        parts = ", ".join(f"{m.role} weights {_gib(m.weight_bytes)}" for m in models)
        return ValueError(
            f"{problem}: {_gib(budget)} usable ({utilization:g} of {_gib(available_bytes)} "
            f"free), {parts}, workspace "
            f"{_gib(workspace)}, KV {block_bytes / 2**20:.2f} MiB per block of {block_size} "
            f"tokens; {remedy}"
        )

    fitting = max(left, 0) // block_bytes
    if num_blocks is not None and num_blocks > fitting:
        raise refuse(
            f"num_blocks {num_blocks} does not fit, {fitting} would",
            "lower num_blocks or raise memory_utilization",
        )
    if num_blocks is None:
        num_blocks = min(fitting, blocks_for(max_model_len + lookahead, block_size) * max_num_seqs)
        if kv_limit is not None:
            num_blocks = min(num_blocks, kv_limit // block_bytes)
    longest = num_blocks * block_size - lookahead
    if longest < 2 or (not shrink and longest < max_model_len):
        raise refuse(
            f"{num_blocks} KV blocks hold one sequence of {max(longest, 0)} tokens, "
            f"{max_model_len} are needed",
            "lower max_model_len, use a smaller draft, or raise memory_utilization or num_blocks",
        )
    return MemoryPlan(
        num_blocks, min(max_model_len, longest), block_bytes, weights, workspace, budget
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
