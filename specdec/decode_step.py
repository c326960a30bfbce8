"""DecodeStep: draft, verify and accept for the decoding rows, and the one read of the result."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.decode_state import DecodeState
from specdec.models.paged_model import PagedModel
from specdec.proposers.base import Draft, Proposer
from specdec.sequence import Sequence
from specdec.stats import EngineStats
from specdec.verifiers.base import Verdict, Verifier


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave, row by row."""

    rows: list[list[int]]  # [num drafted, num accepted, failed, token ids ...], see Verdict
    logits: Tensor | None  # [rows, K + 1, vocab] float32, the target's; None: no row wants them


class DecodeStep:
    """Runs steps eagerly. The host waits for the device once, to read the small result."""

    def __init__(self, target: PagedModel, proposer: Proposer, verifier: Verifier) -> None:
        self.target = target
        self.proposer = proposer
        self.verifier = verifier

    def run(
        self, seqs: Seq[Sequence], num_draft_tokens: Seq[int], stats: EngineStats
    ) -> StepResult:
        """One step of these sequences, K of each; their counters are the caller's to roll."""
        with stats.phase("draft"):
            state = self.build(seqs, num_draft_tokens, self.target.device)
            state.draw_noise()
            self.prepare(seqs, num_draft_tokens)
            draft = self.checked_draft(state)
        with stats.phase("verify"):
            verdict = self.verifier.verify(state, draft)
        with stats.phase("read"):
            return StepResult(pack(draft, verdict).tolist(), verdict.logits)

    def build(
        self, seqs: Seq[Sequence], num_draft_tokens: Seq[int], device: torch.device
    ) -> DecodeState:
        cache = self.target.kv_cache
        return DecodeState.build(
            seqs,
            num_draft_tokens,
            block_size=cache.block_size,
            padding_block=cache.padding_block,
            vocab_size=self.target.vocab_size,
            device=device,
        )

    def prepare(self, seqs: Seq[Sequence], num_draft_tokens: Seq[int]) -> None:
        """The proposer's work on the host; an error names it, since it may be a plugin."""
        try:
            self.proposer.prepare(seqs, num_draft_tokens)
        except Exception as error:
            raise self._blamed(error) from error

    def checked_draft(self, state: DecodeState) -> Draft:
        """The proposer's draft, of the right shapes; an error names the proposer."""
        try:
            draft = self.proposer.propose(state)
            draft.check(state)
        except Exception as error:
            raise self._blamed(error) from error
        return draft

    def _blamed(self, error: Exception) -> RuntimeError:
        return RuntimeError(
            f"proposer {self.proposer.name!r} failed: {type(error).__name__}: {error}"
        )


def pack(draft: Draft, verdict: Verdict) -> Tensor:
    """[rows, K + 4] int64: num drafted, num accepted, failed, token ids."""
    columns = (draft.num_draft_tokens, verdict.num_accepted_tokens, verdict.failed)
    return torch.cat((torch.stack(columns, dim=1), verdict.token_ids), dim=1)
