"""Engine: add, step, abort. One step is the only loop: schedule, prefill, draft, verify, commit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from specdec.batch import ForwardBatch
from specdec.block_pool import BlockPool
from specdec.config import SamplingParams
from specdec.decode_state import DecodeState
from specdec.models.paged_model import PagedModel
from specdec.outputs import Request, Sample, Tokenizer, TokenLogprobs
from specdec.proposers.base import Draft, Proposer
from specdec.requests import RequestBuilder
from specdec.sampling.pipeline import raw_logprobs
from specdec.scheduler import Scheduler, StepPlan
from specdec.sequence import Sequence, Span
from specdec.stats import EngineStats
from specdec.verifiers.base import BAD_DRAFT, Verdict, Verifier

logger = logging.getLogger("specdec")


class Engine:
    """Serves requests by continuous batching. Not thread-safe: LLM adds a lock.

    A request that fails (NaN logits, a broken plugin) ends with finish_reason "error" and a text;
    its blocks are freed and the others go on.
    """

    def __init__(
        self,
        target: PagedModel,
        proposer: Proposer,
        verifier: Verifier,
        pool: BlockPool,
        scheduler: Scheduler,
        *,
        tokenizer: Tokenizer | None = None,
        eos_ids: Collection[int] = (),
    ) -> None:
        self.pool = pool
        self.scheduler = scheduler
        self.stats = EngineStats()
        self._target = target
        self._proposer = proposer
        self._verifier = verifier
        self._builder = RequestBuilder(
            tokenizer,
            eos_ids,
            target.vocab_size,
            scheduler.max_model_len,
            scheduler.num_draft_tokens,
        )
        self._requests: dict[str, Request] = {}
        self._samples: dict[Sequence, tuple[Request, Sample]] = {}
        self._ended_early: list[Request] = []  # ended outside a step, reported by the next one

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
            if seq.remaining(self.scheduler.max_model_len) <= 0 and request.prompt_logprobs is None:
                self._end(seq, "length")
        return request

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
        ended, self._ended_early = self._ended_early, []
        touched.update({r.request_id: r for r in ended})
        return list(touched.values())

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
                if not seq.finish_reason:
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
            if self._wants_prompt_logprobs(span):
                wanted.append((span, len(indices)))
                indices += range(first, first + span.length)
            first += span.length
        cache = self._target.kv_cache
        with self.stats.phase("prefill"):
            batch = ForwardBatch.ragged(
                spans, cache.block_size, cache.padding_block, self._target.device, indices
            )
            logits = self._target.forward(batch)
            self._proposer.extend([s for s in spans if self.scheduler.lookahead(s.seq)])
        self.stats.num_prompt_tokens += first
        for span, row in wanted:
            self._add_prompt_logprobs(span, logits[row : row + span.length])
        progressed = []
        for span in spans:
            seq = span.seq
            seq.num_computed_tokens = span.end
            self._register(seq)
            if seq.prefilled and seq.remaining(self.scheduler.max_model_len) <= 0:
                progressed.append(self._samples[seq][0])
                self._end(seq, "length", early=False)
        return progressed

    def _decode(self, plan: StepPlan) -> Iterable[Request]:
        """Draft, verify, read the small result, commit."""
        cache = self._target.kv_cache
        live = [
            (seq, k)
            for seq, k in zip(plan.decode, plan.num_draft_tokens, strict=True)
            if not seq.finish_reason  # a sibling sample failed in prefill
        ]
        if not live:
            return
        seqs = [seq for seq, _ in live]
        with self.stats.phase("draft"):
            state = DecodeState.build(
                seqs,
                [k for _, k in live],
                block_size=cache.block_size,
                padding_block=cache.padding_block,
                vocab_size=self._target.vocab_size,
                device=self._target.device,
            )
            draft = self._proposer.propose(state)
            check_draft(draft, state, self._proposer.name)
        with self.stats.phase("verify"):
            verdict = self._verifier.verify(state, draft)
        with self.stats.phase("read"):
            rows = _read(draft, verdict)
        with self.stats.phase("commit"):
            for row, (seq, (num_drafted, num_accepted, failed, *run)) in enumerate(
                zip(seqs, rows, strict=True)
            ):
                if seq.finish_reason:  # a sibling sample failed in this step
                    continue
                if failed:
                    self._fail(seq, self._failure(failed))
                    continue
                yield self._samples[seq][0]
                kept = run[: num_accepted + 1]
                self._commit(seq, kept, num_drafted, verdict.logits[row])

    def _commit(self, seq: Sequence, run: list[int], num_drafted: int, logits: Tensor) -> None:
        """Append a row's run, cut where the sequence ends; roll both KV counters; count."""
        request, sample = self._samples[seq]
        before = len(seq)
        min_tokens = seq.params.min_tokens

        def stop_text(token: int) -> str | None:
            return sample.text.push(token, may_stop=seq.num_output_tokens >= min_tokens)

        num_kept = seq.accept(run, self.scheduler.max_model_len, stop_text)
        seq.roll(num_drafted, self._proposer.uses_kv)
        request.first_token_at = request.first_token_at or time.perf_counter()
        self.stats.record(num_drafted, len(run) - 1, num_kept)
        sample.stats.record(num_drafted, len(run) - 1, num_kept)
        last = "plain" if not num_drafted else "bonus" if len(run) > num_drafted else "recovered"
        sample.origins += (["accepted"] * (len(run) - 1) + [last])[:num_kept]
        if seq.params.logprobs is not None:
            tokens = seq.token_ids[before : before + num_kept]
            sample.logprobs += _logprobs(logits[:num_kept], tokens, seq.params.logprobs)
        if seq.finish_reason:
            self._end(seq, seq.finish_reason, early=False)
        else:
            self._register(seq)

    def _register(self, seq: Sequence) -> None:
        valid = seq.num_computed_tokens
        if self._proposer.uses_kv:
            valid = min(valid, seq.num_draft_computed_tokens)
        self.scheduler.register_prefix(seq, valid)

    def _end(self, seq: Sequence, reason: str, *, early: bool = True) -> None:
        """The sequence leaves: its blocks go back; `early` when no step is about to report it."""
        seq.finish_reason = reason
        self.scheduler.remove(seq)
        self._proposer.forget(seq)
        request, sample = self._samples.pop(seq)
        sample.text.finish()
        if early and request not in self._ended_early:
            self._ended_early.append(request)
        if request.finished:
            request.finished_at = time.perf_counter()
            self.stats.num_finished += 1
            del self._requests[request.request_id]

    def _fail(self, seq: Sequence, error: str) -> None:
        """End the whole request with an error; KV that may hold NaN is zeroed and never reused as a
        prefix.
        """
        request, _ = self._samples[seq]
        request.error = error
        self.stats.num_failed += 1
        for sample in request.samples:
            failed = sample.seq
            if failed.finish_reason:
                continue
            own = [block for block in failed.block_table if not self.pool.shared(block)]
            self.pool.forget(own)
            self._target.kv_cache.clear(own)
            self._proposer.clear(own)
            self._end(failed, "error")

    def _failure(self, code: int) -> str:
        if code == BAD_DRAFT:
            return (
                f"proposer {self._proposer.name!r} drafted an id outside the vocabulary of "
                f"{self._target.vocab_size} tokens"
            )
        return (
            "the target's logits were NaN or infinite, or allowed_token_ids, bad_words and "
            "logit_bias left no token; "
            "check the weights and dtype, or the request's rules"
        )

    def _wants_prompt_logprobs(self, span: Span) -> bool:
        request, sample = self._samples[span.seq]
        found = request.prompt_logprobs
        first = sample is request.samples[0] and span.start < span.seq.num_prompt_tokens - 1
        return found is not None and first and len(found) == span.start

    def _add_prompt_logprobs(self, span: Span, logits: Tensor) -> None:
        request, _ = self._samples[span.seq]
        num_top = span.seq.params.prompt_logprobs
        assert request.prompt_logprobs is not None and num_top is not None
        end = min(span.end + 1, span.seq.num_prompt_tokens)
        tokens = span.seq.token_ids[span.start + 1 : end]
        request.prompt_logprobs += _logprobs(logits[: len(tokens)], tokens, num_top)


