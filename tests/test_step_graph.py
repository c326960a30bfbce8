"""GraphStep: steps over tensors of fixed addresses give what eager steps give. On the CPU a "graph"
runs the captured function again; real graphs are tested on a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from toy import (
    ScriptedProposer,
    ToyModel,
    audit,
    blended_law,
    build_engine,
    output_ids,
    run,
    table_law,
)

from specdec import LLM, SamplingParams
from specdec.engine import Engine
from specdec.proposers.ngram import NgramProposer
from specdec.step_graph import MAX_GRAPHS, GraphStep, rounded

VOCAB = 40
LAW = table_law(VOCAB, 1)
CLOSE = blended_law(LAW, table_law(VOCAB, 2), 3)


class Repeat:
    """Stands for a graph: replay() calls the function."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.replay = function


def engine(drafter: str, capture: Any = None, **options: Any) -> Engine:
    draft: Any = {
        "model": lambda: ToyModel(CLOSE, VOCAB),
        "ngram": lambda: NgramProposer(1, 3),
        "none": lambda: None,
        "script": lambda: ScriptedProposer(lambda ids, limit: [ids[-1]] * limit),
    }[drafter]()
    return build_engine(ToyModel(LAW, VOCAB), draft, capture=capture, **options)


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Greedy, sampled and ruled ones, of several lengths and K."""
    found = []
    for i in range(14):
        params = SamplingParams(
            temperature=(0.0, 1.0, 0.6)[i % 3],
            top_k=5 if i == 7 else 0,
            seed=i,
            max_tokens=9 + i,
            num_draft_tokens=(None, 0, 2)[i % 3],
            logprobs=1 if i == 4 else None,
        )
        found.append(([(i * 7 + j) % VOCAB for j in range(1 + 3 * i)], params))
    return found


def serve(served: Engine, arrivals: list[Any]) -> list[Any]:
    """All requests, some of which arrive while others run; KV audited after each step."""
    added = [served.add(*one) for one in arrivals[:5]]
    for one in arrivals[5:]:
        served.step()
        audit(served)
        added.append(served.add(*one))
    run(served, check=audit)
    return added


@pytest.mark.parametrize("drafter", ["model", "ngram", "none"])
@pytest.mark.parametrize("num_blocks", [256, 7])  # 7: preemption
def test_graphs_give_what_eager_steps_give(drafter: str, num_blocks: int) -> None:
    eager = engine(drafter, num_blocks=num_blocks, max_num_seqs=7)
    graphed = engine(drafter, Repeat, num_blocks=num_blocks, max_num_seqs=7)
    expected = serve(eager, requests())
    found = serve(graphed, requests())
    assert [output_ids(r) for r in found] == [output_ids(r) for r in expected]
    one, other = found[4].output().outputs[0], expected[4].output().outputs[0]
    assert [e.logprob for e in one.logprobs] == [e.logprob for e in other.logprobs]
    assert graphed.stats.num_accepted_tokens == eager.stats.num_accepted_tokens
    assert (graphed.stats.num_preemptions > 0) == (num_blocks == 7)
    assert graphed.pool.num_free == num_blocks
    assert isinstance(graphed._step, GraphStep) and graphed._step.num_graphs > 0


def test_a_graph_serves_later_batches_without_a_new_capture() -> None:
    served = engine("model", Repeat, max_num_seqs=4)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=40)
    step = served._step
    assert isinstance(step, GraphStep)
    counts = []
    for _ in range(2):
        for i in range(4):
            served.add([5, 6, i], params)
        run(served)
        counts.append(step.num_graphs)
    assert counts[0] == counts[1] > 0


def test_the_number_of_graphs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.step_graph.MAX_GRAPHS", 2)
    served = engine("model", Repeat, max_num_seqs=8)
    expected = [output_ids(r) for r in serve(engine("model", max_num_seqs=8), requests())]
    assert [output_ids(r) for r in serve(served, requests())] == expected
    assert isinstance(served._step, GraphStep) and served._step.num_graphs <= 2 < MAX_GRAPHS


def test_rules_and_mixed_proposers_run_eagerly() -> None:
    served = engine("script", Repeat)
    served.add([5, 6], SamplingParams(temperature=0, max_tokens=6))
    run(served)
    ruled = engine("model", Repeat)
    ruled.add([5, 6], SamplingParams(temperature=1.0, top_p=0.9, seed=0, max_tokens=6))
    run(ruled)
    for one in (served, ruled):
        assert isinstance(one._step, GraphStep) and one._step.num_graphs == 0


def test_without_memory_for_a_graph_steps_run_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    def full(function: Callable[[], None]) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    served = engine("model", full)
    with caplog.at_level(logging.WARNING, "specdec"):
        found = [output_ids(r) for r in serve(served, requests())]
    assert found == [output_ids(r) for r in serve(engine("model"), requests())]
    warnings = [r.message for r in caplog.records if "no memory for the CUDA graph" in r.message]
    assert warnings and len(set(warnings)) == len(warnings)
    assert "Lower max_num_seqs" in warnings[0]


def test_sizes_are_rounded_to_few() -> None:
    assert [rounded(n) for n in (1, 2, 3, 4, 5, 6, 7, 9, 12, 13, 17, 25, 100)] == [
        *(1, 2, 3, 4, 6, 6, 8, 12, 12, 16, 24, 32, 128)
    ]


def gpu_model(dtype: torch.dtype) -> Any:
    from tiny_models import tiny_model

    return tiny_model("llama", num_attention_heads=4, head_dim=64).to("cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("draft", ["model", "ngram", "none"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cuda_graphs_give_what_eager_steps_give(draft: str, temperature: float) -> None:
    """float32 and the reference attention, so that padded rows change nothing."""
    target, small = gpu_model(torch.float32), gpu_model(torch.float32)
    prompts = [[5 + i] * (3 + 5 * i) for i in range(9)]
    found = []
    for cuda_graphs in (False, True):
        llm = LLM(
            target,
            small if draft == "model" else None,
            num_draft_tokens=0 if draft == "none" else 4,
            attention="reference",
            num_blocks=128,
            max_num_seqs=6,
            cuda_graphs=cuda_graphs,
            progress=False,
        )
        params = [
            SamplingParams(temperature=temperature, seed=i, max_tokens=30 + i, ignore_eos=True)
            for i in range(len(prompts))
        ]
        found.append([o.token_ids for o in llm.generate(prompts, params)])
        graphs = getattr(llm._driver.engine._step, "num_graphs", 0)
        assert (graphs > 0) == cuda_graphs
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["flash_attn", "triton"])
def test_cuda_graphs_with_fast_attention(attention: str) -> None:
    """bf16: the draft is the target, and nearly every draft is kept, graphs or not."""
    pytest.importorskip("flash_attn" if attention == "flash_attn" else "triton")
    model = gpu_model(torch.bfloat16)
    llm = LLM(model, model, num_draft_tokens=3, attention=attention, num_blocks=64, progress=False)
    prompts = [[5 + i] * (3 + 9 * i) for i in range(9)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    assert all(len(o.token_ids) == 60 for o in outputs)
    assert llm.stats()["acceptance_rate"] > 0.9
    assert llm._driver.engine._step.num_graphs > 0  # type: ignore[attr-defined]
