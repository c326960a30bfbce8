"""What goes wrong in one request stays there: NaN, broken proposers, a tokenizer that raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor
from toy import (
    Law,
    ScriptedProposer,
    ToyModel,
    WordTokenizer,
    audit,
    blended_law,
    build_engine,
    context_hash,
    output_ids,
    plain_greedy,
    run,
    table_law,
)

from specdec.attention.reference import ReferenceBackend
from specdec.config import SamplingParams
from specdec.decode_state import DecodeState
from specdec.engine import Engine
from specdec.models.paged_model import ATTENTION_NAME, TransformersModel
from specdec.outputs import Request
from specdec.proposers.base import Draft, Proposer

VOCAB = 50
LAW = table_law(VOCAB, 0)
CLOSE = blended_law(LAW, table_law(VOCAB, 1), 3)
NAN, INF = float("nan"), float("inf")
GREEDY = SamplingParams(temperature=0, max_tokens=25)
GOOD = [[1, 2], [3], [4] * 20]  # prompts of the neighbours of what fails


def poisoned(law: Law, contexts: Sequence[Sequence[int]], value: float = NAN) -> Law:
    """`law`, but with one logit replaced behind these contexts."""
    hashes = torch.tensor([context_hash(context, None) for context in contexts])

    def bad(seen: Tensor) -> Tensor:
        logits = law(seen).clone()
        logits[torch.isin(seen, hashes), 7] = value
        if value == -INF:
            logits[torch.isin(seen, hashes)] = value
        return logits

    return bad


def check_isolated(engine: Engine, failed: Request, others: Sequence[Request], text: str) -> None:
    """Only `failed` has an error; all blocks are back, its own zeroed and without a hash."""
    assert failed.finished and failed.error is not None and text in failed.error
    assert {out.finish_reason for out in failed.output().outputs} <= {"error", "length", "stop"}
    for request in others:
        assert request.error is None and request.finished
        if request.samples[0].seq.params.temperature == 0:
            expected = plain_greedy(LAW, request.prompt_token_ids, len(output_ids(request)))
            assert output_ids(request) == expected and len(expected) == 25
    assert engine.stats.num_failed == 1
    assert engine.pool.num_free == engine.pool.num_blocks
    engine.pool.check_integrity()


# --- NaN ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("after", [0, 1, 6])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_target_logits_fail_one_request(value: float, after: int, temperature: float) -> None:
    """NaN, infinite or all -inf logits behind `after` tokens of one request of a batch."""
    emitted = plain_greedy(LAW, [5, 6], after)
    law = poisoned(LAW, [[5, 6, *emitted]], value)
    engine = build_engine(ToyModel(law, VOCAB), ToyModel(CLOSE, VOCAB))
    failed = engine.add([5, 6], GREEDY)
    others = [engine.add(prompt, replace(GREEDY, temperature=temperature)) for prompt in GOOD]
    others += [engine.add(prompt, GREEDY) for prompt in GOOD]
    seq = failed.samples[0].seq
    table: list[int] = []
    while engine.has_work:
        table = list(seq.block_table) or table
        engine.step()
        audit(engine)
        if failed.finished and table:
            known = engine.pool._hash_of  # what it left there must not serve a later prompt
            assert not [b for b in table if b in known and engine.pool._ref_counts[b] == 0]
            table = []
    check_isolated(engine, failed, others, "NaN or infinite")
    assert output_ids(failed) == emitted[: len(output_ids(failed))]
    again = engine.add([8, 9], GREEDY)
    assert run(engine, check=audit) == [again] and output_ids(again) == plain_greedy(
        LAW, [8, 9], 25
    )


def test_a_failed_request_with_samples_fails_whole() -> None:
    """n = 3 share one error; the samples still waiting never run."""
    engine = build_engine(
        ToyModel(poisoned(LAW, [[5, 6]]), VOCAB), ToyModel(CLOSE, VOCAB), max_num_seqs=2
    )
    others = [engine.add(GOOD[0], GREEDY)]
    failed = engine.add([5, 6], SamplingParams(n=3, seed=1))
    assert failed in run(engine, check=audit)
    check_isolated(engine, failed, others, "NaN or infinite")
    assert [out.finish_reason for out in failed.output().outputs] == ["error"] * 3


def test_a_failed_requests_blocks_are_never_a_prefix_hit() -> None:
    """The same prompt again must be computed again; another request's shared prefix stays."""
    prompt = [(7 * i) % VOCAB for i in range(40)]
    engine = build_engine(ToyModel(poisoned(LAW, [prompt]), VOCAB), ToyModel(CLOSE, VOCAB))
    failed = engine.add(prompt, GREEDY)
    run(engine)
    assert failed.error and engine.stats.num_prefix_hit_tokens == 0
    longer = engine.add([*prompt, 1], GREEDY)
    run(engine, check=audit)
    assert engine.stats.num_prefix_hit_tokens == 0 and longer.error is None
    assert output_ids(longer) == plain_greedy(LAW, [*prompt, 1], 25)
    engine.add([*prompt, 1], GREEDY)  # positive control: a sound request's blocks are hit
    run(engine, check=audit)
    assert engine.stats.num_prefix_hit_tokens == 32


