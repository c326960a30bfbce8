"""HybridProposer: n-gram lookup where the text repeats itself at length, else the draft model."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from specdec.decode_state import DecodeState
from specdec.proposers.base import Draft, Proposer
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.ngram import NgramProposer
from specdec.sequence import Sequence, Span


class HybridProposer(Proposer):
    """Rows with an n-gram match take its continuation (one-hot q), the others the model's drafts.

    Which of the two drafts is decided by the committed text alone, before anything is drawn, so
    each row's q stays the law of its drafts. The model's KV of a row falls behind while matches
    last; DraftModelProposer catches up before it drafts for that row again.
    """

    name = "hybrid"
    uses_kv = True

    def __init__(self, lookup: NgramProposer, model: DraftModelProposer) -> None:
        self.max_model_len = model.max_model_len
        self._lookup = lookup
        self._model = model

    def propose(self, state: DecodeState) -> Draft:
        matches = self._lookup.find(state)
        left = [0 if m else k for m, k in zip(matches, state.num_draft_tokens, strict=True)]
        found = Draft.from_lists(matches, state.device)
        if not any(left):
            return found
        limits = torch.tensor(left, dtype=torch.int64).to(state.device)
        self._model.prepare(state.seqs, left)
        drawn = self._model.propose(replace(state, num_draft_tokens=left, draft_limits=limits))
        return _merge(found, drawn, state.vocab_size)

    def extend(self, spans: Seq[Span]) -> None:
        self._model.extend(spans)

    def forget(self, seq: Sequence) -> None:
        self._lookup.forget(seq)
        self._model.forget(seq)

    def clear(self, blocks: Seq[int]) -> None:
        self._model.clear(blocks)


def _merge(found: Draft, drawn: Draft, vocab_size: int) -> Draft:
    """Rows of `found` that have drafts, `drawn` in the others; as wide as the wider."""
    width = max(found.max_num_draft_tokens, drawn.max_num_draft_tokens)
    matched = found.num_draft_tokens > 0  # [rows]
    token_ids = torch.where(
        matched[:, None], _widen(found.token_ids, width, -1), _widen(drawn.token_ids, width, -1)
    )
    num_draft_tokens = torch.where(matched, found.num_draft_tokens, drawn.num_draft_tokens)
    if drawn.probs is None:
        return Draft(token_ids, num_draft_tokens)
    one_hot = torch.zeros(
        *token_ids.shape, vocab_size, dtype=torch.float32, device=token_ids.device
    ).scatter_(2, token_ids.clamp(min=0)[..., None], 1.0)
    drawn_probs = torch.nn.functional.pad(drawn.probs, (0, 0, 0, width - drawn.probs.shape[1]))
    probs = torch.where(matched[:, None, None], one_hot, drawn_probs)
    return Draft(token_ids, num_draft_tokens, probs)


def _widen(values: Tensor, width: int, fill: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, width - values.shape[1]), value=fill)