def check_draft(draft: Draft, state: DecodeState, name: str) -> None:
    """Refuse a malformed draft of a third party's proposer, naming it."""
    rows, width = state.num_rows, draft.max_num_draft_tokens
    shapes = {
        "token_ids": (draft.token_ids, (rows, width)),
        "num_draft_tokens": (draft.num_draft_tokens, (rows,)),
        "probs": (draft.probs, (rows, width, state.vocab_size)),
    }
    for field, (tensor, shape) in shapes.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(
                f"proposer {name!r} returned {field} of shape {tuple(tensor.shape)}, needed {shape}"
            )
    if width > state.max_num_draft_tokens:
        raise ValueError(
            f"proposer {name!r} drafted {width} tokens, the limit of this step is "
            f"{state.max_num_draft_tokens}"
        )


def _read(draft: Draft, verdict: Verdict) -> list[list[int]]:
    """The step's one transfer to the host: per row [num drafted, num accepted, failed, token ids
    ...].
    """
    columns = (draft.num_draft_tokens, verdict.num_accepted_tokens, verdict.failed)
    small = torch.cat((torch.stack(columns, dim=1), verdict.token_ids), dim=1)
    return small.tolist()  # type: ignore[no-any-return]


def _logprobs(logits: Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    """Raw log-probabilities of token_ids [N] under logits [N, V], and the num_top best ids of
    each.
    """
    ids = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    own, top_ids, top = raw_logprobs(logits, ids, num_top)
    rows = zip(token_ids, own.tolist(), top_ids.tolist(), top.tolist(), strict=True)
    return [TokenLogprobs(t, p, dict(zip(i, v, strict=True))) for t, p, i, v in rows]
