"""Faults that were found by attacking the library, each with its smallest reproduction."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer

from specdec import LLM, SamplingParams
from specdec.assembly import ACCEPTANCE_RULES
from specdec.cli import main

NAN = float("nan")
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}


def make(**options: Any) -> LLM:
    options = {"num_blocks": 40, **options}
    target = options.pop("target", None) or tiny_model("llama", 0)
    return LLM(target, tokenizer=tiny_tokenizer(128), progress=False, **options)


def poisoned(token: int = 77) -> Any:
    """A model whose embedding of one token is NaN."""
    model = tiny_model("llama", 0)
    model.get_input_embeddings().weight[token] = NAN
    return model


def check_at_rest(llm: LLM) -> None:
    engine = llm._driver.engine
    engine.pool.check_integrity()
    assert engine.pool.num_free == engine.pool.num_blocks
    assert not engine._requests and not engine._samples and not engine.scheduler.has_work


@pytest.mark.parametrize("prompt", [[5, 103, 7], [5, 6, 7]])
def test_a40_a_draft_with_fewer_ids_reads_ids_it_lacks(prompt: list[int]) -> None:
    """The target's ids 100..103 were fed to a draft of 100: the whole batch failed. They must be
    emitted (the request allows nothing else for half of its ids) and the text be plain decoding's.
    """
    target = tiny_model("llama", 0, vocab_size=104)
    llm = LLM(target, tiny_model("llama", 1, vocab_size=100), progress=False, num_blocks=40)
    fields = {**GREEDY, "allowed_token_ids": (5, 6, 7, 100, 101, 102, 103)}
    outputs = llm.generate([prompt, [8, 9]], **fields)
    plain = llm.generate([prompt, [8, 9]], **fields, num_draft_tokens=0)
    assert [o.error for o in outputs] == [None, None]
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert any(token >= 100 for o in outputs for token in o.token_ids)
    assert llm.stats()["num_draft_tokens"] > 0


def test_a_stream_collected_during_a_step_does_not_deadlock() -> None:
    """A generator's finaliser may run in the middle of a step of the same thread, which holds the
    lock. The abort is noted and carried out when the step ends.
    """
    llm = make(num_draft_tokens=2)
    stream = llm.stream("abandoned", **{**GREEDY, "max_tokens": 200})
    next(stream)
    holder: list[Any] = [stream]
    holder.append(holder)  # a cycle: only the collector ends it
    del stream
    engine = llm._driver.engine
    original = engine.step
    collected = False

    def step() -> Any:
        nonlocal collected, holder
        if not collected:
            holder = []
            collected = True
            gc.collect()
        return original()

    engine.step = step  # type: ignore[method-assign]
    done = threading.Thread(target=lambda: llm.generate("next", **GREEDY), daemon=True)
    done.start()
    done.join(30)
    assert not done.is_alive() and collected
    check_at_rest(llm)


def test_nan_that_nobody_read_back_does_not_reach_the_next_owner_of_its_blocks() -> None:
    """A NaN prompt was aborted between two chunks: its blocks went back with NaN inside, and
    requests that got them failed, since a masked key's weight of 0 times NaN is NaN.
    """
    llm = make(target=poisoned(), num_draft_tokens=0, max_num_batched_tokens=20, num_blocks=20)
    engine = llm._driver.engine
    request = engine.add([77] * 60, SamplingParams(temperature=0))
    engine.step()
    engine.abort(request.request_id)
    fields = {**GREEDY, "logit_bias": {77: -100}}
    outputs = llm.generate([[5, 6, 7], [8, 9], [10] * 30], **fields)
    assert [o.error for o in outputs] == [None, None, None]
    check_at_rest(llm)


def test_prompt_logprobs_of_nan_are_an_error() -> None:
    llm = make(target=poisoned(), num_draft_tokens=0)
    output = llm.generate([77] * 20, max_tokens=0, prompt_logprobs=0)
    assert output.error is not None and "NaN" in output.error
    check_at_rest(llm)


def test_a_nan_draft_token_behind_a_refusal_harms_nobody() -> None:
    """The refused token's K/V is NaN and masked for the positions before it: the text is that of
    plain decoding. Before, the request failed.
    """
    from specdec.assembly import PROPOSERS
    from specdec.proposers.base import Draft, Proposer

    class Stubborn(Proposer):
        name = "stubborn"

        def propose(self, state: Any) -> Draft:
            counts = state.num_draft_tokens
            return Draft.from_lists([[77] * count for count in counts], state.device)

    if "stubborn" not in PROPOSERS.names():
        PROPOSERS.register("stubborn", lambda context: Stubborn())
    fields = {**GREEDY, "logit_bias": {77: -100}}
    prompts = [[5, 6, 7], [8, 9, 10, 11], [20] * 20]
    plain = make(target=poisoned(), num_draft_tokens=0).generate(prompts, **fields)
    llm = make(target=poisoned(), num_draft_tokens=4, proposer="stubborn", num_blocks=20)
    for _ in range(2):
        outputs = llm.generate(prompts, **fields)
        assert [o.error for o in outputs] == [None] * 3
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert llm.stats()["num_accepted_tokens"] == 0 < llm.stats()["num_draft_tokens"]


@pytest.mark.parametrize(
    ("name", "accepted", "token"), [("neg", -1, 0), ("many", 9, 0), ("id", 0, 10**6)]
)
def test_an_acceptance_rule_out_of_range_fails_its_rows(
    name: str, accepted: int, token: int
) -> None:
    """-1 kept tokens looped for ever; 9 committed the padding -1."""
    rule_name = f"broken-{name}"

    def rule(p: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((p.shape[0],), accepted), torch.full((p.shape[0],), token)

    if rule_name not in ACCEPTANCE_RULES.names():
        ACCEPTANCE_RULES.register(rule_name, rule)
    llm = make(num_draft_tokens=4, acceptance=rule_name)
    outputs = llm.generate([[5, 6, 5, 6], [8, 9] * 9], max_tokens=20, temperature=1)
    assert all(o.error is not None and rule_name in o.error for o in outputs)
    assert len(llm.generate([5, 6], **GREEDY).token_ids) == 20
    check_at_rest(llm)


def test_cancelling_while_a_request_is_being_added_leaves_no_orphan() -> None:
    llm = make(num_draft_tokens=2)

    async def cancel_early() -> None:
        llm._driver._lock.acquire()  # somebody's step
        task = asyncio.create_task(llm.agenerate("orphan", max_tokens=200))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.sleep(0.05)
        llm._driver._lock.release()
        await asyncio.sleep(0.2)

    asyncio.run(cancel_early())
    llm.generate([5, 6], max_tokens=2)
    check_at_rest(llm)


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate([[5], [6]], [SamplingParams(), "x"]),
        lambda llm: llm.generate(["a", "\ud800"]),
        lambda llm: llm.generate([None]),
        lambda llm: llm.generate([[5], [True]]),
        lambda llm: llm.generate(b"abc"),
        lambda llm: llm.generate([5, 6], {"temperature": 0}),
        lambda llm: llm.generate([5], bad_words=[[10**9]]),
        lambda llm: llm.generate([5], stop=5),
        lambda llm: llm.generate([5], ignore_eos="no"),
        lambda llm: llm.generate([5], repetition_penalty=1e-300),
    ],
)
def test_wrong_types_are_value_errors_and_leave_nothing(call: Callable[[LLM], Any]) -> None:
    llm = make()
    with pytest.raises(ValueError, match=r"\w"):
        call(llm)
    check_at_rest(llm)


def test_prompt_logprobs_survive_preemption_in_prefill() -> None:
    """The chunks differ the second time; the list came back short."""
    rng = random.Random(20)
    prompts = [[rng.randrange(4, 128) for _ in range(n)] for n in (20, 30, 100, 120, 60)]
    options = {"num_draft_tokens": 2, "enable_prefix_caching": False}
    llm = make(**options, max_num_batched_tokens=20, num_blocks=24)
    fields = {**GREEDY, "max_tokens": 120, "prompt_logprobs": 0}
    outputs = llm.generate(prompts, **fields)
    whole = make(**options, num_blocks=200).generate(prompts, **fields)
    assert llm.stats()["num_preemptions"] > 0
    for output, reference in zip(outputs, whole, strict=True):
        found, expected = output.prompt_logprobs or [], reference.prompt_logprobs or []
        assert [e.token_id for e in found] == output.prompt_token_ids[1:]
        for a, b in zip(found, expected, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_a01_no_tokens_and_one_prompt_token_emit_nothing() -> None:
    output = make().generate([5], max_tokens=0, prompt_logprobs=0)
    assert output.token_ids == [] and output.prompt_logprobs == []
    assert output.outputs[0].finish_reason == "length"


def test_a_tokenizer_that_raises_fails_only_the_request_concerned() -> None:
    class Fragile:
        def encode(self, text: str, **_: Any) -> list[int]:
            return [ord(c) % 90 for c in text]

        def decode(self, token_ids: list[int], **_: Any) -> str:
            if 100 in token_ids:
                raise IndexError("no such piece")
            return "".join(chr(97 + t % 26) for t in token_ids)

    llm = LLM(tiny_model("llama", 0), tokenizer=Fragile(), progress=False, num_blocks=40)
    force = SamplingParams(**GREEDY, logit_bias={100: 100.0})
    never = SamplingParams(**GREEDY, logit_bias={100: -100.0})
    outputs = llm.generate([[5, 6], [7, 8], [9]], [force, never, never])
    assert outputs[0].error is not None and "IndexError" in outputs[0].error
    assert [o.error for o in outputs[1:]] == [None, None]
    check_at_rest(llm)


def test_requests_that_ended_at_once_are_not_kept() -> None:
    llm = make()
    llm.generate([[5, 6]] * 200, max_tokens=0)
    llm.generate([5], max_tokens=1)
    assert not llm._driver.engine._ended_early


def test_cli_splits_jsonl_at_newlines_only(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """U+2028 inside a JSON string is legal; a file of blank lines holds no prompt."""
    from specdec.cli import _prompt_of

    assert _prompt_of('{"prompt": "a\u2028b"}', 1) == "a\u2028b"
    file = tmp_path / "empty.jsonl"
    file.write_text("\n\n", encoding="utf-8")
    assert main(["generate", "--file", str(file)]) == 1
    assert "holds no prompt" in capsys.readouterr().err
