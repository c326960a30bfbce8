"""Scheduling through the engine: arrivals, aborts, tiny pools, budgets; nothing leaks, nobody
starves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from toy import (
    ToyModel,
    audit,
    blended_law,
    build_engine,
    output_ids,
    plain_greedy,
    run,
    table_law,
)

from specdec.batch import ForwardBatch
from specdec.block_pool import BlockPool
from specdec.config import SamplingParams
from specdec.engine import Engine
from specdec.outputs import Request
from specdec.proposers.ngram import NgramProposer
from specdec.scheduler import Scheduler
from specdec.sequence import Sequence

VOCAB = 50
LAW = table_law(VOCAB, 0)
CLOSE = blended_law(LAW, table_law(VOCAB, 1), 3)


class CountingModel(ToyModel):
    """Remembers how many real tokens each forward had."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.counts: list[int] = []

    def forward(self, batch: ForwardBatch) -> Tensor:
        self.counts.append(int((batch.slot_mapping >= 0).sum()))
        return super().forward(batch)


@dataclass(frozen=True)
class Arrival:
    """One request of a generated load."""

    step: int
    prompt: tuple[int, ...]
    params: SamplingParams
    abort_after: int | None


@dataclass(frozen=True)
class Load:
    """Arrivals and the engine they meet."""

    arrivals: tuple[Arrival, ...]
    num_draft_tokens: int
    drafter: str
    options: dict[str, Any]


