"""Cases of users of speculative decoding: termination, accounting, KV cache, scheduling and
capacity.

Each is named after its number in the list of reported faults. The toy model's KV entry is the token
id and its next-token law hashes the whole context, so a wrong slot, a stale entry or a shifted
position changes the text.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from toy import (
    ScriptedProposer,
    ToyModel,
    WordTokenizer,
    audit,
    blended_law,
    build_engine,
    chain_law,
    constant_law,
    output_ids,
    plain_greedy,
    run,
    table_law,
)

from specdec.batch import ForwardBatch
from specdec.block_pool import ROOT
from specdec.config import SamplingParams
from specdec.engine import Engine
from specdec.outputs import Request
from specdec.proposers.ngram import NgramProposer
from specdec.proposers.none import NoProposer
from specdec.sequence import blocks_for

VOCAB = 50
LAW = table_law(VOCAB, 0)
OTHER = table_law(VOCAB, 1)


def greedy(max_tokens: int | None = 30, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)


def self_drafting(num_draft_tokens: int, law: Any = LAW, **options: Any) -> Engine:
    """D == T."""
    return build_engine(
        ToyModel(law, VOCAB), ToyModel(law, VOCAB), num_draft_tokens=num_draft_tokens, **options
    )


def chain_engine(
    follows: dict[int, int], num_draft_tokens: int, *, draft: bool = True, **options: Any
) -> Engine:
    """T and D that go through a chain of tokens with certainty, also at temperature 1."""
    law = chain_law(VOCAB, follows)
    models = [ToyModel(law, VOCAB, order=1) for _ in range(2)]
    return build_engine(
        models[0], models[1] if draft else None, num_draft_tokens=num_draft_tokens, **options
    )


# --- termination and accounting -----------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("max_tokens", [0, 1, 5, 6, 7])
def test_a01_max_tokens_is_exact(max_tokens: int, temperature: float) -> None:
    """Engines emitted up to K tokens more than max_tokens when the last run passed it.

    With D == T each step releases six tokens, so of 1, 5 and 7 each ends inside a run; at
    temperature 1 the lookahead is not shortened, so the cut itself is at work.
    """
    engine = self_drafting(5)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=3)
    request = engine.add([1, 2, 3], params)
    assert run(engine, check=audit) == [request]
    (out,) = request.output().outputs
    assert len(out.token_ids) == max_tokens
    assert out.finish_reason == "length" and out.stop_reason is None
    assert out.stats["num_emitted_tokens"] == engine.stats.num_emitted_tokens == max_tokens
    if temperature and max_tokens == 7:  # positive control: the second run was really cut
        assert out.stats["num_verified_tokens"] == 12
    assert engine.pool.num_free == engine.pool.num_blocks


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a02_tokens_logprobs_and_usage_agree(temperature: float) -> None:
    """Log-probabilities and usage counted the whole run, tokens only what was kept.

    Eight tokens end inside the second run of six: at temperature 1 twelve are verified.
    """
    engine = self_drafting(5)
    params = SamplingParams(temperature=temperature, max_tokens=8, seed=1, logprobs=1)
    request = engine.add([4, 5], params)
    run(engine, check=audit)
    (out,) = request.output().outputs
    assert out.logprobs is not None
    assert [entry.token_id for entry in out.logprobs] == out.token_ids
    assert len(out.token_ids) == len(out.origins) == out.stats["num_emitted_tokens"] == 8
    if temperature:
        assert out.stats["num_verified_tokens"] == 12  # positive control


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 5])
def test_a03_eos_inside_accepted_run(num_draft_tokens: int, temperature: float) -> None:
    """Tokens behind an accepted end-of-text token were emitted.

    T and D agree on 11 12 13 EOS 15 16, one run of K = 5: without the cut all six come out, as
    the control shows with ignore_eos.
    """
    engine = chain_engine({}, num_draft_tokens, eos_ids=[14])
    params = SamplingParams(temperature=temperature, max_tokens=6)
    request = engine.add([10], params)
    control = engine.add(
        [10], SamplingParams(temperature=temperature, max_tokens=6, ignore_eos=True)
    )
    run(engine, check=audit)
    (out,) = request.output().outputs
    assert out.token_ids == [11, 12, 13, 14]
    assert (out.finish_reason, out.stop_reason) == ("stop", 14)
    assert output_ids(control) == [11, 12, 13, 14, 15, 16]
    assert control.output().outputs[0].finish_reason == "length"


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 5])
def test_a03_min_tokens_holds_the_end_back_inside_a_run(num_draft_tokens: int) -> None:
    """min_tokens was looked at once per step, so the end came early, or late, inside a window.

    The end token is always the best one and 5 the next best: exactly min_tokens fives, then it.
    """
    law = constant_law([9.0 if i == 14 else 5.0 if i == 5 else 0.0 for i in range(VOCAB)])
    for min_tokens in range(9):
        engine = self_drafting(num_draft_tokens, law, eos_ids=[14])
        request = engine.add([10], greedy(30, min_tokens=min_tokens))
        run(engine, check=audit)
        assert output_ids(request) == [5] * min_tokens + [14]


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a04_stop_token_and_cap_in_one_run(num_draft_tokens: int, temperature: float) -> None:
    """A stop token and max_tokens in one run: whichever comes first ends the text.

    Run 10 11 STOP 20 21 22 with cap 5; and STOP as the sixth token with cap 5.
    """
    engine = chain_engine({9: 10, 11: 40, 40: 20}, num_draft_tokens)
    early = engine.add(
        [9], SamplingParams(temperature=temperature, max_tokens=5, stop_token_ids=[40])
    )
    late = engine.add(
        [20], SamplingParams(temperature=temperature, max_tokens=5, stop_token_ids=[26])
    )
    longer = engine.add(
        [20], SamplingParams(temperature=temperature, max_tokens=9, stop_token_ids=[26])
    )
    run(engine, check=audit)
    assert output_ids(early) == [10, 11, 40]
    assert early.output().outputs[0].finish_reason == "stop"
    assert output_ids(late) == [21, 22, 23, 24, 25]
    assert late.output().outputs[0].finish_reason == "length"
    assert output_ids(longer) == [21, 22, 23, 24, 25, 26]  # positive control: 26 does stop
    assert longer.output().outputs[0].stop_reason == 26


def _stop_string_output(num_draft_tokens: int, stop: str, **fields: Any) -> tuple[Any, int]:
    """Text 'well you see ha ha ha ...' from an n-gram drafter."""
    words = ["?"] * VOCAB
    words[1:8] = ["So", "well", " you", " see", " ha", " x", "!"]
    law = chain_law(VOCAB, {1: 2, 2: 3, 3: 4, 4: 5, 5: 5})
    engine = build_engine(
        ToyModel(law, VOCAB, order=1),
        NgramProposer(1, 3) if num_draft_tokens else None,
        num_draft_tokens=num_draft_tokens,
        tokenizer=WordTokenizer(words),
    )
    prompt = [4, 5, 5, 5, 5, 5, 5, 1]
    request = engine.add(prompt, greedy(40, stop=[stop], logprobs=2, **fields))
    run(engine, check=audit)
    return request.output().outputs[0], engine.stats.num_target_steps


def test_a06_stop_string_cuts_ids_logprobs_and_text_alike() -> None:
    """With accepted drafts behind the stop string, text was cut but ids and log-probabilities not.

    The n-gram drafter accepts runs of ' ha', so the stop string ends inside a run for some K and
    spans two steps for others; the result must be that of K = 0 for all.
    """
    plain, num_plain_steps = _stop_string_output(0, " ha ha ha")
    assert plain.text == "well you see" and plain.token_ids == [2, 3, 4, 5, 5, 5]
    assert plain.stop_reason == " ha ha ha" and plain.finish_reason == "stop"
    num_steps = set()
    for k in range(1, 9):
        out, steps = _stop_string_output(k, " ha ha ha")
        assert (out.text, out.token_ids) == (plain.text, plain.token_ids)
        assert out.stop_reason == plain.stop_reason
        assert out.logprobs == plain.logprobs and len(out.logprobs) == 6
        assert all(len(entry.top) == 2 for entry in out.logprobs)
        assert len(out.origins) == out.stats["num_emitted_tokens"] == 6
        num_steps.add(steps)
    # Positive control: speculation was at work, and three ' ha' took one step or two.
    assert max(num_steps) < num_plain_steps and len(num_steps) > 1


@pytest.mark.parametrize("k", [0, 1, 3, 8])
def test_a06_stop_string_inside_a_token_and_kept(k: int) -> None:
    """The stop string may end inside a token's text; it is kept when asked for."""
    out, _ = _stop_string_output(k, "ee h")
    assert (out.text, out.token_ids) == ("well you s", [2, 3, 4, 5])
    out, _ = _stop_string_output(k, "a ha", include_stop_text=True)
    assert (out.text, out.token_ids) == ("well you see ha ha", [2, 3, 4, 5, 5])
    out, _ = _stop_string_output(k, " ha", min_tokens=8)
    assert (len(out.token_ids), out.stop_reason) == (8, " ha")


