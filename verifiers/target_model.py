"""TargetModelVerifier: one forward of the target over last token + K drafts, then an acceptance
rule.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specdec.decode_state import DecodeState
from specdec.models.paged_model import PagedModel
from specdec.proposers.base import Draft
from specdec.sampling.pipeline import argmax_lowest, invalid_rows, process_logits, to_probs
from specdec.verifiers.base import (
    BAD_DRAFT,
    BAD_LOGITS,
    BAD_RULE,
    AcceptanceRule,
    Verdict,
    Verifier,
)
from specdec.verifiers.greedy import greedy


class TargetModelVerifier(Verifier):
    """Verifies with the request's own sampling pipeline at each position; greedy-only batches skip
    distributions.
    """

    name = "target_model"

    def __init__(self, model: PagedModel, rule: AcceptanceRule, rule_name: str) -> None:
        self.model = model
        self.rule_name = rule_name
        self._rule = rule

    def verify(self, state: DecodeState, draft: Draft) -> Verdict:
        num_drafted = draft.num_draft_tokens.clamp(min=0).minimum(state.draft_limits)
        failed = _bad_draft(state, draft) * BAD_DRAFT
        draft = replace(draft, num_draft_tokens=num_drafted)
        logits = self._forward(state, draft)
        processed = process_logits(logits, state.sampling, draft.token_ids, 0)
        bad = invalid_rows(logits) | invalid_rows(processed)  # [rows, K + 1]
        processed = torch.where(bad[..., None], 0.0, processed)
        accepted, last = self._judge(state, draft, processed)
        wrong = (accepted < 0) | (accepted > num_drafted) | (last < 0) | (last >= state.vocab_size)
        failed = torch.where((failed == 0) & wrong, BAD_RULE, failed)
        # A bad position counts only if the kept run reaches it: behind a refused draft nobody
        # reads it.
        offsets = torch.arange(draft.max_num_draft_tokens + 1, device=state.device)
        reached = (bad & (offsets <= accepted[:, None])).any(dim=1)
        failed = torch.where((failed == 0) & reached, BAD_LOGITS, failed)
        return Verdict(_emitted(draft.token_ids, accepted, last), accepted, failed, logits)

    def _judge(self, state: DecodeState, draft: Draft, processed: Tensor) -> tuple[Tensor, Tensor]:
        """(num_accepted [rows], next token [rows]) by the rule, or by argmax if all are greedy."""
        if state.sampling.all_greedy or state.uniforms is None:
            best = argmax_lowest(processed)
            return greedy(best, draft.token_ids, draft.num_draft_tokens)
        width = draft.max_num_draft_tokens + 1
        judged = self._rule(
            to_probs(processed, state.sampling),
            draft.probs,
            draft.token_ids,
            draft.num_draft_tokens,
            state.uniforms.accept[:, :width],
            state.uniforms.recover[:, :width],
        )
        for part in judged:
            if part.shape != (state.num_rows,) or part.dtype != torch.int64:
                raise ValueError(
                    f"acceptance rule {self.rule_name!r} returned {part.dtype} of shape "
                    f"{tuple(part.shape)}, needed are two int64 tensors of shape "
                    f"({state.num_rows},)"
                )
        return judged

    def _forward(self, state: DecodeState, draft: Draft) -> Tensor:
        """Raw logits [rows, K + 1, V]: position j is the target's law behind draft j."""
        num_drafts = draft.max_num_draft_tokens
        token_ids = torch.cat(
            (state.last_token_ids[:, 1:], draft.token_ids.clamp(0, state.vocab_size - 1)), dim=1
        )
        batch = state.append_batch(
            token_ids,
            state.seq_lens - 1,
            draft.num_draft_tokens + 1,
            state.max_len + num_drafts,
            torch.arange(token_ids.numel(), device=state.device),
        )
        logits = self.model.forward(batch)
        return logits.view(state.num_rows, num_drafts + 1, -1)


def _bad_draft(state: DecodeState, draft: Draft) -> Tensor:
    """[rows] bool: a proposer drafted an unknown id, or a number out of range."""
    offsets = torch.arange(draft.max_num_draft_tokens, device=state.device)
    drafted = offsets < draft.num_draft_tokens[:, None]
    unknown = (draft.token_ids < 0) | (draft.token_ids >= state.vocab_size)
    allowed = state.draft_limits.clamp(max=draft.max_num_draft_tokens)
    wrong_number = (draft.num_draft_tokens < 0) | (draft.num_draft_tokens > allowed)
    return (unknown & drafted).any(dim=1) | wrong_number


def _emitted(draft_token_ids: Tensor, accepted: Tensor, last: Tensor) -> Tensor:
    """[rows, K + 1]: the first `accepted` drafts, then `last`, then -1."""
    num_rows, num_drafts = draft_token_ids.shape
    offsets = torch.arange(num_drafts + 1, device=accepted.device)
    padded = torch.cat((draft_token_ids, draft_token_ids.new_full((num_rows, 1), -1)), dim=1)
    kept = torch.where(offsets < accepted[:, None], padded, -1)
    return torch.where(offsets == accepted[:, None], last[:, None], kept)
