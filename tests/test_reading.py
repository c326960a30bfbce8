"""Faults that a careful reading of the code found, each with its smallest reproduction."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import save_tiny, tiny_model, tiny_tokenizer
from torch import Tensor
from toy import ToyModel, audit, build_engine, output_ids, run, table_law

from specdec import LLM, SamplingParams
from specdec.batch import ForwardBatch
from specdec.cli import main
from specdec.driver import Driver, Query
from specdec.lossless import compare_with_plain
from specdec.outputs import TextStream
from specdec.proposers.ngram import NgramProposer
from specdec.scheduler import PROMPT_LOGPROBS_CHUNK
from specdec.stats import DEFINITIONS

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}


class AppendByTable(ToyModel):
    """As kernels with an in-kernel append do it: all Q tokens of a row go through its block table,
    padded ones too. Slots are ignored.
    """

    def forward(self, batch: ForwardBatch) -> Tensor:
        if batch.q_len is not None and not batch.spans:
            size = self.kv_cache.block_size
            at = batch.cache_seqlens[:, None].long() + torch.arange(batch.q_len)
            block = batch.block_table.long().gather(1, at // size)  # an error past the table's end
            batch.slot_mapping = (block * size + at % size).reshape(-1)
        return super().forward(batch)


@pytest.mark.parametrize("drafts", ["ngram", "model"])
def test_rows_of_unequal_lookahead_keep_to_their_blocks(drafts: str) -> None:
    """A row without drafts, one token before the end of its block, beside a row of five drafts."""
    law = table_law(40, 0)
    prompts = [[3 + i % 7 for i in range(n)] for n in (13, 4, 14, 30)]
    lookaheads = [0, 5, 0, 2]
    texts = []
    for group in ([0, 1, 2, 3], [0], [1], [2], [3]):
        draft = NgramProposer() if drafts == "ngram" else AppendByTable(table_law(40, 1), 40)
        engine = build_engine(AppendByTable(law, 40), draft, num_draft_tokens=5, num_blocks=24)
        requests = [
            engine.add(
                prompts[i],
                SamplingParams(temperature=0, max_tokens=40, num_draft_tokens=lookaheads[i]),
            )
            for i in group
        ]
        run(engine, check=audit)
        assert not any(request.error for request in requests)
        texts.append([output_ids(request) for request in requests])
    assert texts[0] == [text[0] for text in texts[1:]]


def test_comparison_refuses_failed_requests() -> None:
    """Two failed requests have equal, empty texts: that is not "no difference"."""
    broken = tiny_model("llama", 0)
    broken.get_output_embeddings().weight[:] = float("nan")
    llm = LLM(broken, progress=False, num_blocks=32)
    with pytest.raises(RuntimeError, match="prompt 0 failed"):
        compare_with_plain(llm, [[5, 6, 7]], SamplingParams(**GREEDY))


def test_chat_tells_of_a_failed_answer_and_forgets_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny(tiny_model("llama", 0), tmp_path / "m")
    asked: list[int] = []

    def failing(llm: Any, prompt: list[int], params: Any) -> Any:
        asked.append(len(prompt))
        return SimpleNamespace(error="the logits were NaN", text="half an ans")

    lines = iter(["hello", "hello", "/exit"])
    monkeypatch.setattr("specdec.terminal.print_stream", failing)
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert main(["chat", "--target", str(folder), "--num-blocks", "32"]) == 0
    assert capsys.readouterr().err.count("the answer failed: the logits were NaN") == 2
    assert asked[0] == asked[1], "the failed turn stayed in the conversation"


@pytest.mark.parametrize("proposer", ["draft_model", "hybrid"])
def test_a_missing_draft_is_refused_before_weights_load(
    proposer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = save_tiny(tiny_model("llama", 0), tmp_path / "m")

    def load(*args: Any, **options: Any) -> Any:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("specdec.model_pair.load_model", load)
    with pytest.raises(ValueError, match="needs a draft"):
        LLM(folder, proposer=proposer, progress=False)


def test_a_draft_that_nobody_uses_is_not_loaded() -> None:
    model = tiny_model("llama", 0)
    llm = LLM(model, model, proposer="ngram", progress=False, num_blocks=32)
    assert llm.description["draft"] is None
    with pytest.raises(ValueError, match="did you mean 'ngram'"):
        LLM(model, proposer="ngramm", num_draft_tokens=0, progress=False)


def test_lists_of_arrays_are_lists_of_prompts() -> None:
    llm = LLM(tiny_model("llama", 0), progress=False, num_blocks=32)
    for make in (np.array, torch.tensor):
        outputs = llm.generate([make([5]), make([7])], **GREEDY)
        assert [output.prompt_token_ids for output in outputs] == [[5], [7]]
    one = llm.generate([np.int64(5), np.int64(7)], **GREEDY)  # type: ignore[call-overload]
    assert one.prompt_token_ids == [5, 7]


def test_the_greedy_rule_refuses_sampling_at_the_engine() -> None:
    """A sampled request among greedy ones failed them all."""
    llm = LLM(tiny_model("llama", 0), progress=False, num_blocks=32, acceptance="greedy")
    engine = llm._driver.engine
    good = engine.add([5, 6], SamplingParams(**GREEDY))
    with pytest.raises(ValueError, match=r"serves temperature 0 only, got 0\.7"):
        engine.add([5, 6], SamplingParams(temperature=0.7))
    run(engine)
    assert good.error is None and len(output_ids(good)) == 20


def test_automatic_request_ids_avoid_taken_ones() -> None:
    engine = build_engine(ToyModel(table_law(20, 0), 20))
    engine.add([3, 4], request_id="request-1")
    assert engine.add([3, 4]).request_id == "request-1-1"


def test_a_stop_string_behind_half_a_character_is_found_at_the_end() -> None:
    class Bytes:
        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            return bytes(b for i in ids for b in ([120, 195] if i == 1 else [97])).decode(
                errors="replace"
            )

    stream = TextStream(Bytes(), [], ["x"])  # type: ignore[arg-type]
    assert stream.push(0) is None and stream.push(1) is None  # "a", then "x" + half a character
    assert stream.finish(may_stop=True) == "x"
    assert stream.text == "a"


def test_prompt_logits_are_bounded_per_step() -> None:
    engine = build_engine(ToyModel(table_law(20, 0), 20), num_blocks=256)
    for _ in range(3):
        engine.add([3] * 200, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    plans = []
    schedule = engine.scheduler.schedule

    def watch() -> Any:
        plans.append(schedule())
        return plans[-1]

    engine.scheduler.schedule = watch  # type: ignore[method-assign]
    requests = run(engine)
    assert [len(r.prompt_logprobs or ()) for r in requests] == [199] * 3
    assert max(sum(s.length for s in plan.prefill) for plan in plans) <= PROMPT_LOGPROBS_CHUNK


def test_a_late_request_joins_after_a_few_steps() -> None:
    """The lock is not fair: a thread that steps took it again before one that wants to add."""
    engine = build_engine(ToyModel(table_law(20, 0), 20), num_blocks=64)
    step = engine.step

    def busy() -> Any:
        end = time.perf_counter() + 0.002
        while time.perf_counter() < end:  # holds the interpreter, as a toy step does not
            pass
        return step()

    engine.step = busy  # type: ignore[method-assign]
    driver = Driver(engine)
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    (first,) = driver.add([Query([3, 4], params)])
    runner = threading.Thread(target=driver.run, args=([first],))
    runner.start()
    waited = []
    for _ in range(5):
        time.sleep(0.01)
        before = engine.stats.num_steps
        driver.add([Query([5, 6], SamplingParams(temperature=0, max_tokens=1))])
        waited.append(engine.stats.num_steps - before)
    runner.join()
    assert max(waited) <= 3, waited


def test_marked_text_without_marks_is_the_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(save_tiny(tiny_model("llama", 0), tmp_path / "m"))
    options = ["--target", folder, "--num-blocks", "64", "--max-tokens", "24", "--ignore-eos"]
    assert main(["generate", "hello", *options]) == 0
    whole = capsys.readouterr().out.rstrip("\n")
    stop = whole[9:11]
    for more in ([], ["--stop", stop]):
        assert main(["generate", "hello", *options, *more]) == 0
        plain = capsys.readouterr().out
        assert main(["generate", "hello", "--mark", *options, *more]) == 0
        marked = capsys.readouterr().out
        assert _unmarked(marked) == _unmarked(plain)


def _unmarked(text: str) -> str:
    return "".join(
        c for c in text.replace("accepted  ! recovered  * bonus", "") if c not in "+!* \n"
    )


def test_every_engine_figure_is_defined() -> None:
    llm = LLM(tiny_model("llama", 0), progress=False, num_blocks=32, tokenizer=tiny_tokenizer(128))
    llm.generate("hello", **GREEDY)
    assert set(llm.stats()) == set(DEFINITIONS)
