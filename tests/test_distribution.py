"""The law of the emitted text through the whole engine: chi-squared of three tokens jointly.

The laws of T and D depend on the last two tokens, so the joint law of three tokens is enumerated
exactly. 50,000 samples run in mixed batches, through preemption and prefix hits. Each broken rule
and proposer below must be rejected by the same harness, so that it is known to have the power.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from toy import (
    ToyModel,
    build_engine,
    chi_squared_excess,
    context_hash,
    output_ids,
    plain_greedy,
    run,
    table_law,
)

import specdec.verifiers.target_model as target_model_module
from specdec.config import SamplingParams
from specdec.decode_state import DecodeState
from specdec.engine import Engine
from specdec.proposers.base import Draft, Proposer
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.ngram import NgramProposer
from specdec.sampling.noise import inverse_cdf, window_uniforms
from specdec.verifiers.rejection import rejection

VOCAB = 5
LAW = table_law(VOCAB, 11, scale=1.0)
DRAFT_LAW = table_law(VOCAB, 12, scale=1.0)
PREFIX = [(i * i + i // 3) % VOCAB for i in range(16)]  # one block, shared by all prompts
LAST = (3, 1)  # all that the law of a prompt's continuation depends on
SAMPLES_PER_REQUEST = 500
Rule = Callable[..., tuple[Tensor, Tensor]]


def joint_law(frequency_penalty: float) -> Tensor:
    """P of each triple behind a prompt that ends with LAST, [V, V, V] float64."""
    law = torch.zeros(VOCAB, VOCAB, VOCAB, dtype=torch.float64)
    for triple in itertools.product(range(VOCAB), repeat=3):
        probability = 1.0
        for i, token in enumerate(triple):
            context = [*LAST, *triple[:i]]
            logits = LAW(torch.tensor([context_hash(context, 2)]))[0].double()
            for earlier in triple[:i]:
                logits[earlier] -= frequency_penalty
            probability *= float(logits.softmax(-1)[token])
        law[triple] = probability
    return law


def make_engine(draft: Any, num_draft_tokens: int, rule: Rule = rejection) -> Engine:
    """A pool in which 512 running samples have to preempt each other: each is admitted with a
    shared block and one of its own, and needs another after its first step.
    """
    if isinstance(draft, DraftModelProposer):
        draft.model.attach(600, 16)
    return build_engine(
        ToyModel(LAW, VOCAB, order=2),
        draft,
        num_draft_tokens=num_draft_tokens,
        num_blocks=600,
        max_num_seqs=512,
        max_num_batched_tokens=4096,
        rule=rule,
    )


def drafting(proposer: Callable[[ToyModel], Proposer] = DraftModelProposer) -> Proposer:
    return proposer(ToyModel(DRAFT_LAW, VOCAB, order=2))


def prompt_for(num_draft_tokens: int) -> list[int]:
    """Two blocks less the lookahead: the first window fits exactly."""
    length = 2 * 16 - num_draft_tokens - 1
    return [*PREFIX, *[(3 * i) % VOCAB for i in range(length - 18)], *LAST]


def count_triples(
    engine: Engine, num_draws: int, check_greedy: bool = False, **fields: Any
) -> Tensor:
    """Run the samples among greedy, penalised and truncated requests; counts [V, V, V]."""
    prompt = prompt_for(engine.scheduler.num_draft_tokens)
    tests, greedy_rows, others = [], [], []
    for i in range(num_draws // SAMPLES_PER_REQUEST):
        params = SamplingParams(n=SAMPLES_PER_REQUEST, max_tokens=3, seed=10_000 * i, **fields)
        tests.append(engine.add(prompt, params))
        start = [*PREFIX, i % VOCAB, 3]
        greedy_rows.append(engine.add(start, SamplingParams(temperature=0, max_tokens=40)))
        others += [
            engine.add(prompt, SamplingParams(max_tokens=9, repetition_penalty=1.5, seed=i)),
            engine.add(prompt, SamplingParams(max_tokens=9, top_p=0.7, top_k=3, temperature=0.5)),
            engine.add([2], SamplingParams(max_tokens=9, num_draft_tokens=0, min_p=0.2)),
        ]
    run(engine)
    assert not any(request.error for request in [*tests, *greedy_rows, *others])
    for request in greedy_rows if check_greedy else ():
        assert output_ids(request) == plain_greedy(LAW, request.prompt_token_ids, 40, order=2)
    samples = [out.token_ids for request in tests for out in request.output().outputs]
    tokens = torch.tensor(samples)
    assert tokens.shape == (num_draws // SAMPLES_PER_REQUEST * SAMPLES_PER_REQUEST, 3)
    index = (tokens[:, 0] * VOCAB + tokens[:, 1]) * VOCAB + tokens[:, 2]
    return torch.bincount(index, minlength=VOCAB**3)


def excess(
    engine: Engine, num_draws: int, frequency_penalty: float = 0.0, *, honest: bool = False
) -> float:
    counts = count_triples(engine, num_draws, honest, frequency_penalty=frequency_penalty)
    return chi_squared_excess(counts, joint_law(frequency_penalty) * counts.sum())


@pytest.mark.parametrize(("num_draft_tokens", "frequency_penalty"), [(1, 0.0), (2, 0.7), (4, 0.0)])
def test_joint_law_with_a_draft_model(num_draft_tokens: int, frequency_penalty: float) -> None:
    """50,000 triples at temperature 1; K = 1 and 2 need several windows for one triple."""
    engine = make_engine(drafting(), num_draft_tokens)
    assert excess(engine, 50_000, frequency_penalty, honest=True) <= 0
    stats = engine.stats
    assert stats.num_preemptions > 1_000 and stats.num_prefix_hit_tokens > 10_000
    assert 0.2 < stats.acceptance_rate < 0.8
    assert engine.pool.num_free == engine.pool.num_blocks
    engine.pool.check_integrity()


def test_joint_law_with_ngram_drafts() -> None:
    """One-hot drafts of a host-side proposer, misses included, with a penalty."""
    engine = make_engine(NgramProposer(1, 3), 2)
    assert excess(engine, 20_000, 0.7, honest=True) <= 0
    assert engine.stats.num_preemptions > 500 and engine.stats.num_accepted_tokens > 5_000


# --- what must be rejected ----------------------------------------------------------------------


def recover_from_p(p: Tensor, q: Any, ids: Tensor, counts: Tensor, u: Tensor, v: Tensor) -> Any:
    """The recovered token comes from p instead of (p - q)+."""
    accepted, _ = rejection(p, q, ids, counts, u, v)
    rows = torch.arange(len(accepted))
    return accepted, inverse_cdf(p[rows, accepted], v[rows, accepted])


def residual_abs(p: Tensor, q: Any, ids: Tensor, counts: Tensor, u: Tensor, v: Tensor) -> Any:
    """|p - q| instead of (p - q)+."""
    accepted, last = rejection(p, q, ids, counts, u, v)
    if q is None:
        return accepted, last
    rows = torch.arange(len(accepted))
    at = accepted.clamp(max=q.shape[1] - 1)
    weights = (p[rows, accepted] - q[rows, at]).abs()
    return accepted, torch.where(accepted < counts, inverse_cdf(weights, v[rows, accepted]), last)


def accept_too_often(p: Tensor, q: Any, ids: Tensor, counts: Tensor, u: Tensor, v: Tensor) -> Any:
    """u q < 1.2 p."""
    return rejection(p, q, ids, counts, u / 1.2, v)


class ArgmaxWithSoftmax(DraftModelProposer):
    """Drafts its argmax and reports the softmax."""

    def _draw(self, *args: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        token, q, valid = super()._draw(*args)
        return token if q is None else q.argmax(-1), q, valid


class NoisyProposer(DraftModelProposer):
    """Changes the step's noise before it drafts."""

    def propose(self, state: DecodeState) -> Draft:
        if state.uniforms is not None:
            self.spoil(state)
        return super().propose(state)

    def spoil(self, state: DecodeState) -> None:
        raise NotImplementedError


