"""Greedy acceptance: a draft stays while it is the target's own argmax."""

from __future__ import annotations

import torch
from torch import Tensor


def leading_run(kept: Tensor, num_draft_tokens: Tensor) -> Tensor:
    """Length of the leading run of kept drafts.

    kept [B, K] bool; num_draft_tokens [B], entries at or behind it do not count -> [B] int64.
    """
    offsets = torch.arange(kept.shape[1], device=kept.device)
    drafted = offsets < num_draft_tokens[:, None]
    return (kept & drafted).long().cumprod(dim=1).sum(dim=1)


def greedy(
    target_token_ids: Tensor, draft_token_ids: Tensor, num_draft_tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Keep a draft iff it is the target's token: rejection for one-hot p (arXiv 2211.17192).

    target_token_ids [B, K+1] int64: the argmax of p behind each draft; draft_token_ids [B, K]
    int64, entries at or behind num_draft_tokens [B] are padding. Returns (num_accepted [B] int64,
    next_token_ids [B] int64): the target's own token follows the kept drafts.
    """
    num_drafts = draft_token_ids.shape[1]
    accepted = leading_run(target_token_ids[:, :num_drafts] == draft_token_ids, num_draft_tokens)
    return accepted, target_token_ids.gather(1, accepted[:, None])[:, 0]


def refuse_sampling(
    target_probs: Tensor,
    draft_probs: Tensor | None,
    draft_token_ids: Tensor,
    num_draft_tokens: Tensor,
    accept_uniforms: Tensor,
    recover_uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """The rule of an engine for greedy requests only; called when a step samples: ValueError."""
    raise ValueError(
        "acceptance='greedy' serves greedy requests only, this step samples; "
        "set temperature=0, or acceptance='rejection'"
    )
