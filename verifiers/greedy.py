"""greedy: a draft stays as long as it is the target's argmax. The rejection rule for a one-hot p."""

from __future__ import annotations

import torch
from torch import Tensor


def leading_run(kept: Tensor) -> Tensor:
    """Length of the leading run of True in each row of kept [B, K] -> [B] int64."""
    return torch.cumprod(kept.to(torch.int64), dim=1).sum(dim=1)


def greedy(
    target_token_ids: Tensor, draft_token_ids: Tensor, num_draft_tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """(num_accepted [B], next_token_ids [B]) from the target's argmax at each position.

    target_token_ids: [B, K + 1] int64; draft_token_ids: [B, K] int64, padding behind num_draft_tokens [B].
    """
    num_drafts = draft_token_ids.shape[1]
    offsets = torch.arange(num_drafts, device=draft_token_ids.device)
    same = (draft_token_ids == target_token_ids[:, :num_drafts]) & (offsets < num_draft_tokens[:, None])
    num_accepted = leading_run(same)
    return num_accepted, target_token_ids.gather(1, num_accepted[:, None])[:, 0]
