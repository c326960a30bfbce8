"""Cases of users of speculative decoding: distribution, randomness and sampling parameters.

Each is named after its number in the list of reported faults. Statistical tests have fixed seeds
and the bound dof + 5 sqrt(2 dof); beside each stands a broken variant that the same test rejects.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from toy import (
    Law,
    ScriptedProposer,
    ToyModel,
    audit,
    blended_law,
    build_engine,
    chi_squared_excess,
    constant_law,
    context_hash,
    output_ids,
    plain_greedy,
    run,
    table_law,
)

from specdec.config import SamplingParams
from specdec.decode_state import DecodeState
from specdec.engine import Engine
from specdec.outputs import CompletionOutput
from specdec.proposers.base import Draft, Proposer
from specdec.proposers.draft_model import DraftModelProposer
from specdec.verifiers.rejection import rejection

VOCAB = 50
LAW = table_law(VOCAB, 0)
OTHER = table_law(VOCAB, 1)
CLOSE = blended_law(LAW, OTHER, 3)  # agrees with LAW behind two contexts of three


def engine_of(draft: Any = CLOSE, num_draft_tokens: int = 4, **options: Any) -> Engine:
    """T = LAW; a draft model of law `draft`, or a proposer, or none at K = 0."""
    if num_draft_tokens == 0:
        proposer = None
    else:
        proposer = draft if isinstance(draft, Proposer) else ToyModel(draft, VOCAB)
    return build_engine(
        ToyModel(LAW, VOCAB), proposer, num_draft_tokens=num_draft_tokens, **options
    )


def sample(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> CompletionOutput:
    request = engine.add(prompt, params)
    run(engine, check=audit)
    assert request.error is None
    return request.output().outputs[0]


def first_tokens(engine: Engine, count: int, **fields: Any) -> torch.Tensor:
    """Counts of the first emitted token over `count` requests of prompt [1, 2]."""
    requests = [
        engine.add([1, 2], SamplingParams(max_tokens=1, seed=7 * i, **fields)) for i in range(count)
    ]
    run(engine)
    counts = torch.zeros(engine.target.vocab_size)
    for request in requests:
        counts[output_ids(request)[0]] += 1
    return counts


def wide(target: Law, draft: Any, vocab_size: int, **options: Any) -> Engine:
    """An engine of many rows, for thousands of short requests."""
    drafter = draft if isinstance(draft, Proposer) else ToyModel(draft, vocab_size)
    return build_engine(
        ToyModel(target, vocab_size),
        drafter,
        num_draft_tokens=2,
        num_blocks=1100,
        max_num_seqs=1000,
        max_num_batched_tokens=8000,
        prefix_caching=False,
        **options,
    )


# --- distribution -------------------------------------------------------------------------------

P = torch.tensor([0.30, 0.25, 0.20, 0.15, 0.07, 0.03])
Q = torch.tensor([0.05, 0.15, 0.30, 0.10, 0.25, 0.15])
P_LAW, Q_LAW = constant_law(P.log().tolist()), constant_law(Q.log().tolist())


class TruncatingProposer(Proposer):
    """Draws from Q cut to its two best and reports the truncated law, or (broken) all of Q."""

    name = "truncating"

    def __init__(self, honest: bool) -> None:
        self._honest = honest
        self._generator = torch.Generator().manual_seed(0)
        self.drafted: set[int] = set()

    def propose(self, state: DecodeState) -> Draft:
        cut = torch.where(Q.topk(2).values[-1] <= Q, Q, 0.0)
        cut = cut / cut.sum()
        shape = (state.num_rows, state.max_num_draft_tokens)
        ids = torch.multinomial(cut.expand(shape[0], -1), shape[1], True, generator=self._generator)
        self.drafted |= set(ids.flatten().tolist())
        probs = (cut if self._honest else Q).expand(*shape, -1).contiguous()
        return Draft(ids, torch.full((shape[0],), shape[1]), probs)


@pytest.mark.parametrize("honest", [True, False])
def test_a12_q_is_the_truncated_law_the_draft_was_drawn_from(honest: bool) -> None:
    """A drafter that samples with top_k = 2 but reports its full softmax biases the output.

    Positive control: the dishonest drafter is rejected by the same 10,000 draws.
    """
    proposer = TruncatingProposer(honest)
    excess = chi_squared_excess(first_tokens(wide(P_LAW, proposer, 6), 10_000), P * 10_000)
    assert proposer.drafted == {2, 4}
    assert (excess <= 0) == honest, excess


class SpyProposer(DraftModelProposer):
    """Keeps what it hands in."""

    def __init__(self, model: ToyModel) -> None:
        super().__init__(model)
        self.drafts: list[Draft] = []

    def propose(self, state: DecodeState) -> Draft:
        self.drafts.append(super().propose(state))
        return self.drafts[-1]


def test_a12_the_requests_own_top_k_truncates_q_too() -> None:
    """With top_k 2 each q row of the draft model holds two tokens, every draft is one of them, and
    the output follows the truncated p: four of six ids never appear.
    """
    model = ToyModel(Q_LAW, 6)
    model.attach(1100, 16)
    spy = SpyProposer(model)
    counts = first_tokens(wide(P_LAW, spy, 6), 5_000, top_k=2)
    cut = torch.where(P >= 0.25, P, 0.0)
    assert chi_squared_excess(counts, cut / cut.sum() * 5_000) <= 0
    probs = torch.cat([draft.probs.reshape(-1, 6) for draft in spy.drafts])  # type: ignore[union-attr]
    ids = torch.cat([draft.token_ids.reshape(-1) for draft in spy.drafts])
    assert len(ids) == 10_000 and set(ids.tolist()) == {2, 4}
    assert torch.equal((probs > 0).sum(-1), torch.full((len(ids),), 2))
    assert torch.allclose(probs.sum(-1), torch.ones(len(ids)))


class GreedyDrafter(Proposer):
    """Drafts the argmax of Q, as one-hot, or (broken) with the softmax as its q."""

    name = "greedy_drafter"

    def __init__(self, one_hot: bool) -> None:
        self._one_hot = one_hot

    def propose(self, state: DecodeState) -> Draft:
        shape = (state.num_rows, state.max_num_draft_tokens)
        ids = torch.full(shape, int(Q.argmax()))
        probs = None if self._one_hot else Q.expand(*shape, -1).contiguous()
        return Draft(ids, torch.full((shape[0],), shape[1]), probs)


@pytest.mark.parametrize("one_hot", [True, False])
def test_a13_a_greedy_drafters_q_is_one_hot(one_hot: bool) -> None:
    """Drafts taken by argmax were tested against the softmax, at temperature 1.

    Positive control: with the softmax as q the same draws are rejected.
    """
    counts = first_tokens(wide(P_LAW, GreedyDrafter(one_hot), 6), 10_000)
    excess = chi_squared_excess(counts, P * 10_000)
    assert (excess <= 0) == one_hot, excess


class ImpossibleProposer(Proposer):
    """Drafts a token to which its own q gives probability 0."""

    name = "impossible"

    def propose(self, state: DecodeState) -> Draft:
        shape = (state.num_rows, state.max_num_draft_tokens)
        probs = torch.zeros(*shape, 6)
        probs[..., 1] = 1.0
        return Draft(torch.full(shape, 3), torch.full((shape[0],), shape[1]), probs)


def test_a15_drafts_of_probability_zero() -> None:
    """q(x) = 0 gave p / 0 = inf or 0 / 0 = NaN in the ratio; p(x) = 0 must never come out."""
    counts = first_tokens(wide(P_LAW, ImpossibleProposer(), 6), 500)
    assert counts.sum() == 500
    banned = first_tokens(wide(P_LAW, ImpossibleProposer(), 6), 500, logit_bias={3: -100})
    assert banned[3] == 0 and banned.sum() == 500
    allowed = first_tokens(wide(P_LAW, Q_LAW, 6), 2_000, allowed_token_ids=[0, 5])
    assert allowed[1:5].sum() == 0 and (allowed[[0, 5]] > 50).all()


def test_a15_the_rule_is_finite_at_all_zero_patterns() -> None:
    """All 36 pairs of one-hot p and q, and each drafted token: the output is p's token."""
    eye = torch.eye(6)
    for p_id in range(6):
        for q_id in range(6):
            p = eye[p_id].expand(6, 2, 6)
            q = eye[q_id].expand(6, 1, 6)
            drafts = torch.arange(6)[:, None]
            u = torch.full((6, 2), 0.5)
            accepted, last = rejection(p, q, drafts, torch.ones(6), u, u)
            assert (last == p_id).all()
            assert (accepted == (drafts[:, 0] == p_id)).all()


