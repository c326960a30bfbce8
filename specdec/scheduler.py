"""Scheduler: who prefills and who decodes in the next step, and the blocks they need. First come,
first served.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from specdec.block_pool import BlockPool
from specdec.lookahead import SEEDED_LOOKAHEAD, LookaheadChooser
from specdec.sequence import Sequence, Span, blocks_for
from specdec.stats import SpecStats

PROMPT_LOGPROBS_CHUNK = 256  # prompt tokens of a step whose logits are wanted


@dataclass(slots=True)
class StepPlan:
    """Work of one step."""

    prefill: list[Span] = field(default_factory=list)
    decode: list[Sequence] = field(default_factory=list)
    num_draft_tokens: list[int] = field(default_factory=list)  # per decoding sequence
    new_blocks: list[int] = field(default_factory=list)  # handed out now, with stale content
    num_prompt_logits: int = 0  # prompt tokens of this step whose logits are wanted
    num_preempted: int = 0
    num_prefix_hit_tokens: int = 0


class Scheduler:
    """Continuous batching over one pool.

    Each running sequence has K + 2 tokens of the budget set aside (K + 1 verified, and the draft's
    second first-feed token), so decoding never starves prefill nor the reverse; what decoding does
    not use goes to prefill chunks. When blocks run out, the sequence that arrived last is
    preempted: it waits at the head of the queue and is computed again.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_draft_tokens: int,
        proposer_max_len: int | None = None,
        chooser: LookaheadChooser | None = None,
    ) -> None:
        self.pool = pool
        self.max_model_len = max_model_len
        self.num_draft_tokens = num_draft_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}  # a set in order of arrival
        self._proposer_max_len = proposer_max_len
        self._chooser = chooser  # None: num_draft_tokens is K itself, else the largest K
        self._chosen = num_draft_tokens  # K of requests that leave it open, in this step
        self._budget = max_num_batched_tokens
        self._max_running = min(max_num_seqs, max_num_batched_tokens // (num_draft_tokens + 2))

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence. Raises ValueError if the whole pool could not hold it."""
        needed = blocks_for(len(seq) + self.num_draft_tokens + 1, self.pool.block_size)
        if needed > self.pool.num_blocks:
            raise ValueError(
                f"the prompt has {len(seq)} tokens and needs {needed} KV blocks with its "
                f"lookahead, the pool has "
                f"{self.pool.num_blocks}; raise num_blocks or shorten the prompt"
            )
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Take a finished, failed or aborted sequence out and free its blocks."""
        if seq in self.running:
            del self.running[seq]
        elif seq in self.waiting:
            self.waiting.remove(seq)
        self.pool.free(seq.preempt())

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def lookahead(self, seq: Sequence) -> int:
        """K of this sequence's next window.

        A request that samples keeps one K for its life, since under `rejection` the text of a seed
        depends on K. Only a greedy request follows the chooser, and is cut to what max_tokens
        leaves: its text is the same at any K.
        """
        drafts = self._base_lookahead(seq) if seq.lookahead is None else seq.lookahead
        drafts = min(drafts, self.max_model_len - len(seq))
        if self._proposer_max_len is not None:  # the last draft is never fed back
            drafts = min(drafts, self._proposer_max_len - len(seq) + 1)
        if seq.params.greedy:
            drafts = min(drafts, seq.remaining(self.max_model_len) - 1)
        return max(drafts, 0)

    def _base_lookahead(self, seq: Sequence) -> int:
        """K before the context's end cuts it: the request's own, else the engine's. That of a
        seeded request never depends on the batch or on measured costs.
        """
        asked = seq.params.num_draft_tokens
        if asked is not None:
            return min(asked, self.num_draft_tokens)
        if self._chooser is None:
            return self.num_draft_tokens
        if seq.params.seed is not None and not seq.params.greedy:
            return min(SEEDED_LOOKAHEAD, self.num_draft_tokens)
        return self._chosen

    def learn(self, stats: SpecStats) -> None:
        """Tell the chooser of K what acceptance was seen."""
        if self._chooser is not None:
            self._chooser.learn(stats)

    def schedule(self) -> StepPlan:
        """Plan one step. Decoding comes first, then prefill already begun, then new sequences while
        blocks last.
        """
        plan = StepPlan()
        budget = self._budget
        if self._chooser is not None:
            num_rows = min(len(self.running) + len(self.waiting), self._max_running)
            self._chosen = min(self._chooser.best(num_rows), self.num_draft_tokens)
        for seq in list(self.running):
            if seq.prefilled and seq in self.running:
                budget -= self._plan_decode(plan, seq)
        for seq in list(self.running):
            if seq in self.running and not seq.prefilled:
                budget -= self._plan_prefill(plan, seq, budget)
        while self.waiting and budget > 0 and len(self.running) < self._max_running:
            seq = self.waiting[0]
            if not self._admit(plan, seq):
                break
            if not seq.prefilled:
                budget -= self._plan_prefill(plan, seq, budget)
            elif budget >= self.lookahead(seq) + 2:  # a prompt of one token decodes at once
                budget -= self._plan_decode(plan, seq)
        return plan

    def register_prefix(self, seq: Sequence, num_valid: int) -> None:
        """Offer the sequence's full blocks to later prompts.

        The last two committed tokens are left out: a draft's first feed writes them again, and a
        block that another sequence may hold is never written.
        """
        num_valid = min(num_valid, len(seq.token_ids) - 2)
        num_full = num_valid // self.pool.block_size
        if num_full > seq.num_offered_blocks:
            self.pool.register(seq.block_table, seq.token_ids, num_valid)
            seq.num_offered_blocks = num_full

    def _plan_decode(self, plan: StepPlan, seq: Sequence) -> int:
        drafts = self.lookahead(seq)
        if not self._grow(plan, seq, len(seq) + drafts + 1):
            return 0
        plan.decode.append(seq)
        plan.num_draft_tokens.append(drafts)
        return drafts + 2

    def _plan_prefill(self, plan: StepPlan, seq: Sequence, budget: int) -> int:
        length = min(budget, len(seq) - 1 - seq.num_computed_tokens)
        if seq.params.prompt_logprobs is not None:
            length = min(length, PROMPT_LOGPROBS_CHUNK - plan.num_prompt_logits)
            plan.num_prompt_logits += max(length, 0)
        if length > 0:
            plan.prefill.append(Span(seq, seq.num_computed_tokens, length))
        return max(length, 0)

    def _admit(self, plan: StepPlan, seq: Sequence) -> bool:
        """Move the head of the queue to running if all its tokens and its lookahead fit beside
        those running.
        """
        if seq.lookahead is None and not seq.params.greedy:
            seq.lookahead = self._base_lookahead(seq)
        hits: list[int] = []
        if seq.params.prompt_logprobs is None:  # cached tokens have no logits
            hits = self.pool.match_prefix(seq.token_ids, len(seq) - 2)
        needed = blocks_for(len(seq) + self.lookahead(seq) + 1, self.pool.block_size)
        blocks = self.pool.allocate(needed - len(hits))
        if blocks is None:
            self.pool.free(hits)
            return False
        self.waiting.popleft()
        self.running[seq] = None
        seq.block_table = hits + blocks
        plan.new_blocks += blocks
        num_hit = len(hits) * self.pool.block_size
        seq.num_computed_tokens = seq.num_draft_computed_tokens = num_hit
        plan.num_prefix_hit_tokens += num_hit
        return True

    def _grow(self, plan: StepPlan, seq: Sequence, num_tokens: int) -> bool:
        """Give the sequence blocks for num_tokens, preempting the latest arrivals; False if it had
        to go itself.
        """
        missing = blocks_for(num_tokens, self.pool.block_size) - len(seq.block_table)
        if missing <= 0:
            return True
        while (blocks := self.pool.allocate(missing)) is None:
            victim, _ = self.running.popitem()
            self.pool.free(victim.preempt())
            self.waiting.appendleft(victim)
            plan.num_preempted += 1
            if victim is seq:
                return False
        seq.block_table += blocks
        plan.new_blocks += blocks
        return True
