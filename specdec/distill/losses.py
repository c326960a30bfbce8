"""The distance of the draft's distribution from the target's, with its gradient written out so that
a chunk of logits is held once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CHUNK = 4096  # positions whose logits are held at once
KL_SHARE_AT_END = 0.3


def loss_weights(progress: float, tv_start: float) -> tuple[float, float]:
    """(KL, total variation) at a share `progress` of the run."""
    return (1.0, 0.0) if progress < tv_start else (KL_SHARE_AT_END, 1.0)


def distribution_loss(
    draft_logits: Tensor, target_logits: Tensor, weights: Tensor, token_map: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Sum over positions of weights[0] KL(p || q) + weights[1] TV(p, q), and its gradient on q's
    logits.

    Args:
        draft_logits: [N, M], target_logits: [N, V], any float dtype; computed in float32.
        weights: [2] float32.
        token_map: [M] int64, the target's id of each draft logit; None if M == V. Mass of p outside
            the map is out of the draft's reach: it counts in TV, and weighs a position's KL.

    Returns (loss [], gradient [N, M] float32). TV = 1 - sum min(p, q).
    """
    log_p = target_logits.float().log_softmax(dim=-1)
    if token_map is not None:
        log_p = log_p[:, token_map]
    p = log_p.exp()
    log_q = draft_logits.float().log_softmax(dim=-1)
    q = log_q.exp()
    mass = p.sum(dim=-1, keepdim=True)
    below = q < p
    kl = (p * (log_p - log_q)).sum()
    overlap = torch.minimum(p, q).sum()
    reach = torch.where(below, q, 0.0).sum(dim=-1, keepdim=True)
    gradient = weights[0] * (mass * q - p) + weights[1] * q * (reach - below.float())
    return weights[0] * kl + weights[1] * (p.shape[0] - overlap), gradient


class _HeadLoss(torch.autograd.Function):
    """Loss over the output heads in chunks; only the gradient of the draft's hidden state is kept.

    The heads are frozen.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        target_hidden: Tensor,
        draft_head: Tensor,
        target_head: Tensor,
        weights: Tensor,
        token_map: Tensor | None,
        chunk_loss: Callable[..., tuple[Tensor, Tensor]],
    ) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        gradient = torch.empty_like(hidden)
        count = max(1, hidden.shape[0])
        for start in range(0, hidden.shape[0], CHUNK):
            rows = slice(start, start + CHUNK)
            loss, on_logits = chunk_loss(
                hidden[rows].to(draft_head.dtype) @ draft_head.T,
                target_hidden[rows].to(target_head.dtype) @ target_head.T,
                weights,
                token_map,
            )
            total += loss
            gradient[rows] = (on_logits.to(draft_head.dtype) @ draft_head).to(hidden.dtype)
        ctx.save_for_backward(gradient / count)
        return total / count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0], None, None, None, None, None, None


def head_loss(
    hidden: Tensor,
    target_hidden: Tensor,
    draft_head: Tensor,
    target_head: Tensor,
    weights: Tensor,
    token_map: Tensor | None,
    chunk_loss: Callable[..., tuple[Tensor, Tensor]] = distribution_loss,
) -> Tensor:
    """Mean loss over positions: hidden, target_hidden [N, H] (behind the final norm), heads [M, H]
    and [V, H].
    """
    loss: Tensor = _HeadLoss.apply(
        hidden, target_hidden, draft_head, target_head, weights, token_map, chunk_loss
    )  # type: ignore[no-untyped-call]
    return loss