@pytest.mark.parametrize("temperature", [0.0, 1e-4])
def test_nan_behind_a_refused_draft_is_not_a_failure(temperature: float) -> None:
    """The window holds T's logits behind drafts that T refuses; nobody reads these.

    The proposer drafts the right token, then a wrong one: NaN stands behind the wrong one in each
    window. Positive control: NaN behind the right one does fail.
    """
    text = plain_greedy(LAW, [5, 6], 40)

    def draft(token_ids: list[int], limit: int) -> list[int]:
        right = text[len(token_ids) - 2]
        return [right, (text[len(token_ids) - 1] + 1) % VOCAB, 3]

    refused, kept = [], []
    for done in range(25):
        context = [5, 6, *text[:done]]
        wrong = draft(context, 3)
        refused += [[*context, *wrong[:2]], [*context, *wrong]]
        kept.append([*context, wrong[0]])
    for contexts, fails in ((refused, False), (kept[4:], True)):
        engine = build_engine(ToyModel(poisoned(LAW, contexts), VOCAB), ScriptedProposer(draft))
        request = engine.add([5, 6], replace(GREEDY, temperature=temperature, seed=1))
        run(engine, check=audit)
        assert (request.error is not None) == fails
        assert output_ids(request) == text[: len(output_ids(request))]
        assert fails or len(output_ids(request)) == 25


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_draft_of_nan_drafts_no_further(value: float, temperature: float) -> None:
    """Bad draft logits are no failure: the row's window ends there, T goes on.

    D is bad behind the third token of each window of one request; its other drafts are used.
    """
    text = plain_greedy(LAW, [5, 6], 40)
    contexts = [[5, 6, *text[:done]] for done in range(2, 40, 3)]
    engine = build_engine(ToyModel(LAW, VOCAB), ToyModel(poisoned(LAW, contexts, value), VOCAB))
    request = engine.add([5, 6], GREEDY)
    others = [engine.add(p, replace(GREEDY, temperature=temperature, seed=1)) for p in GOOD]
    run(engine, check=audit)
    assert request.error is None and output_ids(request) == text[:25]
    stats = request.output().outputs[0].stats
    assert stats["acceptance_rate"] == 1.0
    assert 0 < stats["num_draft_tokens"] < 4 * stats["num_target_steps"]
    for other in others:
        assert other.error is None
        assert other.output().outputs[0].stats["acceptance_rate"] == 1.0


# --- NaN in the KV of real models ---------------------------------------------------------------


def paged(seed: int, nan_token: int | None = None) -> TransformersModel:
    """A tiny llama; feeding `nan_token` makes its K/V at that position NaN."""
    model = tiny_model("llama", seed)
    if nan_token is not None:
        model.get_input_embeddings().weight[nan_token] = NAN
    model.set_attn_implementation(ATTENTION_NAME)
    return TransformersModel(model, ReferenceBackend())


