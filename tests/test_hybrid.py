"""The hybrid proposer: lookup where a long match exists, the draft model elsewhere, lossless."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_distribution import DRAFT_LAW, LAST, LAW, PREFIX, VOCAB, joint_law
from toy import (
    ToyModel,
    audit,
    blended_law,
    build_engine,
    chain_law,
    chi_squared_excess,
    output_ids,
    plain_greedy,
    run,
    table_law,
)

from specdec.assembly import assemble
from specdec.config import EngineConfig, SamplingParams
from specdec.decode_state import DecodeState
from specdec.engine import Engine
from specdec.proposers.base import Draft
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.hybrid import HybridProposer
from specdec.proposers.ngram import NgramProposer


def hybrid_engine(
    target: ToyModel, draft: ToyModel, n: int, num_draft_tokens: int = 4, **options: Any
) -> Engine:
    num_blocks = options.setdefault("num_blocks", 256)
    draft.attach(num_blocks, 16)
    proposer = HybridProposer(NgramProposer(n, n), DraftModelProposer(draft))
    return build_engine(target, proposer, num_draft_tokens=num_draft_tokens, **options)


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 5])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_greedy_text_is_plain_text(num_draft_tokens: int, n: int) -> None:
    """Texts of 7 tokens repeat themselves: both sources draft, in one batch, KV audited."""
    law, other = table_law(7, 5), table_law(7, 6)
    target = ToyModel(law, 7, order=2)
    draft = ToyModel(blended_law(law, other, 3), 7, order=2)
    engine = hybrid_engine(target, draft, n, num_draft_tokens)
    prompts = [[(i * j) % 7 for j in range(1, 4 + 5 * i)] for i in range(1, 7)]
    requests = [engine.add(p, SamplingParams(temperature=0, max_tokens=60)) for p in prompts]
    run(engine, check=audit)
    for prompt, request in zip(prompts, requests, strict=True):
        assert output_ids(request) == plain_greedy(law, prompt, 60, order=2)
    assert engine.pool.num_free == engine.pool.num_blocks


def test_the_model_catches_up_behind_matches() -> None:
    """A cycle of 6 that the draft knows: matches run for a while, then none; D == T accepts all."""
    law = table_law(9, 3)
    target, draft = ToyModel(law, 9), ToyModel(law, 9)
    engine = hybrid_engine(target, draft, 2)
    prompt = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    request = engine.add(prompt, SamplingParams(temperature=0, max_tokens=80))
    found: list[bool] = []
    lookup = engine._proposer._lookup  # type: ignore[attr-defined]
    find = lookup.find

    def watched(state: DecodeState) -> list[list[int]]:
        matches: list[list[int]] = find(state)
        found.append(bool(matches[0]))
        return matches

    lookup.find = watched
    run(engine, check=audit)
    assert output_ids(request) == plain_greedy(law, prompt, 80)
    assert found.count(True) > 3 and found.count(False) > 3  # positive control: both were used
    switched = [i for i in range(1, len(found)) if found[i - 1] and not found[i]]
    assert switched, "the model drafts again behind a match"


def test_a_matched_row_asks_no_model() -> None:
    target = ToyModel(chain_law(6, {}), 6, order=1)
    draft = ToyModel(chain_law(6, {}), 6, order=1)
    engine = hybrid_engine(target, draft, 2)
    engine.add([*range(6), *range(6)], SamplingParams(temperature=0, max_tokens=30))
    run(engine, check=audit)
    assert draft.num_forwards == 1  # the prompt's
    assert engine.stats.acceptance_rate == 1.0


def counts_of(engine: Engine, num_draws: int) -> torch.Tensor:
    """Triples behind a prompt in which some windows match and others do not."""
    prompt = [*PREFIX, *LAST, 0, 4, *LAST]
    requests = [
        engine.add(prompt, SamplingParams(n=500, max_tokens=3, seed=70_000 + 10_000 * i))
        for i in range(num_draws // 500)
    ]
    run(engine)
    samples = [out.token_ids for request in requests for out in request.output().outputs]
    tokens = torch.tensor(samples)
    index = (tokens[:, 0] * VOCAB + tokens[:, 1]) * VOCAB + tokens[:, 2]
    return torch.bincount(index, minlength=VOCAB**3)


def law_engine(n: int = 3) -> Engine:
    target = ToyModel(LAW, VOCAB, order=2)
    draft = ToyModel(DRAFT_LAW, VOCAB, order=2)
    return hybrid_engine(
        target,
        draft,
        n,
        2,
        num_blocks=600,
        max_num_seqs=256,
        max_num_batched_tokens=4096,
    )


def test_joint_law() -> None:
    """20,000 triples; matched and drawn rows share batches."""
    engine = law_engine()
    counts = counts_of(engine, 20_000)
    assert chi_squared_excess(counts, joint_law(0.0) * counts.sum()) <= 0
    assert 0.1 < engine.stats.acceptance_rate < 0.9


def test_joint_law_rejects_a_match_with_the_models_q(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a matched row that is handed in with the model's q for another draft."""
    engine = law_engine(n=1)
    propose = HybridProposer.propose

    def wrong(self: HybridProposer, state: DecodeState) -> Draft:
        draft = propose(self, state)
        probs = torch.full(
            (state.num_rows, draft.max_num_draft_tokens, state.vocab_size), 1 / state.vocab_size
        )
        return replace(draft, probs=probs)

    monkeypatch.setattr(HybridProposer, "propose", wrong)
    counts = counts_of(engine, 20_000)
    assert chi_squared_excess(counts, joint_law(0.0) * counts.sum()) > 0


def test_hybrid_without_a_draft_is_refused(tmp_path: Any) -> None:
    from tiny_models import tiny_config
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    with pytest.raises(ValueError, match="proposer='hybrid' needs a draft"):
        assemble(model, None, EngineConfig(proposer="hybrid"), tokenizer=object(), progress=False)