def test_a08_verified_and_emitted_are_counted_apart() -> None:
    """Acceptance statistics counted tokens that were verified but cut behind the end token.

    Run d1 d2 EOS d4 d5 bonus: five drafts stay, the rule releases six, three are emitted.
    """
    engine = chain_engine({}, 5, eos_ids=[13])
    request = engine.add([10], greedy(20))
    run(engine, check=audit)
    stats = request.output().outputs[0].stats
    assert output_ids(request) == [11, 12, 13]
    assert stats["num_target_steps"] == 1
    assert stats["num_draft_tokens"] == stats["num_accepted_tokens"] == 5
    assert stats["num_verified_tokens"] == 6 and stats["num_emitted_tokens"] == 3
    assert stats["mean_accepted_length"] == 3.0
    assert engine.stats.num_accepted_tokens == 5 and engine.stats.num_emitted_tokens == 3


def test_a10_drafted_counts_what_was_proposed() -> None:
    """Engines counted K drafts per step whatever was proposed, and divided by zero at none.

    A text without repetition gives n-gram lookup no match at all: 0 drafted, rates 0.0, no NaN.
    """
    engine = build_engine(
        ToyModel(chain_law(VOCAB, {}), VOCAB, order=1), NgramProposer(1, 4), num_draft_tokens=4
    )
    request = engine.add([0, 1], greedy(20))
    run(engine, check=audit)
    stats = request.output().outputs[0].stats
    assert output_ids(request) == list(range(2, 22))
    assert stats["num_draft_tokens"] == 0 and stats["num_target_steps"] == 20
    assert stats["acceptance_rate"] == 0.0 and stats["acceptance_by_position"] == []
    assert stats["mean_accepted_length"] == 1.0
    assert set(request.output().outputs[0].origins) == {"plain"}
    idle = build_engine(ToyModel(LAW, VOCAB)).stats.as_dict()
    assert not any(isinstance(v, float) and math.isnan(v) for v in idle.values())


