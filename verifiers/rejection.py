"""rejection: token-level rejection sampling (arXiv 2211.17192, 2302.01318). The output has exactly the target's law."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.sampling.noise import inverse_cdf
from specdec.verifiers.greedy import leading_run


def rejection(
    target_probs: Tensor,
    draft_probs: Tensor | None,
    draft_token_ids: Tensor,
    num_draft_tokens: Tensor,
    accept_uniforms: Tensor,
    recover_uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Keep draft x_i iff u_i q_i(x_i) < p_i(x_i); at the first refusal draw from (p - q)+, else a bonus from p.

    Args:
        target_probs: p [B, K + 1, V] float.
        draft_probs: q [B, K, V] float, exactly the law each draft was drawn from; None = one-hot.
        draft_token_ids: x [B, K] int64; entries at or behind num_draft_tokens are ignored.
        num_draft_tokens: [B] int64.
        accept_uniforms, recover_uniforms: [B, K + 1] in (0, 1), independent of the drafts' noise.

    Returns:
        num_accepted [B] int64 and the recovered or bonus token [B] int64.
    """
    num_drafts = draft_token_ids.shape[1]
    x = draft_token_ids.clamp(0, target_probs.shape[2] - 1)[..., None]  # [B, K, 1]
    px = target_probs[:, :num_drafts].gather(2, x)[..., 0]
    qx = torch.ones_like(px) if draft_probs is None else draft_probs.gather(2, x)[..., 0]
    offsets = torch.arange(num_drafts, device=x.device)
    drafted = offsets < num_draft_tokens[:, None]
    # Strict: p(x) = 0 is refused even where q(x) = 0; u <= 1 - 2^-24, so p == q is always kept.
    num_accepted = leading_run((accept_uniforms[:, :num_drafts] * qx < px) & drafted)
    at = num_accepted[:, None]
    weights = _row(target_probs, at)  # [B, V]
    if num_drafts:
        last = at.clamp(max=num_drafts - 1)
        if draft_probs is None:
            q = torch.zeros_like(weights).scatter_(1, x[..., 0].gather(1, last), 1.0)
        else:
            q = _row(draft_probs, last).to(weights.dtype)
        residual = (weights - q).clamp(min=0)
        refused = (at < num_draft_tokens[:, None]) & (residual.sum(dim=1, keepdim=True) > 0)
        weights = torch.where(refused, residual, weights)
    return num_accepted, inverse_cdf(weights, recover_uniforms.gather(1, at)[:, 0])


def _row(probs: Tensor, at: Tensor) -> Tensor:
    """probs [B, S, V] at position at [B, 1] -> [B, V]."""
    return probs.gather(1, at[..., None].expand(-1, 1, probs.shape[2]))[:, 0]
