"""K from cost: the choice, what it may look at, and the cache of measured costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_model

import specdec.assembly as assembly
import specdec.calibration as calibration
from specdec import LLM, SamplingParams
from specdec.calibration import step_costs
from specdec.lookahead import PRIORS, SEEDED_LOOKAHEAD, LookaheadChooser, Prior, StepCosts
from specdec.stats import SpecStats

MEASURES = assembly.measures_costs  # before conftest's fixture sets it aside


@pytest.fixture(autouse=True)
def measured_lookahead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(assembly, "measures_costs", MEASURES)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


FLAT = StepCosts({1: 1.0, 64: 1.0}, {1: 0.1, 64: 0.1})  # bound by bandwidth
STEEP = StepCosts({1: 1.0, 2: 2.0, 64: 64.0}, {1: 0.1, 64: 6.4})  # every token costs the same


def test_flat_costs_give_a_long_lookahead_and_steep_ones_none() -> None:
    assert LookaheadChooser(FLAT, PRIORS["draft_model"]).best(1) >= 3
    assert LookaheadChooser(STEEP, PRIORS["draft_model"]).best(1) == 0


def test_the_choice_is_the_best_of_the_expected_speedups() -> None:
    chooser = LookaheadChooser(FLAT, Prior(1.0, 0.8, 0.5))
    # kept 0.8, 0.4, 0.2, ...; a step costs 1 + 0.1 K: 1.8 / 1.1, 2.2 / 1.2, 2.4 / 1.3, 2.5 / 1.4
    assert chooser.speedup(1, 1) == pytest.approx(1.8 / 1.1)
    assert chooser.speedup(1, 3) == pytest.approx(2.4 / 1.3)
    assert chooser.best(1) == 3


def test_a_large_batch_speculates_less() -> None:
    costs = StepCosts({1: 1.0, 8: 1.0, 64: 8.0}, {})
    chooser = LookaheadChooser(costs, PRIORS["ngram"])
    assert chooser.best(1) > chooser.best(32)
    assert chooser.best(32) == 0


def test_costs_go_on_in_a_line_beyond_the_last_point() -> None:
    costs = StepCosts({1: 1.0, 2: 2.0, 4: 3.0}, {})
    assert costs.step(8, 0) == pytest.approx(5.0)
    assert costs.step(3, 0) == pytest.approx(2.5)


def test_acceptance_that_was_seen_counts() -> None:
    chooser = LookaheadChooser(FLAT, PRIORS["draft_model"])
    before = chooser.best(1)
    never = SpecStats()
    for _ in range(2000):
        never.record(4, 0, 1)
    chooser.learn(never)
    assert chooser.best(1) == 0 < before
    always = SpecStats()
    for _ in range(2000):
        always.record(8, 8, 9)
    chooser.learn(always)
    assert chooser.best(1) == 8


class Chooser:
    """A choice of K that follows the batch."""

    def best(self, num_rows: int) -> int:
        return num_rows % 5

    def learn(self, stats: SpecStats) -> None:
        pass


def chosen_llm() -> LLM:
    llm = LLM(tiny_model("llama", 0), tiny_model("llama", 1), progress=False, num_blocks=128)
    llm._driver.engine.scheduler._chooser = Chooser()  # type: ignore[assignment]
    return llm


def test_texts_do_not_depend_on_the_chosen_lookahead() -> None:
    """Greedy texts are plain decoding's; a seeded request keeps a K of its own."""
    llm = chosen_llm()
    prompts = [[5, 6, i] for i in range(4, 14)]
    greedy = SamplingParams(temperature=0, max_tokens=12)
    seeded = SamplingParams(temperature=1.0, seed=3, max_tokens=12)
    plain = SamplingParams(temperature=0, max_tokens=12, num_draft_tokens=0)
    fixed = SamplingParams(
        temperature=1.0, seed=3, max_tokens=12, num_draft_tokens=SEEDED_LOOKAHEAD
    )
    for params, same in ((greedy, plain), (seeded, fixed)):
        together = [o.token_ids for o in llm.generate(prompts, params)]
        alone = [llm.generate(p, same).token_ids for p in prompts]
        assert together == alone