# --- randomness ---------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 4])
def test_a16_the_same_seed_gives_the_same_tokens(k: int) -> None:
    """A seed was taken for the target's sampling but not for the draft's."""
    params = SamplingParams(seed=42, max_tokens=60)
    outs = [sample(engine_of(num_draft_tokens=k), [1, 2, 3], params) for _ in range(2)]
    engine = engine_of(num_draft_tokens=k)
    outs += [sample(engine, [1, 2, 3], params) for _ in range(2)]  # also after a prefix hit
    assert all(out.token_ids == outs[0].token_ids and out.seed == 42 for out in outs)
    other = sample(engine, [1, 2, 3], replace(params, seed=43))
    assert other.token_ids != outs[0].token_ids  # positive control


def test_a17_seeded_rows_in_a_mixed_batch_equal_their_solo_run() -> None:
    """One generator for the batch made seeded rows depend on unseeded neighbours."""
    seeds = [1, None, 2]
    solo = {
        s: sample(engine_of(), [5, 6], SamplingParams(seed=s, max_tokens=50)).token_ids
        for s in (1, 2)
    }
    free = []
    for _ in range(2):
        engine = engine_of()
        requests = [engine.add([5, 6], SamplingParams(seed=s, max_tokens=50)) for s in seeds]
        run(engine, check=audit)
        assert output_ids(requests[0]) == solo[1] and output_ids(requests[2]) == solo[2]
        free.append(requests[1].output().outputs[0])
    assert free[0].token_ids != free[1].token_ids  # positive control: unseeded rows differ
    again = sample(engine_of(), [5, 6], SamplingParams(seed=free[0].seed, max_tokens=50))
    assert again.token_ids == free[0].token_ids  # the reported seed reproduces them