def test_a10_short_drafts_beside_full_ones() -> None:
    """Rows of one step that propose 0, 2 and 5 of K = 5 are counted each as what they are."""

    def draft(token_ids: list[int], limit: int) -> list[int]:
        count = {0: 0, 1: 2, 2: 5}[token_ids[0]]
        return plain_greedy(LAW, token_ids, count)

    engine = build_engine(ToyModel(LAW, VOCAB), ScriptedProposer(draft), num_draft_tokens=5)
    requests = [engine.add([i, 7], greedy(18)) for i in range(3)]
    run(engine, check=audit)
    stats = [request.output().outputs[0].stats for request in requests]
    assert [s["num_draft_tokens"] for s in stats] == [0, 12, 15]
    assert [s["num_accepted_tokens"] for s in stats] == [0, 12, 15]
    assert [s["num_target_steps"] for s in stats] == [18, 6, 3]
    assert stats[1]["acceptance_by_position"] == [1.0, 1.0]
    for i, request in enumerate(requests):
        assert output_ids(request) == plain_greedy(LAW, [i, 7], 18)


def test_no_proposer_is_plain_decoding() -> None:
    """The baseline of all comparisons: one token per target step, the toy's own greedy text."""
    engine = build_engine(ToyModel(LAW, VOCAB), NoProposer(), num_draft_tokens=4)
    request = engine.add([1, 2], greedy(25))
    run(engine, check=audit)
    assert output_ids(request) == plain_greedy(LAW, [1, 2], 25)
    assert engine.stats.num_target_steps == 25 and engine.stats.num_draft_tokens == 0


