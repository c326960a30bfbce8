"""DraftModelProposer: a small language model drafts, from its own KV over the shared pool (arXiv
2211.17192).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from specdec.batch import ForwardBatch
from specdec.decode_state import DecodeState
from specdec.models.paged_model import PagedModel
from specdec.proposers.base import Draft, Proposer
from specdec.sampling.noise import inverse_cdf
from specdec.sampling.pipeline import (
    align_vocab,
    argmax_lowest,
    invalid_rows,
    process_logits,
    to_probs,
)
from specdec.sequence import Sequence, Span


class DraftModelProposer(Proposer):
    """Drafts with the request's own sampling pipeline, so q is exactly the law that each draft is
    drawn from.

    The first forward always feeds the last two committed tokens: after a step in which every draft
    was kept, the KV of the last draft is missing, and so it never is. Then K - 1 forwards of one
    token follow.
    """

    name = "draft_model"
    uses_kv = True
    placement = "device"

    def __init__(self, model: PagedModel, max_num_batched_tokens: int = 2048) -> None:
        self.model = model
        self.max_model_len = model.max_model_len
        self._max_num_batched_tokens = max_num_batched_tokens

    def extend(self, spans: Seq[Span]) -> None:
        """Compute draft KV of committed tokens, from where each sequence's draft KV ends."""
        pending = []
        for span in spans:
            end = min(span.end, self.model.max_model_len)
            start = span.seq.num_draft_computed_tokens
            if start < end:
                pending.append(Span(span.seq, start, end - start))
        for chunk in _chunks(pending, self._max_num_batched_tokens):
            cache = self.model.kv_cache
            self._forward(
                ForwardBatch.ragged(chunk, cache.block_size, cache.padding_block, self.model.device)
            )
            for span in chunk:
                span.seq.num_draft_computed_tokens = span.end

    def prepare(self, seqs: Seq[Sequence], num_draft_tokens: Seq[int]) -> None:
        """Fill draft KV that fell behind while speculation was off, up to the two tokens that are
        fed anyway.
        """
        rows = [s for s, k in zip(seqs, num_draft_tokens, strict=True) if k]
        self.extend([Span(seq, 0, len(seq) - 2) for seq in rows if len(seq) > 2])
        for seq in rows:
            seq.num_draft_computed_tokens = len(seq)  # once the first forward has run

    def propose(self, state: DecodeState) -> Draft:
        num_drafts = state.max_num_draft_tokens
        if num_drafts == 0:
            return Draft.empty(state.num_rows, state.device)
        limits = state.draft_limits
        max_len = state.max_len
        logits = self._first_forward(state, limits, max_len)
        token_ids = torch.full((state.num_rows, num_drafts), -1, device=state.device)
        probs: list[Tensor] = []
        for i in range(num_drafts):
            if i:
                logits = self._next_forward(state, token_ids[:, i - 1 : i], limits, i, max_len)
            token, q, valid = self._draw(state, logits, token_ids, i)
            limits = torch.where(
                valid, limits, limits.clamp(max=i)
            )  # a row of NaN drafts no further
            token_ids[:, i] = torch.where(i < limits, token, -1)
            if q is not None:
                probs.append(q)
        return Draft(token_ids, limits, torch.stack(probs, dim=1) if probs else None)

    def clear(self, blocks: Seq[int]) -> None:
        self.model.kv_cache.clear(blocks)

    def _forward(self, batch: ForwardBatch) -> Tensor:
        """Run the draft. It reads an id that only the target has as its own last one: that costs
        acceptance and nothing else, since q is the law drawn from whatever the context.
        """
        batch.token_ids = batch.token_ids.clamp(max=self.model.vocab_size - 1)
        return self.model.forward(batch)

    def _first_forward(self, state: DecodeState, limits: Tensor, max_len: int) -> Tensor:
        """Logits [rows, V_draft] behind the last committed token; feeds last_token_ids [rows,
        2].
        """
        starts = (state.seq_lens - 2).clamp(min=0)
        last = (state.seq_lens - 1).clamp(max=1)  # index of the last committed token among the two
        rows = torch.arange(state.num_rows, device=state.device)
        valid = torch.where(limits > 0, last + 1, 0)
        batch = state.append_batch(
            state.last_token_ids, starts, valid, max(max_len, 2), rows * 2 + last
        )
        return self._forward(batch)

    def _next_forward(
        self, state: DecodeState, token_ids: Tensor, limits: Tensor, i: int, max_len: int
    ) -> Tensor:
        """Logits behind draft i (1-based): feeds it, [rows, 1], at position n + i - 1."""
        rows = torch.arange(state.num_rows, device=state.device)
        batch = state.append_batch(
            token_ids.clamp(min=0), state.seq_lens + (i - 1), (limits > i).long(), max_len + i, rows
        )
        return self._forward(batch)

    def _draw(
        self, state: DecodeState, logits: Tensor, token_ids: Tensor, i: int
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Draft i (0-based) of each row [rows], its q [rows, V] (None when all are greedy), and
        whether q is a law.
        """
        aligned = align_vocab(logits, state.vocab_size, self.model.token_map)[
            :, None
        ]  # [rows, 1, V]
        processed = process_logits(aligned, state.sampling, token_ids, i)
        valid = ~(invalid_rows(aligned) | invalid_rows(processed))[:, 0]
        if state.sampling.all_greedy or state.uniforms is None:
            return argmax_lowest(processed[:, 0]), None, valid
        q = to_probs(processed, state.sampling)[:, 0]
        return inverse_cdf(q, state.uniforms.draft[:, i]), q, valid


def _chunks(spans: Seq[Span], budget: int) -> list[list[Span]]:
    """Split spans into forwards of at most `budget` tokens, in order."""
    chunks: list[list[Span]] = []
    room = 0
    for span in spans:
        start = span.start
        while start < span.end:
            if room == 0:
                chunks.append([])
                room = budget
            length = min(room, span.end - start)
            chunks[-1].append(Span(span.seq, start, length))
            start, room = start + length, room - length
    return chunks