def test_a17_samples_of_one_prompt() -> None:
    """n samples: sample j equals a request with seed + j."""
    engine = engine_of()
    request = engine.add([5, 6], SamplingParams(seed=2**64 - 2, n=4, max_tokens=30))
    run(engine, check=audit)
    outs = request.output().outputs
    assert [out.seed for out in outs] == [2**64 - 2, 2**64 - 1, 0, 1]
    assert len({tuple(out.token_ids) for out in outs}) == 4
    for out in outs:
        solo = sample(engine_of(), [5, 6], SamplingParams(seed=out.seed, max_tokens=30))
        assert solo.token_ids == out.token_ids


@pytest.mark.parametrize("k", [0, 4])
def test_a19_a_seeded_request_does_not_depend_on_its_batch(k: int) -> None:
    """Alone, in a batch of 8, reordered, preempted, in small chunks: the same tokens."""
    params = SamplingParams(seed=11, max_tokens=60, temperature=0.8, top_p=0.95)
    expected = sample(engine_of(num_draft_tokens=k), [9, 8, 7], params).token_ids

    def beside(order: Sequence[int], **options: Any) -> tuple[list[int], Engine]:
        engine = engine_of(num_draft_tokens=k, **options)
        requests = {}
        for i in order:
            own = params if i == 0 else SamplingParams(seed=i, max_tokens=20 + 9 * i)
            requests[i] = engine.add([9 - i, 8, 7], own)
        run(engine, check=audit)
        return output_ids(requests[0]), engine

    for order in ([0, 1, 2, 3, 4, 5, 6, 7], [7, 3, 5, 0, 1, 2, 6, 4], [7, 6, 5, 4, 3, 2, 1, 0]):
        assert beside(order)[0] == expected
        tokens, engine = beside(order, num_blocks=9)
        assert tokens == expected
        assert engine.stats.num_preemptions > 0  # positive control
    assert beside([1, 2, 3, 0], max_num_batched_tokens=7)[0] == expected
    assert beside([1, 2, 3, 0], max_num_seqs=1)[0] == expected
    assert sample(engine_of(num_draft_tokens=k), [9, 8, 7], replace(params, seed=12)).token_ids != (
        expected
    )


