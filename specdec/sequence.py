"""Sequence: the committed tokens of one sample, its blocks, and two counters. Rollback is lowering
a counter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from specdec.config import SamplingParams


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """One sample of a request.

    Between steps a running sequence of n tokens has valid target KV for its first n - 1 tokens and
    valid draft KV for n - 1 or n - 2 of them (fewer while speculation is off for it: the proposer
    catches up before it drafts again).
    """

    seq_id: int  # arrival order; unique in an engine
    token_ids: list[int]  # prompt + emitted tokens; never a draft
    num_prompt_tokens: int
    params: SamplingParams
    seed: int = 0
    end_ids: frozenset[int] = frozenset()  # end-of-text (unless ignored) and stop_token_ids
    bad_words: tuple[tuple[int, ...], ...] = ()
    block_table: list[int] = field(default_factory=list)  # shared by target and draft KV
    num_computed_tokens: int = 0  # leading tokens with valid target KV
    num_draft_computed_tokens: int = 0  # the same for the draft
    num_offered_blocks: int = 0  # leading blocks that later prompts may share
    lookahead: int | None = None  # K of a sequence that samples, set when it is admitted
    finish_reason: str | None = None  # stop | length | abort | error
    stop_reason: int | str | None = None  # the token or the string that ended it

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prefilled(self) -> bool:
        """Whether only the last token still has to go through the target: it may decode."""
        return self.num_computed_tokens >= len(self.token_ids) - 1

    def remaining(self, max_model_len: int) -> int:
        """Tokens that may still be emitted: the smaller of max_tokens and what the context
        leaves.
        """
        left = max_model_len - len(self.token_ids)
        if self.params.max_tokens is not None:
            left = min(left, self.params.max_tokens - self.num_output_tokens)
        return left

    def accept(
        self,
        run: Seq[int],
        max_model_len: int,
        stop_text: Callable[[int], str | None] | None = None,
    ) -> int:
        """Commit the tokens of one step up to the first end and return how many were kept.

        The run is cut behind an end token or behind the token that completes a stop string (reason
        "stop"), or where max_tokens or the context ends ("length"). `stop_text` is told each
        committed token and names the stop string that it completes, or None.
        """
        for num_kept, token in enumerate(run, start=1):
            self.token_ids.append(token)
            text = stop_text(token) if stop_text else None
            if token in self.end_ids:
                self.finish_reason, self.stop_reason = "stop", token
            elif text is not None:
                self.finish_reason, self.stop_reason = "stop", text
            elif self.remaining(max_model_len) <= 0:
                self.finish_reason = "length"
            if self.finish_reason:
                return num_kept
        return len(run)

    def roll(self, num_drafted: int) -> None:
        """Set both counters after a step that drafted `num_drafted` tokens and committed its run.

        tokens:   [ ... committed before ... | kept drafts | recovered or bonus ]
        target KV  valid                       valid         not yet
        draft KV   valid                       valid but for the last draft, which was never fed

        The draft's counter stays where it is unless the draft model ran for this step: then it has
        set it to the number of committed tokens, one above the target's.
        """
        model_drafted = self.num_draft_computed_tokens > self.num_computed_tokens
        self.num_computed_tokens = len(self.token_ids) - 1
        if num_drafted and model_drafted:
            fed = self.num_draft_computed_tokens + num_drafted - 1
            self.num_draft_computed_tokens = min(fed, len(self.token_ids) - 1)

    def preempt(self) -> list[int]:
        """Forget all KV (it is computed again later) and return the blocks to be freed."""
        blocks, self.block_table = self.block_table, []
        self.num_computed_tokens = self.num_draft_computed_tokens = self.num_offered_blocks = 0
        return blocks


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, start + length) of a sequence, to go through one model."""

    seq: Sequence
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold this many tokens."""
    return -(-num_tokens // block_size)


def end_ids_of(params: SamplingParams, eos_ids: Collection[int]) -> frozenset[int]:
    """The tokens that end a request: its stop_token_ids, and end-of-text unless ignore_eos."""
    return frozenset(params.stop_token_ids) | (
        frozenset() if params.ignore_eos else frozenset(eos_ids)
    )
