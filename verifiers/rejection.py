"""Token-level rejection sampling: the emitted tokens have exactly the target's law."""

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
    """Keep draft x_i iff u_i q_i(x_i) < p_i(x_i), up to the first refusal.

    Source: arXiv 2211.17192, 2302.01318. Probabilities keep their dtype.

    Args:
        target_probs: p [B, K+1, V], behind each draft.
        draft_probs: q [B, K, V], the law that each draft was drawn from; None = one-hot (a
            draft that is a function of the committed tokens).
        draft_token_ids: [B, K] int64; entries at or behind num_draft_tokens are padding.
        num_draft_tokens: [B], drafts really proposed per row.
        accept_uniforms: [B, K+1] in (0, 1), independent of the drafts.
        recover_uniforms: [B, K+1] in (0, 1), independent of the drafts and of accept_uniforms.

    Returns:
        num_accepted [B] int64, and next_token_ids [B] int64: the token recovered from (p - q)+
        at the refused position, or the bonus token from p if none was refused. A token of
        p(x) = 0 is never emitted.
    """
    num_drafts = draft_token_ids.shape[1]
    ids = draft_token_ids.clamp(0, target_probs.shape[-1] - 1)
    p_x = target_probs[:, :num_drafts].gather(2, ids[..., None])[..., 0]
    q_x = 1.0 if draft_probs is None else draft_probs.gather(2, ids[..., None])[..., 0]
    # Strict, without a division: p(x) = 0 is refused even at q(x) = 0, and p == q is always
    # kept, since u <= 1 - 2^-24 makes u * q < q.
    kept = accept_uniforms[:, :num_drafts] * q_x < p_x
    accepted = leading_run(kept, num_draft_tokens)
    weights = _last_token_weights(target_probs, draft_probs, ids, accepted, num_draft_tokens)
    u = recover_uniforms.gather(1, accepted[:, None])[:, 0]
    return accepted, inverse_cdf(weights, u)


def _last_token_weights(
    target_probs: Tensor,
    draft_probs: Tensor | None,
    ids: Tensor,
    accepted: Tensor,
    num_draft_tokens: Tensor,
) -> Tensor:
    """Unnormalised law [B, V] of the token behind the kept drafts; one row per sequence."""
    rows = torch.arange(accepted.shape[0], device=accepted.device)
    p = target_probs[rows, accepted]
    num_drafts = ids.shape[1]
    if num_drafts == 0:
        return p
    at = accepted.clamp(max=num_drafts - 1)
    if draft_probs is None:  # (p - onehot(x))+ is p without x
        residual = p.scatter(1, ids[rows, at][:, None], 0.0)
    else:
        residual = (p - draft_probs[rows, at]).clamp(min=0)
    refused = accepted < num_draft_tokens
    has_mass = residual.amax(dim=-1) > 0  # without: p and q differ by rounding only
    return torch.where((refused & has_mass)[:, None], residual, p)