@pytest.mark.parametrize("k", [0, 2])
def test_a20_greedy_beside_a_sampled_row(k: int) -> None:
    """A greedy row in a sampled batch was sampled among ties; a sampled row with top_k but without
    a temperature was taken greedily.
    """
    law = constant_law([1.0, 1.0, 0.0])
    engine = build_engine(ToyModel(law, 3), ToyModel(law, 3) if k else None, num_draft_tokens=k)
    greedy = engine.add([1, 2], SamplingParams(temperature=0, max_tokens=300))
    sampled = engine.add([1, 2], SamplingParams(max_tokens=300, seed=1))
    top_k = engine.add([1, 2], SamplingParams(max_tokens=300, seed=2, top_k=50))
    run(engine, check=audit)
    assert set(output_ids(greedy)) == {0}
    p = torch.tensor([1.0, 1.0, 0.0]).softmax(-1)
    for request in (sampled, top_k):
        counts = torch.bincount(torch.tensor(output_ids(request)), minlength=3)
        assert chi_squared_excess(counts, p * 300) <= 0
        assert (counts > 20).all()


@pytest.mark.parametrize("k", [0, 1, 4])
def test_a21_uniform_draws_are_not_constant(k: int) -> None:
    """With speculation on, one uniform for all windows made every draw the same."""
    law = constant_law([0.0] * 8)
    uniform = torch.full((8,), 125.0)
    engine = build_engine(
        ToyModel(law, 8, max_model_len=2048),
        ToyModel(law, 8, max_model_len=2048) if k else None,
        num_draft_tokens=k,
    )
    tokens = torch.tensor(sample(engine, [1], SamplingParams(max_tokens=1000, seed=5)).token_ids)
    assert chi_squared_excess(torch.bincount(tokens, minlength=8), uniform) <= 0
    pairs = torch.bincount(tokens[:-1] * 8 + tokens[1:], minlength=64)
    assert chi_squared_excess(pairs, torch.full((64,), 999 / 64)) <= 0
    many = wide(law, law, 8)
    assert chi_squared_excess(first_tokens(many, 1000), uniform) <= 0


@pytest.mark.parametrize("k", range(1, 9))
def test_a23_near_ties_are_bit_equal_to_plain_decoding(k: int) -> None:
    """Ties and near-ties broke differently in the verify step than in plain decoding.

    The logits are rounded to halves, so that many contexts have two or more largest ones: the
    lowest index must win, at any K.
    """
    table = table_law(VOCAB, 4, scale=1.0).table.mul(2).round().div(2)  # type: ignore[attr-defined]
    ties = (table == table.amax(-1, keepdim=True)).sum(-1) > 1
    assert 0.2 < ties.float().mean() < 0.9  # positive control: ties are common

    def law(hashes: torch.Tensor) -> torch.Tensor:
        return table[hashes % len(table)]

    engine = build_engine(ToyModel(law, VOCAB), ToyModel(law, VOCAB), num_draft_tokens=k)
    beside = engine.add([3], SamplingParams(seed=1, max_tokens=200))  # p as one-hot rows
    out = sample(engine, [1, 2], SamplingParams(temperature=0, max_tokens=200))
    assert out.token_ids == plain_greedy(law, [1, 2], 200)
    assert out.stats["acceptance_rate"] == 1.0
    assert beside.finished


