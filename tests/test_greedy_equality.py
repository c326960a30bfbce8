"""Greedy text of real (tiny, float32) models equals transformers' own generate(): any K, any
proposer, any pool.

Expected texts come from generate() with eager attention and transformers' own cache, before the
model's attention is switched to paged KV.
"""

from __future__ import annotations

import copy
import itertools
from functools import cache
from typing import Any

import pytest
import torch
from tiny_models import EOS, FAMILIES, randomize, tiny_model
from toy import build_engine, output_ids, run
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specdec.attention.reference import ReferenceBackend
from specdec.config import SamplingParams
from specdec.engine import Engine
from specdec.models.paged_model import ATTENTION_NAME, TransformersModel
from specdec.proposers.ngram import NgramProposer

MAX_TOKENS = 24
DRAFTERS = ("same", "near", "other", "ngram")


@cache
def prompts(count: int) -> tuple[tuple[int, ...], ...]:
    """Lengths 1 to 40, ten of each of `count` / 10; every second one repeats itself or shares a
    prefix.
    """
    generator = torch.Generator().manual_seed(0)
    found = []
    for group in range(count // 10):
        length = 1 + (group * 13) % 40
        for i in range(10):
            ids = torch.randint(4, 128, (length,), generator=generator).tolist()
            if i % 4 == 1:
                ids = (ids[:5] * length)[:length]
            elif i % 4 == 3:
                ids[: length // 2] = range(10, 10 + length // 2)
            found.append(tuple(ids))
    return tuple(found)


@cache
def models(family: str, count: int) -> tuple[dict[str, PreTrainedModel], list[list[int]]]:
    """Target and drafts of a family on paged attention, and the texts of generate()."""
    target = tiny_model(family, 0)
    expected = generate(target, prompts(count))
    near = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in near.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += 0.05 * parameter.std().nan_to_num(0.0) * noise
    found = {"target": target, "same": copy.deepcopy(target), "near": near}
    found["other"] = tiny_model(family, 1)
    for model in found.values():
        model.set_attn_implementation(ATTENTION_NAME)
    return found, expected


def generate(model: PreTrainedModel, todo: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    """Greedy texts, prompts of one length at a time, so that nothing is padded on the left."""
    texts: dict[int, list[int]] = {}
    for length in {len(prompt) for prompt in todo}:
        rows = [i for i, prompt in enumerate(todo) if len(prompt) == length]
        ids = torch.tensor([todo[i] for i in rows])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=EOS,
        )
        for i, row in zip(rows, out[:, length:].tolist(), strict=True):
            texts[i] = row[: row.index(EOS) + 1] if EOS in row else row
    return [texts[i] for i in range(len(todo))]


def engine_for(family: str, drafter: str, k: int, count: int, **options: Any) -> Engine:
    found, _ = models(family, count)
    draft: Any = None
    if k:
        draft = (
            NgramProposer(1, 4)
            if drafter == "ngram"
            else TransformersModel(found[drafter], ReferenceBackend())
        )
    target = TransformersModel(found["target"], ReferenceBackend())
    settings = {"num_blocks": 400, "eos_ids": [EOS], **options}
    return build_engine(target, draft, num_draft_tokens=k, **settings)


def check(engine: Engine, family: str, count: int) -> None:
    """All texts, and that nothing stays in the pool."""
    _, expected = models(family, count)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    requests = [engine.add(prompt, params) for prompt in prompts(count)]
    run(engine)
    for i, request in enumerate(requests):
        assert request.error is None
        assert output_ids(request) == expected[i], f"prompt {i}"
        reason = "stop" if expected[i][-1] == EOS else "length"
        assert request.output().outputs[0].finish_reason == reason
    assert engine.pool.num_free == engine.pool.num_blocks


def test_the_expected_texts_are_worth_comparing() -> None:
    """Positive control: texts differ between prompts and do not repeat one token; some end
    early.
    """
    _, expected = models("llama", 100)
    assert len({tuple(text) for text in expected}) > 90
    assert sum(len(set(text)) > 4 for text in expected) > 80
    ends = sum(text[-1] == EOS for text in expected)
    assert 3 < ends < 97


@pytest.mark.parametrize(("k", "drafter"), [(0, "none"), *itertools.product(range(1, 9), DRAFTERS)])
def test_every_lookahead(k: int, drafter: str) -> None:
    """100 prompts, K from 0 to 8. The drafters range from the target itself to another model."""
    engine = engine_for("llama", drafter, k, 100)
    check(engine, "llama", 100)
    rate = engine.stats.acceptance_rate
    low, high = {"same": (1.0, 1.0), "near": (0.2, 0.95)}.get(drafter, (0.0, 0.2))
    assert low <= rate <= high  # positive control: the drafters are what they are called
    assert k == 0 or engine.stats.num_draft_tokens > 100


@pytest.mark.parametrize("drafter", ["near", "ngram"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 14, "max_num_seqs": 9},
        {"max_num_batched_tokens": 7, "max_num_seqs": 1},
        {"block_size": 64, "prefix_caching": False, "max_num_batched_tokens": 50},
    ],
)
def test_tight_pools_small_chunks_large_blocks(options: dict[str, Any], drafter: str) -> None:
    """Preemption, chunked prefill beside decoding rows, another page size."""
    engine = engine_for("llama", drafter, 4, 30, **options)
    check(engine, "llama", 30)
    if options.get("num_blocks") == 14:
        assert engine.stats.num_preemptions > 0  # positive control


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
def test_every_family(family: str) -> None:
    """Windows, softcaps, other scales, query and key norms: K = 3 with a near drafter, K = 5 with
    n-gram drafts.
    """
    for drafter, k in (("near", 3), ("ngram", 5)):
        engine = engine_for(family, drafter, k, 20)
        check(engine, family, 20)
        assert engine.stats.num_draft_tokens > 20


def test_learned_positions_at_the_contexts_end() -> None:
    """gpt2's position table has 64 rows: a row at its last positions beside a short one.

    The window's shape is common to both, and the long row's unused positions index past the table:
    IndexError here, a lost process on a GPU.
    """
    config = AutoConfig.for_model(
        "gpt2",
        vocab_size=128,
        n_positions=64,
        n_embd=48,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomize(model, 0)
    model.requires_grad_(False).eval()
    todo = (tuple(range(4, 60)), (7, 8))
    texts = [generate(model, (prompt,))[0] for prompt in todo[1:]]
    model.set_attn_implementation(ATTENTION_NAME)
    paged = [TransformersModel(model, ReferenceBackend()) for _ in range(2)]
    engine = build_engine(*paged, num_draft_tokens=5, num_blocks=64, eos_ids=[EOS])
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    requests = [engine.add(prompt, params) for prompt in todo]
    run(engine)
    assert [request.error for request in requests] == [None, None]  # BUG: IndexError
    assert output_ids(requests[1]) == texts[0]


def test_a_wrong_kv_entry_changes_the_text() -> None:
    """Positive control: with one layer's K of one slot spoiled, texts differ from generate()'s."""
    engine = engine_for("llama", "near", 4, 20)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    requests = [engine.add(prompt, params) for prompt in prompts(20)]
    for _ in range(2):
        engine.step()
    for request in requests:
        table = request.samples[0].seq.block_table
        if table:
            engine.target.kv_cache.k[0][table[0], 0] += 1.0
    run(engine)
    _, expected = models("llama", 20)
    assert [output_ids(request) for request in requests] != expected