# --- KV cache -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 5])
def test_a30_self_draft_accepts_everything(num_draft_tokens: int) -> None:
    """After a fully accepted window the last draft's KV was missing, and acceptance decayed.

    D == T and the law hashes the whole context: one wrong entry in the draft's KV changes every
    later draft, so 200 tokens at 100 % cannot pass by luck (chance 1 / 50 per draft).
    """
    engine = self_drafting(num_draft_tokens)
    request = engine.add([1, 2, 3], greedy(200))
    emitted: list[int] = []

    def check(engine: Engine) -> None:
        audit(engine)
        emitted.append(engine.stats.num_emitted_tokens)

    run(engine, check=check)
    assert output_ids(request) == plain_greedy(LAW, [1, 2, 3], 200)
    stats = request.output().outputs[0].stats
    assert stats["acceptance_by_position"] == [1.0] * num_draft_tokens
    per_step = [after - before for before, after in pairwise([0, *emitted])]
    full = [n for n in per_step if n][:-1]
    assert len(full) >= 30 and set(full) == {num_draft_tokens + 1}


def test_a30_control_a_hole_in_the_draft_kv_is_noticed() -> None:
    """Positive control: with one draft KV entry spoiled, the same run loses acceptance."""
    engine = self_drafting(5)
    request = engine.add([1, 2, 3], greedy(200))
    for _ in range(4):
        engine.step()
    engine._proposer.model.kv_cache.k[0].view(-1)[5] += 1  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="KV differs"):
        audit(engine)
    run(engine)
    assert request.output().outputs[0].stats["acceptance_rate"] < 0.5
    assert output_ids(request) == plain_greedy(LAW, [1, 2, 3], 200)  # T is not affected


def test_a31_draft_length_follows_accept_and_reject() -> None:
    """The draft's KV length was wrong after a round that refused drafts, then after the next.

    The rule accepts 2, then none, in turn. After a round the draft's valid KV is what it fed, cut
    to the committed tokens without the last; the audit compares its entries with the tokens.
    """
    calls = [0]

    def alternate(p: Any, q: Any, ids: Any, counts: Any, u: Any, v: Any) -> Any:
        calls[0] += 1
        accepted = torch.full((ids.shape[0],), 2 if calls[0] % 2 else 0)
        return accepted, torch.full((ids.shape[0],), calls[0] % VOCAB)

    engine = build_engine(
        ToyModel(LAW, VOCAB), ToyModel(OTHER, VOCAB), num_draft_tokens=4, rule=alternate
    )
    request = engine.add([1, 2, 3], SamplingParams(max_tokens=60, seed=1))
    (seq,) = (sample.seq for sample in request.samples)
    engine.step()
    lengths = [len(seq)]
    while engine.has_work:
        before = len(seq)
        engine.step()
        audit(engine)
        if not request.finished:
            lengths.append(len(seq))
            assert seq.num_computed_tokens == len(seq) - 1
            assert seq.num_draft_computed_tokens == min(before + 3, len(seq) - 1)
    steps = [after - before for before, after in pairwise(lengths)]
    assert {1, 3} == set(steps) and len(steps) > 20  # positive control: the rounds alternated
    assert calls[0] == request.output().outputs[0].stats["num_target_steps"]