# --- sampling parameters ------------------------------------------------------------------------


def penalised_greedy(law: Law, prompt: list[int], count: int, params: SamplingParams) -> list[int]:
    """Greedy decoding with penalties, in plain Python."""
    ids = list(prompt)
    for _ in range(count):
        logits = law(torch.tensor([context_hash(ids, None)]))[0].tolist()
        output = Counter(ids[len(prompt) :])
        for token in set(ids):
            z = logits[token]
            z = z / params.repetition_penalty if z > 0 else z * params.repetition_penalty
            z -= params.frequency_penalty * output[token]
            logits[token] = z - params.presence_penalty * (output[token] > 0)
        ids.append(logits.index(max(logits)))
    return ids[len(prompt) :]


PENALTIES = [
    {"repetition_penalty": 1.5},
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5},
    {"repetition_penalty": 1.25, "presence_penalty": 0.25, "frequency_penalty": 0.5},
]


@pytest.mark.parametrize("fields", PENALTIES)
def test_a24_penalties_act_inside_the_window(fields: dict[str, float]) -> None:
    """Penalties were computed once per step, so a window of a flat model repeated one token.

    Without a penalty the flat stub emits token 0 for ever; with one it must move on at each
    position of a window, exactly as with K = 0.
    """
    law = constant_law([1.0] * VOCAB)
    params = SamplingParams(temperature=0, max_tokens=70, **fields)
    expected = penalised_greedy(law, [3, 0], 70, params)
    assert len(set(expected)) >= 48  # positive control: the penalty is at work
    for k in (0, 1, 4):
        engine = build_engine(
            ToyModel(law, VOCAB), ToyModel(law, VOCAB) if k else None, num_draft_tokens=k
        )
        plain = engine.add([3, 0], SamplingParams(temperature=0, max_tokens=70))
        out = sample(engine, [3, 0], params)
        assert out.token_ids == expected
        assert set(output_ids(plain)) == {0}
        assert k == 0 or out.stats["acceptance_rate"] == 1.0  # q has the penalties too


@pytest.mark.parametrize("fields", PENALTIES)
def test_a26_refused_drafts_leave_no_trace_in_the_penalties(fields: dict[str, float]) -> None:
    """Refused drafts stayed in the penalty counts.

    Each window of five is refused at position 2, and the refused tokens are the ones that plain
    decoding emits next, so that counting them once would change the text.
    """
    law = table_law(VOCAB, 9, scale=0.3)
    params = SamplingParams(temperature=0, max_tokens=80, **fields)
    expected = penalised_greedy(law, [3, 1], 80, params)

    def draft(token_ids: list[int], limit: int) -> list[int]:
        rest = expected[len(token_ids) - 2 :]
        return [*rest[:2], *rest[3:6]]

    engine = build_engine(ToyModel(law, VOCAB), ScriptedProposer(draft), num_draft_tokens=5)
    out = sample(engine, [3, 1], params)
    assert out.token_ids == expected
    assert 1.9 < out.stats["num_accepted_tokens"] / out.stats["num_target_steps"] < 2.2
    assert expected != plain_greedy(law, [3, 1], 80)  # positive control


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a27_a_banned_token_that_is_always_proposed(temperature: float) -> None:
    """logit_bias -100 was applied at the first position of a window only."""
    proposer = ScriptedProposer(lambda ids, limit: [7] * limit)
    peaked = constant_law([3.0 if i == 7 else 0.0 for i in range(VOCAB)])
    fields: dict[str, Any] = {"temperature": temperature, "max_tokens": 100, "seed": 1}
    for draft in (proposer, ToyModel(peaked, VOCAB)):
        engine = build_engine(ToyModel(peaked, VOCAB), draft)
        banned = engine.add([1], SamplingParams(logit_bias={7: -100}, **fields))
        free = engine.add([1], SamplingParams(**fields))
        run(engine, check=audit)
        assert banned.error is None and len(output_ids(banned)) == 100
        assert 7 not in output_ids(banned)
        assert 7 in output_ids(free)  # positive control


