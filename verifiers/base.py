"""Verifier: runs the target over the drafts. Verdict: what of them stays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from specdec.decode_state import DecodeState
from specdec.proposers.base import Draft

# (target_probs [B, K+1, V], draft_probs [B, K, V] or None = one-hot, draft_token_ids [B, K],
# num_draft_tokens [B],  accept_uniforms [B, K+1], recover_uniforms [B, K+1]) -> (num_accepted [B],
# next_token_ids [B])
AcceptanceRule = Callable[
    [Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]
]


# Values of Verdict.failed
BAD_LOGITS = 1  # NaN or infinite target logits, or the request's rules left no token
BAD_DRAFT = 2  # a drafted id outside the target's vocabulary, or more drafts than the row may have
BAD_RULE = 3  # the acceptance rule kept more than was drafted, or gave an id outside the vocabulary


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one decode step, on the device until the host reads it."""

    token_ids: (
        Tensor  # [rows, K + 1] int64: accepted drafts, then the recovered or bonus token, then -1
    )
    num_accepted_tokens: Tensor  # [rows] int64
    failed: Tensor  # [rows] int64: 0, or one of the values above
    logits: Tensor  # [rows, K + 1, vocab] float32, the target's raw logits, for log-probabilities


class Verifier(ABC):
    """Decides which drafts stay and what follows them."""

    name: str
    rule_name: str  # the acceptance rule's

    @abstractmethod
    def verify(self, state: DecodeState, draft: Draft) -> Verdict:
        """Run the target over "last committed token + drafts" of every row and judge."""