@st.composite
def loads(draw: st.DrawFn) -> Load:
    k = draw(st.integers(0, 5))
    arrivals = []
    for i in range(draw(st.integers(1, 12))):
        length = draw(st.integers(2, 40))  # test_a47 has prompts of one token
        own_k = draw(st.sampled_from([None, None, 0, min(k, 2)]))
        max_tokens = draw(st.integers(0, 30))
        prompt = tuple((j * 7 + (i if j > length // 2 else 0)) % VOCAB for j in range(length))
        params = SamplingParams(
            temperature=draw(st.sampled_from([0.0, 1.0])),
            seed=i,
            max_tokens=max_tokens,
            num_draft_tokens=own_k,
            n=draw(st.sampled_from([1, 1, 1, 3])),
        )
        abort_after = draw(st.one_of(st.none(), st.none(), st.integers(0, 12)))
        arrivals.append(Arrival(draw(st.integers(0, 15)), prompt, params, abort_after))
    options = {
        "num_blocks": draw(st.integers(6, 12)),
        "max_num_seqs": draw(st.integers(1, 7)),
        "max_num_batched_tokens": draw(st.integers(k + 2, 60)),
        "prefix_caching": draw(st.booleans()),
    }
    arrivals.sort(key=lambda arrival: arrival.step)
    drafter = draw(st.sampled_from(["model", "ngram"]))
    return Load(tuple(arrivals), k, drafter, options)


def engine_for(load: Load, **options: Any) -> Engine:
    draft = CountingModel(CLOSE, VOCAB) if load.drafter == "model" else NgramProposer(1, 3)
    return build_engine(
        CountingModel(LAW, VOCAB), draft, num_draft_tokens=load.num_draft_tokens, **options
    )


def check_order(engine: Engine) -> None:
    """First come, first served: what runs arrived before all that waits."""
    running = [seq.seq_id for seq in engine.scheduler.running]
    waiting = [seq.seq_id for seq in engine.scheduler.waiting]
    assert [*running, *waiting] == sorted([*running, *waiting])
    assert not any(seq.finish_reason for seq in engine.scheduler.running)
    assert not any(seq.block_table for seq in engine.scheduler.waiting)


def check_step(engine: Engine, load: Load) -> None:
    """Run one step: the oldest request gets on, and the budget holds."""
    scheduler, options = engine.scheduler, load.options
    models = [engine.target, getattr(engine._proposer, "model", engine.target)]
    for model in models:
        model.counts.clear()
    live = [*scheduler.running, *scheduler.waiting]
    oldest = live[0] if live else None
    before = None if oldest is None else (len(oldest), oldest.num_computed_tokens)
    engine.step()
    audit(engine)
    check_order(engine)
    assert len(scheduler.running) <= options["max_num_seqs"]
    for model in models:
        assert all(count <= options["max_num_batched_tokens"] for count in model.counts)
    assert sum(models[0].counts) <= options["max_num_batched_tokens"]
    if oldest is not None and not oldest.finish_reason:
        assert (len(oldest), oldest.num_computed_tokens) > before, "the oldest did not get on"


def tokens_of(request: Request) -> list[list[int]]:
    return [out.token_ids for out in request.output().outputs]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(loads())
def test_random_loads(load: Load) -> None:
    """Whatever arrives and is aborted: no leak, arrival order, progress, and the text of a roomy
    engine.
    """
    engine = engine_for(load, **load.options)
    requests: list[Request] = []
    step = 0
    while engine.has_work or len(requests) < len(load.arrivals):
        while len(requests) < len(load.arrivals) and load.arrivals[len(requests)].step <= step:
            arrival = load.arrivals[len(requests)]
            requests.append(engine.add(arrival.prompt, arrival.params))
        for request, arrival in zip(requests, load.arrivals, strict=False):
            if arrival.abort_after is not None and step == arrival.step + arrival.abort_after:
                was_finished = request.finished
                assert engine.abort(request.request_id) == (not was_finished)
                check_order(engine)
                engine.pool.check_integrity()
        check_step(engine, load)
        step += 1
        assert step < 5_000
    assert engine.pool.num_free == engine.pool.num_blocks
    assert not engine._requests and not engine._samples
    assert engine.stats.num_finished == len(requests)
    if load.drafter == "ngram":
        assert not engine._proposer._indices  # type: ignore[attr-defined]

    roomy = engine_for(load, num_blocks=200, max_model_len=engine.scheduler.max_model_len)
    expected = [roomy.add(arrival.prompt, arrival.params) for arrival in load.arrivals]
    run(roomy)
    for request, want in zip(requests, expected, strict=True):
        for got, full in zip(request.output().outputs, want.output().outputs, strict=True):
            if got.finish_reason == "abort":
                assert got.token_ids == full.token_ids[: len(got.token_ids)]
            else:
                assert got.token_ids == full.token_ids and got.finish_reason == "length"


def test_thousands_of_queued_requests_finish() -> None:
    """3,000 requests before the first step, a pool for a few; each ends with its own text."""
    engine = build_engine(
        ToyModel(LAW, VOCAB), ToyModel(CLOSE, VOCAB), num_blocks=100, max_num_seqs=64
    )
    requests = [
        engine.add([i % 50, i // 50 % 50, 3], SamplingParams(temperature=0, max_tokens=1 + i % 7))
        for i in range(3_000)
    ]
    finished = run(engine)
    assert len(finished) == 3_000 and engine.stats.num_finished == 3_000
    engine.pool.check_integrity()
    assert engine.pool.num_free == 100
    for request in requests[::50]:
        expected = plain_greedy(
            LAW, request.prompt_token_ids, request.samples[0].seq.num_output_tokens
        )
        assert output_ids(request) == expected
    assert all(len(output_ids(request)) == 1 + i % 7 for i, request in enumerate(requests))


@pytest.mark.parametrize("k", [0, 4])
def test_the_smallest_pool_serves_the_longest_request(k: int) -> None:
    """A request that fills the whole pool preempts nobody for ever and is not preempted for ever:
    eight of them, in a pool that holds one, take turns.
    """
    engine = build_engine(
        ToyModel(LAW, VOCAB), ToyModel(LAW, VOCAB), num_draft_tokens=k, num_blocks=5
    )
    longest = engine.scheduler.max_model_len
    assert longest == 5 * 16 - k - 1
    prompts = [[i] * (10 + 5 * i) for i in range(1, 9)]
    params = SamplingParams(temperature=0, max_tokens=None)
    requests = [engine.add(prompt, params) for prompt in prompts]
    finished = run(engine, check=audit)
    assert finished == requests  # in order of arrival
    for prompt, request in zip(prompts, requests, strict=True):
        assert output_ids(request) == plain_greedy(LAW, prompt, longest - len(prompt))
    assert engine.stats.num_preemptions > 0


def test_a_prompt_that_never_fits_is_refused_and_nothing_stays() -> None:
    """The refusal comes from add(), for all samples, and leaves no queued sibling behind."""
    pool = BlockPool(4, 16)
    scheduler = Scheduler(
        pool, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=512, num_draft_tokens=4
    )
    seq = Sequence(0, [1] * 60, 60, SamplingParams())
    with pytest.raises(ValueError, match="needs 5 KV blocks with its lookahead, the pool has 4"):
        scheduler.add(seq)
    assert not scheduler.has_work
    scheduler.add(Sequence(1, [1] * 59, 59, SamplingParams()))  # positive control

    engine = build_engine(ToyModel(LAW, VOCAB), num_blocks=4)
    with pytest.raises(ValueError, match="the context holds"):
        engine.add([1] * 60, SamplingParams(n=3))
    assert not engine.has_work and engine.stats.num_requests == 0
    engine.add([1] * 20, SamplingParams(max_tokens=2))
    run(engine, check=audit)


def test_a_large_prompt_at_the_head_is_not_overtaken() -> None:
    """Small requests behind a large one wait, so that it is admitted as soon as blocks are free."""
    engine = build_engine(ToyModel(LAW, VOCAB), ToyModel(LAW, VOCAB), num_blocks=10)
    first = engine.add([1] * 90, SamplingParams(temperature=0, max_tokens=20))
    large = engine.add([2] * 120, SamplingParams(temperature=0, max_tokens=5))
    small = [engine.add([i], SamplingParams(temperature=0, max_tokens=1)) for i in range(5)]
    num_steps_before = 0
    while not large.samples[0].seq.block_table:
        engine.step()
        audit(engine)
        if large.samples[0].seq.block_table:
            break
        num_steps_before += 1
        assert not any(request.samples[0].seq.block_table for request in small)
        assert engine.pool.num_free >= 1  # positive control: a small one would have fitted
    assert num_steps_before >= 4 and first.finished
    run(engine, check=audit)
    assert output_ids(large) == plain_greedy(LAW, [2] * 120, 5)


def test_decoding_rows_do_not_starve_prefill_nor_the_reverse() -> None:
    """At the smallest budget for two rows, a long prompt and a decoding row both get on each
    step.
    """
    engine = build_engine(
        ToyModel(LAW, VOCAB), ToyModel(LAW, VOCAB), num_draft_tokens=4, max_num_batched_tokens=12
    )
    row = engine.add([1, 2], SamplingParams(temperature=0, max_tokens=400))
    engine.step()
    engine.step()
    long = engine.add([3] * 200, SamplingParams(temperature=0, max_tokens=5))
    seq, other = long.samples[0].seq, row.samples[0].seq
    while not seq.prefilled:
        before = seq.num_computed_tokens, len(other)
        engine.step()
        audit(engine)
        assert seq.num_computed_tokens >= before[0] + 6 or seq.prefilled
        assert len(other) == before[1] + 5
    run(engine, check=audit)
    assert output_ids(long) == plain_greedy(LAW, [3] * 200, 5)


# --- lookahead of one request -------------------------------------------------------------------


def test_a_requests_own_lookahead() -> None:
    """num_draft_tokens per request: 0 opts out, a smaller number holds, a larger one is refused."""
    engine = build_engine(ToyModel(LAW, VOCAB), ToyModel(LAW, VOCAB), num_draft_tokens=4)
    params = SamplingParams(temperature=0, max_tokens=30)
    requests = [
        engine.add([5, 6], replace(params, num_draft_tokens=k)) for k in (0, 1, 2, 3, 4, None)
    ]
    run(engine, check=audit)
    widths = [len(r.output().outputs[0].stats["acceptance_by_position"]) for r in requests]
    assert widths == [0, 1, 2, 3, 4, 4]
    assert {tuple(output_ids(r)) for r in requests} == {tuple(plain_greedy(LAW, [5, 6], 30))}
    with pytest.raises(ValueError, match="asks for num_draft_tokens 5"):
        engine.add([5, 6], replace(params, num_draft_tokens=5))


def test_lookahead_of_a_seeded_request_ignores_batch_and_max_tokens() -> None:
    """Under rejection a seed's text depends on K, so K must not follow the pool or max_tokens: the
    shorter text is a prefix of the longer one.
    """
    texts = {}
    for max_tokens in (3, 7, 20, 40):
        for num_blocks in (4, 200):
            engine = build_engine(
                ToyModel(LAW, VOCAB), ToyModel(CLOSE, VOCAB), num_blocks=num_blocks
            )
            requests = [
                engine.add([5, i], SamplingParams(seed=3, max_tokens=max_tokens)) for i in range(4)
            ]
            run(engine, check=audit)
            for i, request in enumerate(requests):
                texts[i, max_tokens, num_blocks] = output_ids(request)
    for (i, max_tokens, _), text in texts.items():
        assert text == texts[i, 40, 200][:max_tokens]


# --- abort and ids ------------------------------------------------------------------------------


def test_abort_of_unknown_and_finished_ids() -> None:
    engine = build_engine(ToyModel(LAW, VOCAB), ToyModel(LAW, VOCAB))
    assert engine.abort("nobody") is False
    request = engine.add([1], SamplingParams(max_tokens=2), request_id="a")
    run(engine)
    assert engine.abort("a") is False and request.output().outputs[0].finish_reason == "length"
    again = engine.add([1], SamplingParams(max_tokens=2), request_id="a")  # the id is free again
    with pytest.raises(ValueError, match="is being served already"):
        engine.add([2], request_id="a")
    assert engine.abort("a") is True and engine.abort("a") is False
    assert again.output().outputs[0].finish_reason == "abort"
    assert engine.step() == [again] and not engine.has_work
    assert engine.pool.num_free == engine.pool.num_blocks


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode"])
def test_abort_at_each_stage(when: str) -> None:
    """The aborted request keeps its tokens and is reported once; a neighbour is not affected."""
    engine = build_engine(
        ToyModel(LAW, VOCAB), ToyModel(CLOSE, VOCAB), max_num_batched_tokens=24, max_num_seqs=2
    )
    params = SamplingParams(temperature=0, max_tokens=30)
    neighbour = engine.add([1, 2], params)
    blocker = engine.add([9, 9], params) if when == "waiting" else None
    request = engine.add([3] * 60, params)
    seq = request.samples[0].seq
    for _ in range(12):
        engine.step()
        started = len(seq.block_table) > 0
        if when == "waiting" or (when == "prefill" and started) or seq.num_output_tokens > 0:
            break
    assert bool(seq.block_table) == (when != "waiting")
    assert seq.prefilled == (when == "decode")
    assert engine.abort(request.request_id)
    assert not seq.block_table and request.finished
    reports = [request in engine.step() for _ in range(3)]
    assert reports == [True, False, False]
    run(engine, check=audit)
    done = seq.num_output_tokens
    assert output_ids(request) == plain_greedy(LAW, [3] * 60, done)
    assert output_ids(neighbour) == plain_greedy(LAW, [1, 2], 30)
    assert blocker is None or output_ids(blocker) == plain_greedy(LAW, [9, 9], 30)
    assert engine.pool.num_free == engine.pool.num_blocks


def test_abort_of_n_samples() -> None:
    engine = build_engine(ToyModel(LAW, VOCAB), ToyModel(CLOSE, VOCAB), max_num_seqs=3)
    request = engine.add([1, 2], SamplingParams(n=5, seed=1, max_tokens=50))
    for _ in range(4):
        engine.step()
    assert engine.abort(request.request_id) and request.finished
    assert [out.finish_reason for out in request.output().outputs] == ["abort"] * 5
    assert run(engine) == [request]
    assert engine.pool.num_free == engine.pool.num_blocks and engine.stats.num_finished == 1


def test_n_samples_share_the_prompt_and_differ() -> None:
    """Six samples, three at a time: later ones hit the prompt's blocks; prompt log-probabilities
    come once.
    """
    engine = build_engine(ToyModel(LAW, VOCAB), ToyModel(CLOSE, VOCAB), max_num_seqs=3)
    prompt = [(3 * i) % VOCAB for i in range(50)]
    request = engine.add(prompt, SamplingParams(n=6, seed=5, max_tokens=12, prompt_logprobs=0))
    finished = run(engine, check=audit)
    assert finished == [request]
    texts = tokens_of(request)
    assert len({tuple(text) for text in texts}) == 6 and {len(text) for text in texts} == {12}
    assert engine.stats.num_prefix_hit_tokens >= 3 * 48
    assert len(request.output().prompt_logprobs or ()) == 49


def test_max_tokens_zero_with_and_without_prompt_logprobs() -> None:
    """Nothing is generated, but prompt log-probabilities can be asked for alone."""
    engine = build_engine(ToyModel(LAW, VOCAB), ToyModel(CLOSE, VOCAB))
    plain = engine.add([1, 2, 3], SamplingParams(max_tokens=0))
    scored = engine.add([1, 2, 3], SamplingParams(max_tokens=0, prompt_logprobs=2))
    assert engine.has_work
    finished = run(engine, check=audit)
    assert set(map(id, finished)) == {id(plain), id(scored)}
    assert output_ids(plain) == output_ids(scored) == []
    assert [e.token_id for e in scored.output().prompt_logprobs or ()] == [2, 3]
    assert engine.stats.num_target_steps == 0
    assert engine.pool.num_free == engine.pool.num_blocks


def test_max_tokens_zero_of_a_one_token_prompt_with_prompt_logprobs() -> None:
    """There is nothing to score and nothing to emit: it must end with no token."""
    engine = build_engine(ToyModel(LAW, VOCAB), ToyModel(CLOSE, VOCAB))
    request = engine.add([1], SamplingParams(max_tokens=0, prompt_logprobs=2))
    run(engine, check=audit)
    assert output_ids(request) == []  # BUG: one token is emitted
    assert request.output().prompt_logprobs == []