def test_a27_min_p_holds_at_every_position_of_a_window() -> None:
    """min_p was refused, or skipped, under speculation. p = P has three ids of at least 0.6 P_max:
    at all offsets of the window only these come out, in their proportions.
    """
    engine = wide(P_LAW, Q_LAW, 6)
    params = [SamplingParams(max_tokens=6, min_p=0.6, seed=i) for i in range(2_000)]
    requests = [engine.add([1, 2], own) for own in params]
    run(engine)
    cut = torch.where(0.6 * P.max() <= P, P, 0.0)
    tokens = torch.tensor([output_ids(request) for request in requests])
    for position in range(6):
        counts = torch.bincount(tokens[:, position], minlength=6)
        assert chi_squared_excess(counts, cut / cut.sum() * 2_000) <= 0
    assert engine.stats.num_accepted_tokens > 1_000  # positive control


def check_logprobs(out: CompletionOutput, prompt: list[int], num_top: int) -> None:
    """Against log_softmax of the law behind each emitted token."""
    ids = list(prompt)
    assert out.logprobs is not None and len(out.logprobs) == len(out.token_ids)
    for token, entry in zip(out.token_ids, out.logprobs, strict=True):
        expected = LAW(torch.tensor([context_hash(ids, None)]))[0].log_softmax(-1)
        assert entry.token_id == token
        assert math.isclose(entry.logprob, float(expected[token]), abs_tol=1e-5)
        top = expected.topk(num_top)
        assert list(entry.top) == top.indices.tolist()
        assert torch.allclose(torch.tensor(list(entry.top.values())), top.values, atol=1e-5)
        ids.append(token)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("draft", [CLOSE, LAW, OTHER])
def test_a29_logprobs_are_the_targets_at_each_token(draft: Law, temperature: float) -> None:
    """Log-probabilities came from the window's first position, or from the draft, or were those
    after penalties. Accepted, recovered and bonus tokens are all in the text (mixed acceptance).
    """
    params = SamplingParams(temperature=temperature, max_tokens=60, logprobs=2, seed=8, top_k=20)
    out = sample(engine_of(draft), [4, 5, 6], params)
    check_logprobs(out, [4, 5, 6], 2)
    if draft is CLOSE:
        assert {"accepted", "recovered", "bonus"} <= set(out.origins)  # positive control
    if temperature == 0:
        plain = sample(engine_of(num_draft_tokens=0), [4, 5, 6], params)
        assert [e.token_id for e in out.logprobs] == [e.token_id for e in plain.logprobs]  # type: ignore[union-attr]
        assert out.logprobs == plain.logprobs


def test_a29_prompt_logprobs() -> None:
    """Prompt log-probabilities across chunks, beside speculating rows and after a prefix hit."""
    engine = engine_of(max_num_batched_tokens=25)
    prompt = [(3 * i) % VOCAB for i in range(70)]
    engine.add([1], SamplingParams(temperature=0, max_tokens=60))
    for _ in range(2):
        request = engine.add(prompt, SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1))
        while not request.finished:
            engine.step()
            audit(engine)
        found = request.output().prompt_logprobs
        assert found is not None and [entry.token_id for entry in found] == prompt[1:]
        for i, entry in enumerate(found):
            expected = LAW(torch.tensor([context_hash(prompt[: i + 1], None)]))[0].log_softmax(-1)
            assert math.isclose(entry.logprob, float(expected[prompt[i + 1]]), abs_tol=1e-5)
            assert list(entry.top) == [int(expected.argmax())]