def plain_texts(prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
    engine = build_engine(paged(0), num_blocks=64)
    requests = [engine.add(prompt, params) for prompt in prompts]
    run(engine)
    return [output_ids(request) for request in requests]


def test_nan_kv_of_a_committed_token_is_a_failure() -> None:
    """Positive control of the tests below: whatever keeps masked NaN out must not hide real NaN."""
    nan_token = 77
    engine = build_engine(paged(0, nan_token), num_blocks=64)
    failed = [engine.add([*range(4, 24), nan_token, *[5] * i], GREEDY) for i in (0, 1, 30)]
    sound = engine.add([8, 9], GREEDY)
    run(engine)
    assert all(request.error and output_ids(request) == [] for request in failed)
    assert sound.error is None and [output_ids(sound)] == plain_texts([[8, 9]], GREEDY)
    late = engine.add([10, 11, 12], GREEDY)  # gets zeroed blocks
    run(engine)
    assert late.error is None and [output_ids(late)] == plain_texts([[10, 11, 12]], GREEDY)


def test_nan_behind_a_shared_prefix_stays_behind_it() -> None:
    """Causal attention: tokens before the one that overflows are sound, and so is the KV of a
    prefix that another request hits while the failing one is still in prefill.
    """
    shared = list(range(4, 20))
    texts = plain_texts([[*shared, 5, 6]], GREEDY)
    engine = build_engine(paged(0, 77), num_blocks=64, max_num_batched_tokens=40)
    failing = engine.add([*shared, 77, *[5] * 100], GREEDY)
    engine.step()
    sound = engine.add([*shared, 5, 6], GREEDY)
    run(engine)
    assert failing.error is not None and engine.stats.num_prefix_hit_tokens == 16
    assert sound.error is None
    assert [output_ids(sound)] == texts


def test_nan_kv_of_a_refused_draft_does_not_reach_later_steps() -> None:
    """A refused draft may overflow in T and leave NaN K/V in a slot that the next, shorter window
    does not write. The slot is masked, but a weight of 0 times NaN is NaN.
    """
    nan_token = 77
    (text,) = plain_texts([[5, 6, 7]], GREEDY)
    assert nan_token not in text

    def draft(token_ids: list[int], limit: int) -> list[int]:
        return [nan_token] * (3 if len(token_ids) % 2 else 1)

    engine = build_engine(paged(0, nan_token), ScriptedProposer(draft), num_blocks=64)
    request = engine.add([5, 6, 7], GREEDY)
    run(engine)
    assert request.error is None
    assert output_ids(request) == text


def test_nan_kv_of_a_finished_request_does_not_reach_the_next_holder() -> None:
    """The request ends in the very step whose refused draft left NaN; its block is given to
    another request, which must not fail.
    """
    nan_token = 77
    others = [[8, 9], [10, 11, 12]]
    texts = plain_texts(others, GREEDY)
    proposer = ScriptedProposer(lambda ids, limit: [nan_token] * limit)
    engine = build_engine(paged(0, nan_token), proposer, num_blocks=64)
    first = engine.add([5, 6, 7], SamplingParams(max_tokens=1, seed=1, top_k=1))
    run(engine)
    assert first.error is None and len(output_ids(first)) == 1
    requests = [engine.add(prompt, replace(GREEDY, num_draft_tokens=0)) for prompt in others]
    run(engine)
    assert [request.error for request in requests] == [None, None]
    assert [output_ids(request) for request in requests] == texts


def test_nan_in_the_drafts_kv_does_not_reach_the_next_holder() -> None:
    """D alone overflows at one token of one request. That request loses its drafts; those that get
    its blocks later must keep theirs.
    """
    nan_token = 77
    engine = build_engine(paged(0), paged(0, nan_token), num_blocks=64)
    prompt = [*range(4, 14), nan_token, 6]
    first = engine.add(prompt, replace(GREEDY, max_tokens=3))
    run(engine)
    assert first.error is None and output_ids(first) == plain_texts([prompt], GREEDY)[0][:3]
    later = engine.add([8, 9], GREEDY)
    (text,) = plain_texts([[8, 9]], GREEDY)
    assert nan_token not in text
    run(engine)
    assert later.error is None and output_ids(later) == text
    stats = later.output().outputs[0].stats
    assert stats["num_draft_tokens"] > 0
    assert stats["acceptance_rate"] == 1.0


def test_nan_draft_kv_is_no_prefix_for_others() -> None:
    """A prompt whose draft KV is NaN in its last, unshared part leaves the shared part usable."""
    nan_token = 77
    shared = [(3 * i) % 60 + 4 for i in range(32)]
    engine = build_engine(paged(0), paged(0, nan_token), num_blocks=64)
    engine.add([*shared, nan_token, 6], GREEDY)
    run(engine)
    later = engine.add([*shared, 9, 10], GREEDY)
    run(engine)
    assert engine.stats.num_prefix_hit_tokens == 32
    assert output_ids(later) == plain_texts([[*shared, 9, 10]], GREEDY)[0]
    stats = later.output().outputs[0].stats
    assert stats["num_draft_tokens"] > 0 and stats["acceptance_rate"] == 1.0


def test_a_draft_with_a_smaller_embedding_is_not_fed_ids_it_lacks() -> None:
    """T has 136 ids, D 128: an id that only T has is emitted, then fed to D's embedding.

    The toy has no embedding; a real one raises IndexError, and on a GPU the process is lost.
    """
    target, draft = (tiny_model("llama", 0, vocab_size=size) for size in (136, 128))
    models = []
    for model in (target, draft):
        model.set_attn_implementation(ATTENTION_NAME)
        models.append(TransformersModel(model, ReferenceBackend()))
    engine = build_engine(*models, num_blocks=64)
    allowed = SamplingParams(max_tokens=40, seed=1, allowed_token_ids=[5, 6, 7, 130, 135])
    requests = [engine.add([5, 6, 7], allowed), engine.add([5, 131, 7], GREEDY)]
    run(engine)
    assert [request.error for request in requests] == [None, None]
    assert max(output_ids(requests[0])) >= 130


# --- broken proposers ---------------------------------------------------------------------------


class FaultyProposer(Proposer):
    """Right drafts of `CLOSE`, but the first step that drafts is spoiled."""

    name = "faulty"

    def __init__(self, spoil: Callable[[Draft, DecodeState], Any]) -> None:
        self._spoil = spoil
        self.num_spoiled = 0
        self.forgotten: list[int] = []

    def propose(self, state: DecodeState) -> Any:
        rows = [
            plain_greedy(CLOSE, seq.token_ids, k)
            for seq, k in zip(state.seqs, state.num_draft_tokens, strict=True)
        ]
        draft = Draft.from_lists(rows, state.device)
        if state.max_num_draft_tokens and not self.num_spoiled:
            self.num_spoiled += 1
            return self._spoil(draft, state)
        return draft

    def forget(self, seq: Any) -> None:
        self.forgotten.append(seq.seq_id)


def _raise(draft: Draft, state: DecodeState) -> Draft:
    raise RuntimeError("no draft today")


def _change(**fields: Callable[[Draft, DecodeState], Any]) -> Any:
    return lambda draft, state: replace(draft, **{k: f(draft, state) for k, f in fields.items()})


WHOLE_STEP = {
    "raises": (_raise, "RuntimeError: no draft today"),
    "nothing": (lambda draft, state: None, ""),
    "a row too few": (
        _change(token_ids=lambda d, s: d.token_ids[1:]),
        "failed: ValueError: token_ids is",
    ),
    "flat ids": (_change(token_ids=lambda d, s: d.token_ids.flatten()), ""),
    "counts of another shape": (
        _change(num_draft_tokens=lambda d, s: d.num_draft_tokens[:, None]),
        "num_draft_tokens is torch.int64 of shape",
    ),
    "q of another width": (
        _change(probs=lambda d, s: torch.ones(*d.token_ids.shape, VOCAB - 1)),
        "probs is torch.float32 of shape",
    ),
    "one token too many": (
        lambda d, s: Draft(torch.cat((d.token_ids, d.token_ids[:, :1]), 1), d.num_draft_tokens + 1),
        "5 tokens were drafted",
    ),
}


@pytest.mark.parametrize("fault", WHOLE_STEP)
def test_a_broken_proposer_fails_what_it_touched(fault: str) -> None:
    """The rows of the spoiled step fail, with the proposer's name or its exception; what was still
    queued or in prefill is served, and so is the next request.
    """
    spoil, text = WHOLE_STEP[fault]
    proposer = FaultyProposer(spoil)
    engine = build_engine(
        ToyModel(LAW, VOCAB), proposer, num_blocks=64, max_num_seqs=3, max_num_batched_tokens=40
    )
    touched = [engine.add(prompt, GREEDY) for prompt in ([5, 6], [7, 8])]
    prefilling = engine.add([9] * 80, GREEDY)
    queued = engine.add([1, 2, 3], GREEDY)
    finished = run(engine, check=audit)
    assert proposer.num_spoiled == 1
    for request in touched:
        assert request.error is not None and text in request.error
        assert "faulty" in request.error or fault in ("raises", "nothing", "flat ids")
    for request in (prefilling, queued):
        assert request.error is None
        assert output_ids(request) == plain_greedy(LAW, request.prompt_token_ids, 25)
    assert set(map(id, finished)) == set(map(id, [*touched, prefilling, queued]))
    assert engine.pool.num_free == engine.pool.num_blocks
    late = engine.add([5, 6], GREEDY)
    run(engine, check=audit)
    assert output_ids(late) == plain_greedy(LAW, [5, 6], 25)
    assert late.output().outputs[0].stats["num_accepted_tokens"] > 0
    assert len(proposer.forgotten) == len(set(proposer.forgotten)) == 5


def _row(values: Callable[[Draft], Tensor], row: int) -> Any:
    def spoil(draft: Draft, state: DecodeState) -> Draft:
        token_ids = draft.token_ids.clone()
        token_ids[row] = values(draft)
        return replace(draft, token_ids=token_ids)

    return spoil


ONE_ROW = {
    "id at the vocabulary's end": _row(lambda d: torch.tensor([5, VOCAB, 5, 5]), 1),
    "a huge id": _row(lambda d: torch.full((4,), 2**40), 1),
    "a negative id": _row(lambda d: torch.tensor([-7, 5, 5, 5]), 1),
    "padding inside the count": _row(lambda d: torch.tensor([5, 5, 5, -1]), 1),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("fault", ONE_ROW)
def test_ids_outside_the_vocabulary_fail_their_row_only(fault: str, temperature: float) -> None:
    proposer = FaultyProposer(ONE_ROW[fault])
    engine = build_engine(ToyModel(LAW, VOCAB), proposer, num_blocks=64)
    others = [engine.add([5, 6], GREEDY)]
    failed = engine.add([7, 8], replace(GREEDY, temperature=temperature, seed=1))
    others.append(engine.add([9, 9], GREEDY))
    run(engine, check=audit)
    check_isolated(engine, failed, others, "'faulty' drafted an id outside the vocabulary of 50")
    assert output_ids(failed) == []


def _counts(row: int, value: int) -> Any:
    def spoil(draft: Draft, state: DecodeState) -> Draft:
        counts = draft.num_draft_tokens.clone()
        counts[row] = value
        return replace(draft, num_draft_tokens=counts)

    return spoil


@pytest.mark.parametrize("value", [-1, -3, 5, 9])
def test_counts_outside_the_window_do_not_corrupt(value: int) -> None:
    """num_draft_tokens below 0 or above the width: the row, or the step, fails with the proposer's
    name. A count of -1 leaves the last token's KV unwritten, and later text would silently differ.
    """
    engine = build_engine(ToyModel(LAW, VOCAB), FaultyProposer(_counts(1, value)), num_blocks=64)
    requests = [engine.add(prompt, GREEDY) for prompt in ([5, 6], [7, 8], [9, 9])]
    run(engine, check=audit)
    assert requests[1].error is not None and "faulty" in requests[1].error
    for request in requests:
        if request.error is None:
            assert output_ids(request) == plain_greedy(LAW, request.prompt_token_ids, 25)
    assert engine.pool.num_free == engine.pool.num_blocks


def test_a_proposer_that_ignores_a_rows_own_limit_does_not_corrupt() -> None:
    """A request opted out (K = 0) beside speculating ones, and its block table does not cover a
    window: the positions past it were wrapped into its last block, over committed tokens.
    """

    class Greedy(Proposer):
        name = "ignores_limits"

        def propose(self, state: DecodeState) -> Draft:
            width = state.max_num_draft_tokens
            rows = [plain_greedy(LAW, seq.token_ids, width) for seq in state.seqs]
            return Draft.from_lists(rows, state.device)

    engine = build_engine(ToyModel(LAW, VOCAB), Greedy(), num_blocks=64)
    opted_out = engine.add([7] * 14, replace(GREEDY, max_tokens=60, num_draft_tokens=0))
    other = engine.add([5, 6], replace(GREEDY, max_tokens=60))
    run(engine, check=audit)
    for request in (opted_out, other):
        text = plain_greedy(LAW, request.prompt_token_ids, 60)
        assert "ignores_limits" in request.error if request.error else output_ids(request) == text
    if opted_out.error is None:
        assert opted_out.output().outputs[0].stats["num_draft_tokens"] == 0


def test_a_proposer_that_fails_in_prefill() -> None:
    """extend() raises for one chunk: the rows of that chunk fail, decoding rows go on."""

    class FailsToExtend(FaultyProposer):
        def extend(self, spans: Any) -> None:
            if any(span.seq.token_ids[0] == 9 for span in spans):
                raise RuntimeError("cannot extend")

    proposer = FailsToExtend(lambda draft, state: draft)
    engine = build_engine(ToyModel(LAW, VOCAB), proposer, num_blocks=64)
    row = engine.add([5, 6], GREEDY)
    engine.step()
    bad = engine.add([9, 9, 9], GREEDY)
    assert bad in run(engine, check=audit)
    check_isolated(engine, bad, [row], "RuntimeError: cannot extend")


# --- a tokenizer that raises --------------------------------------------------------------------


class FragileTokenizer(WordTokenizer):
    """Cannot decode one id."""

    def __init__(self, bad: int) -> None:
        super().__init__([f" {i}" for i in range(VOCAB)])
        self._bad = bad

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
        if self._bad in list(token_ids):
            raise KeyError(self._bad)
        return super().decode(token_ids)


def test_a_tokenizer_that_raises_fails_one_request() -> None:
    """Ids past the tokenizer's own (padded vocabularies) can raise in decode. Only the request that
    emitted one may fail, and one that ended in the same step must still be reported.
    """
    texts = {prompt: plain_greedy(LAW, prompt, 25) for prompt in ((1, 2), (3,), (5, 6))}
    bad = next(t for t in texts[5, 6] if t not in texts[1, 2] and t not in texts[3,])
    at = texts[5, 6].index(bad)
    for num_before in range(1, at + 2):  # one of these ends in the very step that raises
        engine = build_engine(
            ToyModel(LAW, VOCAB), num_draft_tokens=0, tokenizer=FragileTokenizer(bad)
        )
        first = engine.add([1, 2], replace(GREEDY, max_tokens=num_before))
        failed = engine.add([5, 6], GREEDY)
        other = engine.add([3], GREEDY)
        finished = run(engine, check=audit)
        assert failed.error is not None and "KeyError" in failed.error
        assert first in finished
        assert first.error is None and output_ids(first) == texts[1, 2][:num_before]
        assert other.error is None
        assert output_ids(other) == texts[3,]