class AcceptNoiseIsDraftNoise(NoisyProposer):
    """The draft and its acceptance test share a uniform."""

    def spoil(self, state: DecodeState) -> None:
        assert state.uniforms is not None
        state.uniforms = replace(state.uniforms, accept=state.uniforms.draft)


class RecoverNoiseIsDraftNoise(NoisyProposer):
    """The recovered token reuses the uniform of the refused draft."""

    def spoil(self, state: DecodeState) -> None:
        assert state.uniforms is not None
        state.uniforms = replace(state.uniforms, recover=state.uniforms.draft)


class SameNoiseInEveryWindow(NoisyProposer):
    """Noise keyed by the offset alone."""

    def spoil(self, state: DecodeState) -> None:
        assert state.uniforms is not None
        width = state.uniforms.draft.shape[1]
        starts = torch.zeros_like(state.seq_lens)
        state.uniforms = window_uniforms(state.sampling.seeds, starts, width)


class DropsUnlikelyDrafts(DraftModelProposer):
    """Ends the draft before a token of small q, having drawn it."""

    def propose(self, state: DecodeState) -> Draft:
        draft = super().propose(state)
        if draft.probs is None:
            return draft
        q = draft.probs.gather(2, draft.token_ids.clamp(min=0)[..., None])[..., 0]
        kept = (q > 0.25).long().cumprod(1).sum(1)
        return replace(draft, num_draft_tokens=draft.num_draft_tokens.minimum(kept))


