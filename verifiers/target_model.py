"""TargetModelVerifier: one forward of the target over last token + K drafts, then an acceptance
rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.decode_state import DecodeState
from specdec.models.paged_model import PagedModel
from specdec.proposers.base import Draft
from specdec.sampling.pipeline import argmax_lowest, invalid_rows, process_logits, to_probs
from specdec.verifiers.base import BAD_DRAFT, BAD_LOGITS, AcceptanceRule, Verdict, Verifier
from specdec.verifiers.greedy import greedy


class TargetModelVerifier(Verifier):
    """Verifies with the request's own sampling pipeline at each position; greedy-only batches skip
    distributions.
    """

    name = "target_model"

    def __init__(self, model: PagedModel, rule: AcceptanceRule) -> None:
        self.model = model
        self._rule = rule

    def verify(self, state: DecodeState, draft: Draft) -> Verdict:
        num_drafts = draft.max_num_draft_tokens
        logits = self._forward(state, draft)
        processed = process_logits(logits, state.sampling, draft.token_ids, 0)
        bad = invalid_rows(logits) | invalid_rows(processed)  # [rows, K + 1]
        processed = torch.where(bad[..., None], 0.0, processed)
        if state.sampling.all_greedy or state.uniforms is None:
            accepted, last = greedy(
                argmax_lowest(processed), draft.token_ids, draft.num_draft_tokens
            )
        else:
            width = num_drafts + 1
            accepted, last = self._rule(
                to_probs(processed, state.sampling),
                draft.probs,
                draft.token_ids,
                draft.num_draft_tokens,
                state.uniforms.accept[:, :width],
                state.uniforms.recover[:, :width],
            )
        # A bad position counts only if the kept run reaches it: behind a refused draft nobody reads
        # it.
        offsets = torch.arange(num_drafts + 1, device=state.device)
        failed = (bad & (offsets <= accepted[:, None])).any(dim=1).long() * BAD_LOGITS
        drafted = offsets[:num_drafts] < draft.num_draft_tokens[:, None]
        unknown = (draft.token_ids < 0) | (draft.token_ids >= state.vocab_size)
        failed = torch.where((unknown & drafted).any(dim=1), BAD_DRAFT, failed)
        return Verdict(_emitted(draft.token_ids, accepted, last), accepted, failed, logits)

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
            max(len(seq) for seq in state.seqs) + num_drafts,
            torch.arange(token_ids.numel(), device=state.device),
        )
        logits = self.model.forward(batch)
        return logits.view(state.num_rows, num_drafts + 1, -1)


def _emitted(draft_token_ids: Tensor, accepted: Tensor, last: Tensor) -> Tensor:
    """[rows, K + 1]: the first `accepted` drafts, then `last`, then -1."""
    num_rows, num_drafts = draft_token_ids.shape
    offsets = torch.arange(num_drafts + 1, device=accepted.device)
    padded = torch.cat((draft_token_ids, draft_token_ids.new_full((num_rows, 1), -1)), dim=1)
    kept = torch.where(offsets < accepted[:, None], padded, -1)
    return torch.where(offsets == accepted[:, None], last[:, None], kept)
