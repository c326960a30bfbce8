"""Engine: add, step, abort. One step is the only loop: schedule, prefill, draft, verify, commit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

from specdec.batch import ForwardBatch
from specdec.block_pool import BlockPool
from specdec.config import SamplingParams
from specdec.decode_step import DecodeStep
from specdec.logprobs import add_logprobs, add_prompt_logprobs, wants_prompt_logprobs
from specdec.outputs import Request, Sample, TextStream, Tokenizer
from specdec.requests import RequestBuilder
from specdec.scheduler import Scheduler, StepPlan
from specdec.sequence import Sequence, Span
from specdec.stats import EngineStats
from specdec.verifiers.base import BAD_DRAFT, BAD_LOGITS, BAD_RULE

logger = logging.getLogger("specdec")

ORIGIN_ACCEPTED = ["accepted"]
LEARN_STEPS = 32  # steps after which the choice of K looks at the acceptance again


class Engine:
    """Serves requests by continuous batching. Not thread-safe: Driver adds a lock.

    A request that fails (NaN logits, a broken plugin) ends with finish_reason "error" and its
    `error` set; its blocks are freed and the others go on.
    """

    def __init__(
        self,
        step: DecodeStep,
        pool: BlockPool,
        scheduler: Scheduler,
        *,
        tokenizer: Tokenizer | None = None,
        eos_ids: Collection[int] = (),
    ) -> None:
        self.pool = pool
        self.scheduler = scheduler
        self.stats = EngineStats()
        self.target = step.target
        self._step = step
        self._proposer = step.proposer
        self._builder = RequestBuilder(
            tokenizer,
            eos_ids,
            step.target.vocab_size,
            scheduler.max_model_len,
            scheduler.num_draft_tokens,
            greedy_only=step.verifier.rule_name == "greedy",
        )
        self._requests: dict[str, Request] = {}
        self._samples: dict[Sequence, tuple[Request, Sample]] = {}
        self._ended_early: dict[str, Request] = {}  # ended outside a step, not yet told

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._ended_early)

    def add(
        self,
        prompt_token_ids: Seq[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        prompt: str | None = None,
    ) -> Request:
        """Queue a request. Raises ValueError for input that cannot be served; nothing is kept
        then.
        """
        request = self._builder.build(
            prompt_token_ids, params or SamplingParams(), request_id, prompt, taken=self._requests
        )
        queued: list[Sequence] = []
        try:
            for sample in request.samples:
                self.scheduler.add(sample.seq)
                queued.append(sample.seq)
        except ValueError:
            for seq in queued:
                self.scheduler.remove(seq)
            raise
        self._requests[request.request_id] = request
        self.stats.num_requests += 1
        for sample in request.samples:
            self._samples[sample.seq] = (request, sample)
            seq = sample.seq
            nothing_to_run = seq.params.prompt_logprobs is None or seq.prefilled
            if nothing_to_run and seq.remaining(self.scheduler.max_model_len) <= 0:
                self._end(seq, "length")
        return request

    def serves(self, request_id: str) -> bool:
        """Whether a request of this id is queued or running."""
        return request_id in self._requests

    def abort(self, request_id: str) -> bool:
        """End a request now, keeping what it has; False if it is unknown or has ended."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        for sample in request.samples:
            if not sample.seq.finish_reason:
                self._end(sample.seq, "abort")
        return True

    def step(self) -> list[Request]:
        """Run one step and return the requests that got tokens or ended."""
        with self.stats.phase("schedule"):
            plan = self.scheduler.schedule()
            if plan.new_blocks:
                self.target.kv_cache.clear(plan.new_blocks)
                _tell(self._proposer.clear, plan.new_blocks)
        self.stats.num_steps += 1
        self.stats.num_preemptions += plan.num_preempted
        self.stats.num_prefix_hit_tokens += plan.num_prefix_hit_tokens
        touched: dict[str, Request] = {}
        for work, seqs in (
            (self._prefill, [span.seq for span in plan.prefill]),
            (self._decode, plan.decode),
        ):
            if seqs:
                progressed = self._guarded(work, plan, seqs)
                touched.update({r.request_id: r for r in progressed})
        touched.update(self._ended_early)
        self._ended_early.clear()
        if self.stats.num_steps % LEARN_STEPS == 0:
            self.scheduler.learn(self.stats)
        return list(touched.values())

    def take_ended(self) -> list[Request]:
        """Requests that ended outside a step (aborted, nothing to emit) since the last call."""
        ended = list(self._ended_early.values())
        self._ended_early.clear()
        return ended

    def _guarded(
        self, work: Callable[[StepPlan], Iterable[Request]], plan: StepPlan, seqs: Seq[Sequence]
    ) -> list[Request]:
        """Run a part of the step; an exception in it fails the requests it worked on and no
        others.
        """
        try:
            return list(work(plan))
        except Exception as error:
            logger.exception("a step failed; its %d sequences end with an error", len(seqs))
            for seq in seqs:
                if seq in self._samples:
                    self._fail(seq, f"{type(error).__name__}: {error}")
            return []

    def _prefill(self, plan: StepPlan) -> Iterable[Request]:
        """Run prompt chunks through the target and, for sequences that will speculate, through the
        proposer's model.
        """
        spans = plan.prefill
        wanted: list[tuple[Span, int]] = []
        indices: list[int] = []
        first = 0
        for span in spans:
            if wants_prompt_logprobs(*self._samples[span.seq], span):
                wanted.append((span, len(indices)))
                indices += range(first, first + span.length)
            first += span.length
        cache = self.target.kv_cache
        with self.stats.phase("prefill"):
            batch = ForwardBatch.ragged(
                spans, cache.block_size, cache.padding_block, self.target.device, indices
            )
            logits = self.target.forward(batch)
            self._proposer.extend([s for s in spans if self.scheduler.lookahead(s.seq)])
        self.stats.num_prompt_tokens += first
        for span, row in wanted:
            request = self._samples[span.seq][0]
            if not add_prompt_logprobs(request, span, logits[row : row + span.length]):
                self._fail(span.seq, self._why(BAD_LOGITS))
        progressed = []
        for span in spans:
            seq = span.seq
            if seq.finish_reason:  # its prompt's logits were bad
                continue
            seq.num_computed_tokens = span.end
            self._register(seq)
            if seq.prefilled and seq.remaining(self.scheduler.max_model_len) <= 0:
                progressed.append(self._samples[seq][0])
                self._end(seq, "length", early=False)
        return progressed

    def _decode(self, plan: StepPlan) -> Iterable[Request]:
        """Draft, verify, read the small result, commit."""
        live = [
            (seq, k)
            for seq, k in zip(plan.decode, plan.num_draft_tokens, strict=True)
            if not seq.finish_reason  # a sibling sample failed in prefill
        ]
        if not live:
            return
        seqs = [seq for seq, _ in live]
        result = self._step.run(seqs, [k for _, k in live], self.stats)
        with self.stats.phase("commit"):
            for row, (seq, (num_drafted, num_accepted, failed, *run)) in enumerate(
                zip(seqs, result.rows, strict=True)
            ):
                if seq.finish_reason:  # a sibling sample failed in this step
                    continue
                if failed:
                    self._fail(seq, self._why(failed))
                    continue
                request, sample = self._samples[seq]
                yield request
                try:
                    self._commit(seq, run[: num_accepted + 1], num_drafted)
                    if seq.params.logprobs is not None:
                        assert result.logits is not None
                        add_logprobs(sample, result.logits[row])
                    if seq.finish_reason:
                        self._end(seq, seq.finish_reason, early=False)
                except Exception as error:  # a tokenizer may raise: no other row is to blame
                    self._fail(seq, f"{type(error).__name__}: {error}")

    def _commit(self, seq: Sequence, run: list[int], num_drafted: int) -> None:
        """Append a row's run, cut where the sequence ends; roll both KV counters; count."""
        request, sample = self._samples[seq]
        if sample.text.looks_for_stops:
            stop_text = partial(_push, sample.text, seq)
            num_kept = seq.accept(run, self.scheduler.max_model_len, stop_text)
        else:
            num_kept = seq.accept(run, self.scheduler.max_model_len)
            sample.text.extend(run[:num_kept])
        seq.roll(num_drafted)
        request.first_token_at = request.first_token_at or time.perf_counter()
        self.stats.record(num_drafted, len(run) - 1, num_kept)
        sample.stats.record(num_drafted, len(run) - 1, num_kept)
        sample.origins += ORIGIN_ACCEPTED * (len(run) - 1)
        sample.origins.append(
            "plain" if not num_drafted else "bonus" if len(run) > num_drafted else "recovered"
        )
        del sample.origins[seq.num_output_tokens :]
        if not seq.finish_reason:
            self._register(seq)

    def _register(self, seq: Sequence) -> None:
        valid = seq.num_computed_tokens
        if self._proposer.uses_kv and valid > seq.num_draft_computed_tokens:
            valid = seq.num_draft_computed_tokens
        self.scheduler.register_prefix(seq, valid)

    def _end(self, seq: Sequence, reason: str, *, early: bool = True) -> None:
        """The sequence leaves: its blocks go back; `early` when no step is about to report it."""
        request, sample = self._samples[seq]
        if reason != "error":
            completed = sample.text.finish(
                may_stop=reason == "length" and seq.num_output_tokens >= seq.params.min_tokens
            )
            if completed is not None:
                reason, seq.stop_reason = "stop", completed
        seq.finish_reason = reason
        self.scheduler.remove(seq)
        del self._samples[seq]
        _tell(self._proposer.forget, seq)
        if early:
            self._ended_early[request.request_id] = request
        if request.finished:
            request.finished_at = time.perf_counter()
            self.stats.num_finished += 1
            del self._requests[request.request_id]

    def _fail(self, seq: Sequence, error: str) -> None:
        """End the whole request with an error; KV that it alone holds is never reused as a
        prefix.
        """
        request, _ = self._samples[seq]
        request.error = error
        self.stats.num_failed += 1
        for sample in request.samples:
            if sample.seq in self._samples:  # still in the engine
                table = sample.seq.block_table
                self.pool.forget([block for block in table if not self.pool.shared(block)])
                self._end(sample.seq, "error")

    def _why(self, code: int) -> str:
        """What a row's Verdict.failed means, with the remedy."""
        if code == BAD_DRAFT:
            return (
                f"proposer {self._proposer.name!r} drafted an id outside the vocabulary of "
                f"{self.target.vocab_size} tokens, or another number of tokens than it may"
            )
        if code == BAD_RULE:
            return (
                f"acceptance rule {self._step.verifier.rule_name!r} kept more drafts than there "
                f"were, or gave an id outside the vocabulary of {self.target.vocab_size} tokens"
            )
        return (
            "the target's logits were NaN or infinite, or allowed_token_ids, bad_words and "
            "logit_bias left no token; check the weights and dtype, or the request's rules"
        )


def _push(text: TextStream, seq: Sequence, token: int) -> str | None:
    """Add a committed token to the text; the stop string that it completes, or None."""
    return text.push(token, may_stop=seq.num_output_tokens >= seq.params.min_tokens)


def _tell(hook: Callable[[Any], None], about: Any) -> None:
    """Call a proposer's hook; one that raises must not harm the engine's own books."""
    try:
        hook(about)
    except Exception:
        logger.exception("the proposer's hook %r failed", hook)