def test_an_unseeded_request_keeps_the_lookahead_it_started_with() -> None:
    llm = chosen_llm()
    prompts = [[5, 6, i] for i in range(4, 8)]
    outputs = llm.generate(prompts, SamplingParams(temperature=1.0, max_tokens=12))
    for prompt, output in zip(prompts, outputs, strict=True):
        found = output.outputs[0]
        assert found.lookahead == 4  # of four sequences
        again = SamplingParams(
            temperature=1.0, max_tokens=12, seed=found.seed, num_draft_tokens=found.lookahead
        )
        assert llm.generate(prompt, again).token_ids == output.token_ids


def test_a_lookahead_that_was_given_is_kept() -> None:
    given = LLM(tiny_model("llama"), num_draft_tokens=4, progress=False, num_blocks=32)
    assert given.description["lookahead"] == "given"
    assert given.description["num_draft_tokens"] == 4
    free = LLM(tiny_model("llama"), progress=False, num_blocks=32)
    assert free.description["lookahead"].startswith("by measured cost: K = ")


def test_a_small_token_budget_limits_the_choice() -> None:
    llm = LLM(tiny_model("llama"), max_num_batched_tokens=4, progress=False, num_blocks=32)
    output = llm.generate([5, 6, 7, 5, 6], SamplingParams(temperature=0, max_tokens=8))
    assert len(output.token_ids) == 8 and llm._driver.engine.scheduler.num_draft_tokens == 2


# The cache


class Measured:
    """Stands for measure(): counts calls, answers with set costs."""

    def __init__(self) -> None:
        self.one, self.whole = 1.0, 0

    def __call__(self, model: Any, num_tokens: Any) -> dict[int, float]:
        self.whole += len(num_tokens) > 1
        return {n: self.one * n for n in num_tokens}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    found = Measured()
    monkeypatch.setattr(calibration, "measure", found)
    return found


def test_costs_are_measured_once_a_pair(measured: Measured, tmp_path: Path) -> None:
    first = step_costs(None, None, {"pair": 1}, tmp_path)  # type: ignore[arg-type]
    again = step_costs(None, None, {"pair": 1}, tmp_path)  # type: ignore[arg-type]
    assert first == again and measured.whole == 1
    step_costs(None, None, {"pair": 2}, tmp_path)  # type: ignore[arg-type]
    assert measured.whole == 2


def test_costs_are_measured_again_when_the_machine_changed(
    measured: Measured, tmp_path: Path
) -> None:
    step_costs(None, None, {}, tmp_path)  # type: ignore[arg-type]
    measured.one = 2.0  # another process, or a slower machine, was there at the first time
    assert step_costs(None, None, {}, tmp_path).target[1] == 2.0  # type: ignore[arg-type]


@pytest.mark.parametrize("content", ["", "{", '{"target": {"x": 1}}', '{"target": [], "draft": 3}'])
def test_a_damaged_cache_is_measured_anew(measured: Measured, tmp_path: Path, content: str) -> None:
    step_costs(None, None, {}, tmp_path)  # type: ignore[arg-type]
    (file,) = (tmp_path / "costs").iterdir()
    file.write_text(content)
    assert step_costs(None, None, {}, tmp_path).target[1] == 1.0  # type: ignore[arg-type]
    assert json.loads(file.read_text())["target"]["1"] == 1.0


def test_a_cache_that_cannot_be_written_is_no_error(measured: Measured, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert step_costs(None, None, {}, blocked).target[1] == 1.0  # type: ignore[arg-type]


def test_measuring_runs_real_forwards_within_a_small_pool() -> None:
    llm = LLM(tiny_model("llama"), num_draft_tokens=0, progress=False, num_blocks=2)
    costs = calibration.measure(llm._driver.engine.target, (1, 2, 4, 64))
    assert set(costs) == {1, 2, 4} and all(s > 0 for s in costs.values())