@pytest.mark.parametrize("rule", [recover_from_p, residual_abs, accept_too_often])
def test_broken_rules_are_rejected(rule: Rule) -> None:
    assert excess(make_engine(drafting(), 2, rule), 10_000) > 0


@pytest.mark.parametrize(
    "proposer",
    [
        ArgmaxWithSoftmax,
        AcceptNoiseIsDraftNoise,
        RecoverNoiseIsDraftNoise,
        SameNoiseInEveryWindow,
        DropsUnlikelyDrafts,
    ],
)
def test_broken_proposers_are_rejected(proposer: Any) -> None:
    assert excess(make_engine(drafting(proposer), 2), 10_000) > 0


def test_penalties_taken_once_per_window_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """T's penalties leave out the drafts before each position."""
    honest = target_model_module.process_logits

    def once(logits: Tensor, rows: Any, drafts: Tensor, offset: int) -> Tensor:
        return honest(logits, rows, torch.full_like(drafts, -1), offset)

    monkeypatch.setattr(target_model_module, "process_logits", once)
    assert excess(make_engine(drafting(), 4), 10_000, 0.7) > 0


def test_a_wrong_law_is_rejected() -> None:
    """The harness itself: samples without penalty against the law with one."""
    counts = count_triples(make_engine(drafting(), 2), 5_000)
    assert chi_squared_excess(counts, joint_law(0.7) * counts.sum()) > 0
    assert chi_squared_excess(counts, joint_law(0.0) * counts.sum()) <= 0


def test_a11_recovery_noise_is_not_the_drafts_noise() -> None:
    """p = (.1, .6, .3), q = (.5, .3, .2), K = 3: reusing the draft's noise for the recovered token
    biased the output by an amount that shows from 11,000 draws on.
    """
    p, q = torch.tensor([0.1, 0.6, 0.3]), torch.tensor([0.5, 0.3, 0.2])

    def first_token_excess(proposer: Any, num_draws: int) -> float:
        target, draft = (ToyModel(lambda h, w=w: w.log().expand(len(h), -1), 3) for w in (p, q))
        drafter = proposer(draft)
        draft.attach(600, 16)
        engine = build_engine(target, drafter, num_draft_tokens=3, num_blocks=600, max_num_seqs=500)
        requests = [
            engine.add([1], SamplingParams(n=500, max_tokens=1, seed=1000 * i))
            for i in range(num_draws // 500)
        ]
        run(engine)
        tokens = [out.token_ids[0] for request in requests for out in request.output().outputs]
        counts = torch.bincount(torch.tensor(tokens), minlength=3)
        return chi_squared_excess(counts, p * len(tokens))

    assert first_token_excess(DraftModelProposer, 40_000) <= 0
    assert first_token_excess(RecoverNoiseIsDraftNoise, 20_000) > 0  # positive control