def test_a31_the_draft_catches_up_after_steps_without_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While speculation was off for a row its draft KV fell behind, and was never filled.

    K is 4 and 0 in turn, ten tokens each; D == T must accept everything in every period of K = 4.
    """
    engine = self_drafting(4)
    monkeypatch.setattr(engine.scheduler, "lookahead", lambda seq: 4 if len(seq) // 10 % 2 else 0)
    request = engine.add([1, 2, 3], greedy(120))
    run(engine, check=audit)
    assert output_ids(request) == plain_greedy(LAW, [1, 2, 3], 120)
    stats = request.output().outputs[0].stats
    assert stats["acceptance_rate"] == 1.0 and stats["num_draft_tokens"] >= 40
    origins = request.output().outputs[0].origins
    assert origins.count("plain") > 30  # positive control: speculation was off in between


@pytest.mark.parametrize("block_size", [16, 32])
def test_a32_blocks_and_the_neighbours_kv(block_size: int) -> None:
    """A window that crossed a block's end wrote into the next sequence's block.

    Lengths 13 to 16 put the window across the end of a block of 16. After each step every changed
    slot must lie in its own sequence's window; the neighbours' committed KV keeps its checksum.
    """
    k = 4
    law = blended_law(LAW, OTHER, 3)
    for length in range(13, 17):
        engine = build_engine(
            ToyModel(LAW, VOCAB),
            ToyModel(law, VOCAB),
            num_draft_tokens=k,
            block_size=block_size,
            num_blocks=32,
        )
        requests = [
            engine.add([i + 1] * (length + i % 2), greedy(40 + 7 * i), request_id=str(i))
            for i in range(2)
        ]
        seqs = [request.samples[0].seq for request in requests]
        longest = [0, 0]
        changed_total = 0
        while engine.has_work:
            before = [len(seq) for seq in seqs]
            images = snapshot(engine)
            plans = [engine.scheduler.lookahead(seq) for seq in seqs]
            engine.step()
            allowed: set[int] = set()
            for i, seq in enumerate(seqs):
                if seq.finish_reason:
                    continue
                longest[i] = max(longest[i], blocks_for(before[i] + plans[i] + 1, block_size))
                assert len(seq.block_table) == longest[i]
                first = 0 if before[i] == seq.num_prompt_tokens else before[i] - 2
                allowed |= slots(seq, first, before[i] + plans[i], block_size)
            if not any(seq.finish_reason for seq in seqs):
                changed = changed_slots(images, snapshot(engine))
                assert changed <= allowed
                changed_total += len(changed)
        assert changed_total > 100  # positive control: windows were written
        for request in requests:
            seq = request.samples[0].seq
            prompt = request.prompt_token_ids
            assert output_ids(request) == plain_greedy(LAW, prompt, seq.num_output_tokens)


def snapshot(engine: Engine) -> list[torch.Tensor]:
    """The K tensors of both models, without the padding block."""
    models = [engine.target, engine._proposer.model]  # type: ignore[attr-defined]
    return [model.kv_cache.k[0][:-1].flatten().clone() for model in models]


def changed_slots(before: list[torch.Tensor], after: list[torch.Tensor]) -> set[int]:
    return {
        int(i)
        for old, new in zip(before, after, strict=True)
        for i in (old != new).nonzero().flatten()
    }


def slots(seq: Any, start: int, end: int, block_size: int) -> set[int]:
    """Slots of the sequence's positions start .. end - 1."""
    return {
        seq.block_table[i // block_size] * block_size + i % block_size
        for i in range(max(start, 0), min(end, len(seq.block_table) * block_size))
    }


# --- prefix cache -------------------------------------------------------------------------------


def test_a34_a_prefix_hit_serves_both_models() -> None:
    """A hit restored the target's KV only: the second request's drafts were noise.

    D agrees with T behind three contexts of four. The second time both models must skip the
    shared prefix, and every step must accept just as much.
    """
    target = ToyModel(LAW, VOCAB)
    draft = ToyModel(blended_law(LAW, OTHER, 4), VOCAB)
    engine = build_engine(target, draft, num_draft_tokens=4)
    prompt = [(7 * i) % VOCAB for i in range(100)]
    fed, stats = [], []
    for _ in range(2):
        start = (target.num_tokens, draft.num_tokens)
        request = engine.add(prompt, greedy(60))
        run(engine, check=audit)
        assert output_ids(request) == plain_greedy(LAW, prompt, 60)
        fed.append((target.num_tokens - start[0], draft.num_tokens - start[1]))
        stats.append(request.output().outputs[0].stats)
    assert stats[0] == stats[1]
    assert 0.3 < stats[0]["acceptance_rate"] < 0.95  # positive control: drafts can be refused
    assert engine.stats.num_prefix_hit_tokens == 96
    assert [a - b for a, b in zip(*fed, strict=True)] == [96, 96]


def committed_blocks(engine: Engine, requests: list[Request]) -> dict[bytes, list[int]]:
    """Hash of each full block of committed tokens, and its tokens."""
    blocks = {}
    for request in requests:
        ids, digest = request.samples[0].seq.token_ids, ROOT
        for start in range(0, len(ids) - 15, 16):
            digest = engine.pool._chain(digest, ids[start : start + 16])
            blocks[digest] = ids[start : start + 16]
    return blocks


def audit_hashes(engine: Engine, requests: list[Request]) -> None:
    """Every registered block is hashed by committed tokens, and holds these in both models."""
    committed = committed_blocks(engine, requests)
    for block, digest in engine.pool._hash_of.items():
        assert digest in committed, "a block with tokens that were never emitted is hashed"
        for model in (engine.target, engine._proposer.model):  # type: ignore[attr-defined]
            ids = model.kv_cache.k[0][block].flatten().long().tolist()
            assert ids == committed[digest], "a registered block holds other tokens"


@pytest.mark.parametrize("draft_law", ["same", "blended", "other"])
def test_a35_prefix_cache_changes_nothing(draft_law: str) -> None:
    """Blocks with refused drafts were hashed, and later prompts got KV of tokens never emitted.

    20 prompts share 37 tokens; the hash of each registered block is recomputed from the committed
    tokens and from the KV itself after every step.
    """
    laws = {"same": LAW, "blended": blended_law(LAW, OTHER, 3), "other": OTHER}
    shared = [(3 * i + 1) % VOCAB for i in range(37)]
    prompts = [shared + [i, i * i % VOCAB, 5][: 1 + i % 3] for i in range(20)]
    outputs = []
    for caching in (False, True):
        engine = build_engine(
            ToyModel(LAW, VOCAB),
            ToyModel(laws[draft_law], VOCAB),
            prefix_caching=caching,
            max_num_seqs=3,
        )
        requests = [engine.add(prompt, greedy(40)) for prompt in prompts]

        while engine.has_work:
            engine.step()
            audit(engine)
            audit_hashes(engine, requests)
        outputs.append([output_ids(request) for request in requests])
        assert (engine.stats.num_prefix_hit_tokens > 0) == caching
    assert outputs[0] == outputs[1] == [plain_greedy(LAW, prompt, 40) for prompt in prompts]


def test_a35_a_block_that_others_may_hold_is_never_written() -> None:
    """A draft's first feed and the window's first token write KV of committed tokens again. In a
    shared or registered block that is a write into another sequence's prefix (a race on a GPU).

    Prompts whose length is a multiple of the block size bring the last tokens to a block's end.
    """
    writes: list[set[int]] = []

    class Watched(ToyModel):
        def forward(self, batch: ForwardBatch) -> torch.Tensor:
            blocks = set((batch.slot_mapping[batch.slot_mapping >= 0] // 16).tolist())
            writes.append(blocks)
            assert not blocks & set(engine.pool._hash_of), "a registered block is written"
            assert not any(engine.pool.shared(block) for block in blocks)
            return super().forward(batch)

    models = [Watched(law, VOCAB) for law in (LAW, blended_law(LAW, OTHER, 3))]
    engine = build_engine(*models, num_draft_tokens=4)
    prompt = [(3 * i) % VOCAB for i in range(64)]
    for _ in range(2):
        requests = [engine.add(prompt[:n], greedy(40)) for n in (31, 32, 33, 34, 48, 64)]
        run(engine, check=audit)
        for request in requests:
            assert request.error is None
            assert output_ids(request) == plain_greedy(LAW, request.prompt_token_ids, 40)
    assert engine.stats.num_prefix_hit_tokens == 160 and len(writes) > 50  # positive control
