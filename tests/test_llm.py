"""LLM, the library's face: one or many prompts, streams, threads, asyncio, errors that lose
nothing.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from tiny_models import save_tiny, tiny_model

from specdec import LLM, RequestOutput, SamplingParams
from specdec.stats import DEFINITIONS

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    target = save_tiny(tiny_model("llama", 0), root / "target")
    return target, save_tiny(tiny_model("llama", 1), root / "draft")


@pytest.fixture(scope="module")
def llm(folders: tuple[Path, Path]) -> LLM:
    return LLM(folders[0], folders[1], progress=False, num_blocks=128, max_num_batched_tokens=256)


def free_blocks(llm: LLM) -> int:
    return llm._driver.engine.pool.num_free


def test_one_prompt_gives_one_output_many_give_a_list(llm: LLM) -> None:
    one = llm.generate("hello there", GREEDY)
    many = llm.generate(["hello there", "and again"], GREEDY)
    assert isinstance(one, RequestOutput) and isinstance(many, list)
    assert one.token_ids == many[0].token_ids and len(one.token_ids) == 20
    assert one.text == many[0].text
    assert one.outputs[0].finish_reason == "length" and one.finished
    assert llm.generate([], GREEDY) == []
    assert llm.tokenizer.decode(one.token_ids, skip_special_tokens=True) == one.text


def test_token_ids_and_text_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.encode("the same")
    assert llm.generate(ids, GREEDY).token_ids == llm.generate("the same", GREEDY).token_ids


def test_stream_grows_and_ends_like_generate(llm: LLM) -> None:
    whole = llm.generate("a stream", GREEDY)
    parts = list(llm.stream("a stream", GREEDY))
    assert [len(p.token_ids) for p in parts] == sorted(len(p.token_ids) for p in parts)
    assert parts[-1].finished and parts[-1].token_ids == whole.token_ids
    assert all(whole.text.startswith(p.text) for p in parts)


def test_leaving_a_stream_aborts_the_request(llm: LLM) -> None:
    before = free_blocks(llm)
    for output in llm.stream("leave me", GREEDY):
        if output.token_ids:
            break
    assert free_blocks(llm) == before
    assert not llm._driver.engine.scheduler.has_work


def test_chat_uses_the_template(llm: LLM) -> None:
    ids = llm.chat_token_ids([{"role": "user", "content": "hi"}])
    assert llm.tokenizer.decode(ids) == "user: hi\nassistant: "
    output = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    assert output.prompt_token_ids == ids and len(output.token_ids) == 20


def test_n_samples_equal_solo_runs_with_the_next_seeds(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=12, ignore_eos=True)
    together = llm.generate("three", params)
    for j, sample in enumerate(together.outputs):
        assert sample.seed == 7 + j
        solo = llm.generate("three", SamplingParams(seed=7 + j, max_tokens=12, ignore_eos=True))
        assert solo.token_ids == sample.token_ids
    assert len({tuple(s.token_ids) for s in together.outputs}) > 1


def test_an_unseeded_request_reports_a_seed_that_repeats_it(llm: LLM) -> None:
    first = llm.generate("again", max_tokens=15)
    found = first.outputs[0]
    again = llm.generate("again", max_tokens=15, seed=found.seed, num_draft_tokens=found.lookahead)
    assert again.token_ids == first.token_ids
    assert llm.generate("again", max_tokens=15, temperature=0).outputs[0].lookahead is None


def test_threads_share_one_engine(llm: LLM) -> None:
    prompts = [f"thread number {i}" for i in range(8)]
    expected = [llm.generate(p, GREEDY).token_ids for p in prompts]
    found: dict[int, list[int]] = {}

    def work(i: int) -> None:
        found[i] = llm.generate(prompts[i], GREEDY).token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[i] for i in range(8)] == expected


def test_asyncio_runs_many_without_blocking_the_loop(llm: LLM) -> None:
    """The ticker counts loop turns while 24 requests run: a blocked loop would leave it at 0."""
    expected = llm.generate("async", GREEDY).token_ids

    async def main() -> tuple[list[RequestOutput], int]:
        ticks = 0
        done = False

        async def ticker() -> None:
            nonlocal ticks
            while not done:
                ticks += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(ticker())
        outputs = await asyncio.gather(*(llm.agenerate("async", GREEDY) for _ in range(24)))
        done = True
        await task
        return list(outputs), ticks

    steps = llm.stats()["num_steps"]
    outputs, ticks = asyncio.run(main())
    assert all(output.token_ids == expected for output in outputs)
    assert ticks > 10
    assert llm.stats()["num_steps"] - steps < 24 * 10  # they shared batches


def test_a_cancelled_async_stream_frees_its_blocks(llm: LLM) -> None:
    before = free_blocks(llm)

    async def main() -> None:
        stream = llm.astream("cancel", SamplingParams(temperature=0, max_tokens=200))
        async for output in stream:
            if output.token_ids:
                break
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(main())
    assert free_blocks(llm) == before and not llm._driver.engine.scheduler.has_work


def test_wrong_input_is_refused_before_anything_is_queued(llm: LLM) -> None:
    before = free_blocks(llm), llm.stats()["num_finished"]
    wrong = [
        ((["fine", []], GREEDY), "prompt 1: the prompt is empty"),
        (([[1, 2], [1, 999]], GREEDY), "prompt 1: prompt token 999"),
        ((list(range(4, 60)) * 6, GREEDY), "the context holds 256"),
        ((["a", "b"], [GREEDY]), "2 prompts but 1 SamplingParams"),
        (("a", SamplingParams(num_draft_tokens=9)), "asks for num_draft_tokens 9"),
        (("a", SamplingParams(logit_bias={500: 1.0})), "logit_bias names token 500"),
        ((3, GREEDY), "prompts must be"),
    ]
    for args, message in wrong:
        with pytest.raises(ValueError, match=message):
            llm.generate(*args)  # type: ignore[call-overload]
    assert not llm._driver.engine.scheduler.has_work
    assert free_blocks(llm) == before[0]
    assert len(llm.generate("still serving", GREEDY).token_ids) == 20


def test_unknown_options_name_the_nearest(folders: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match="did you mean 'num_draft_tokens'"):
        LLM(folders[0], num_draft_token=3)
    with pytest.raises(ValueError, match="did you mean 'temperature'"):
        LLM(folders[0], progress=False, num_blocks=32).generate("a", temprature=0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "flash_attn", "device": "cpu"}, "flash"),
        ({"block_size": 24}, "block_size must be"),
        ({"max_model_len": 4096}, "past the target's context of 256"),
        ({"num_blocks": 4, "max_model_len": 256}, "4 KV blocks hold one sequence of"),
        ({"proposer": "ngramm"}, "did you mean 'ngram'"),
        ({"acceptance": "rejektion"}, "did you mean 'rejection'"),
        ({"dtype": "int3"}, "dtype 'int3' is unknown"),
        ({"device": "tpu9"}, "device 'tpu9'"),
        ({"proposer": "draft_model"}, "needs a draft"),
        ({"memory_utilization": 1e-6}, "usable"),
    ],
)
def test_engine_options_are_checked(
    folders: tuple[Path, Path], options: dict[str, object], message: str
) -> None:
    with pytest.raises((ValueError, ImportError), match=message):
        LLM(folders[0], progress=False, **options)


def test_a_loaded_model_is_used_in_place() -> None:
    model = tiny_model("llama", 0)
    weight = model.get_output_embeddings().weight
    llm = LLM(model, model, num_draft_tokens=3, progress=False, num_blocks=32)
    kept = llm._driver.engine.target._head.weight  # type: ignore[attr-defined]
    assert kept.data_ptr() == weight.data_ptr()
    output = llm.generate([5, 6, 7], GREEDY)
    assert llm.stats()["acceptance_rate"] == 1.0
    assert output.text == "" and llm.tokenizer is None
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.generate("text")


def test_dummy_weights_need_only_a_config(folders: tuple[Path, Path], tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_bytes((folders[0] / "config.json").read_bytes())
    llm = LLM(config, load_format="dummy", progress=False, num_blocks=32)
    assert len(llm.generate([4, 5], GREEDY).token_ids) == 20


def test_stats_add_up(llm: LLM) -> None:
    stats = llm.stats()
    assert stats["num_verified_tokens"] == stats["num_accepted_tokens"] + stats["num_target_steps"]
    assert stats["num_emitted_tokens"] <= stats["num_verified_tokens"]
    assert set(DEFINITIONS) <= set(stats)
    assert sum(llm._driver.engine.stats.drafted_by_position) == stats["num_draft_tokens"]


def test_prompt_logprobs_and_logprobs_come_from_the_raw_logits(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=1, seed=1)
    output = llm.generate("logprobs please", params)
    prompt = output.prompt_logprobs
    assert prompt is not None
    assert [entry.token_id for entry in prompt] == output.prompt_token_ids[1:]
    found = output.outputs[0].logprobs
    assert found is not None
    for entry, token in zip(found, output.token_ids, strict=True):
        assert entry.token_id == token == next(iter(entry.top))
        assert entry.logprob == pytest.approx(next(iter(entry.top.values())), abs=1e-6)
        assert len(entry.top) == 2
