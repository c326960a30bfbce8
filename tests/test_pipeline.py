"""The sampling pipeline against a slow brute force, and its behaviour inside windows of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.config import SamplingParams
from specdec.sampling.noise import inverse_cdf, window_uniforms
from specdec.sampling.pipeline import (
    align_vocab,
    argmax_lowest,
    invalid_rows,
    process_logits,
    raw_logprobs,
    to_probs,
)
from specdec.sampling.rows import RowSource, SamplingRows
from specdec.verifiers.greedy import greedy
from specdec.verifiers.rejection import rejection

INF = float("inf")
NO_DRAFTS = torch.empty(1, 0, dtype=torch.int64)


def source(
    params: SamplingParams,
    token_ids: Sequence[int] = (0,),
    num_prompt_tokens: int = 1,
    stop_ids: tuple[int, ...] = (),
    seed: int = 0,
) -> RowSource:
    words: Any = params.bad_words
    return RowSource(params, list(token_ids), num_prompt_tokens, seed, stop_ids, words)


def build(*sources: RowSource, vocab_size: int) -> SamplingRows:
    return SamplingRows.build(sources, vocab_size, torch.device("cpu"))


def brute_force(logits: Tensor, row: RowSource, prefix: Sequence[int]) -> np.ndarray:
    """One position's processed logits [V], rule by rule, in float32; prefix: drafts before it."""
    z, p = logits.float().numpy().copy(), row.params
    vocab_size, f32 = len(z), np.float32
    context = [*row.token_ids, *prefix]
    output = context[row.num_prompt_tokens :]
    for token in range(vocab_size):
        banned = p.allowed_token_ids is not None and token not in p.allowed_token_ids
        for word in row.bad_words:
            start = len(context) - len(word) + 1
            match = start >= 0 and tuple(context[start:]) == word[:-1]
            banned |= word[-1] == token and match
        banned |= len(output) < p.min_tokens and token in row.stop_ids
        bias = p.logit_bias.get(token, 0.0)
        z[token] = -np.inf if banned or bias <= -100 else z[token] + f32(bias)
        if token in context and p.repetition_penalty != 1:
            r = f32(p.repetition_penalty)
            z[token] = z[token] / r if z[token] > 0 else z[token] * r
        count = output.count(token)
        z[token] = z[token] - f32(p.frequency_penalty) * f32(count)
        z[token] = z[token] - f32(p.presence_penalty) * f32(count > 0)
    return z if p.greedy else truncate(z / f32(p.temperature), p)


def truncate(z: np.ndarray, p: SamplingParams) -> np.ndarray:
    vocab_size = len(z)
    if not np.isfinite(z.max()):
        return z
    z = np.where(np.exp(np.float64(z) - z.max()) < p.min_p, -np.inf, z).astype(np.float32)
    if 0 < p.top_k < vocab_size:
        z[z < np.sort(z)[-p.top_k]] = -np.inf
    if p.top_p < 1:
        order = np.argsort(z, kind="stable")
        mass = np.exp(z[order] - z.max())
        mass = (mass / mass.sum(dtype=np.float32)).astype(np.float64).cumsum().astype(np.float32)
        removed = mass <= np.float32(1 - p.top_p)
        removed[-1] = False
        z[order[removed]] = -np.inf
    return z


def random_params(rng: np.random.Generator, vocab_size: int) -> SamplingParams:
    def ids(n: int) -> list[int]:
        return [int(t) for t in rng.integers(0, vocab_size, n)]

    options: dict[str, Any] = {
        "temperature": [0.0, 0.3, 1.7][rng.integers(3)],
        "top_k": int(rng.integers(1, vocab_size + 3)),
        "top_p": float(rng.uniform(0.05, 0.99)),
        "min_p": float(rng.uniform(0, 0.5)),
        "repetition_penalty": float(rng.uniform(0.5, 2)),
        "frequency_penalty": float(rng.uniform(-1, 1)),
        "presence_penalty": float(rng.uniform(-1, 1)),
        "logit_bias": {t: float([-100, -3, 2.5][rng.integers(3)]) for t in ids(3)},
        "allowed_token_ids": sorted(set(ids(vocab_size))),
        "bad_words": tuple(tuple(ids(int(rng.integers(1, 4)))) for _ in range(12)),
        "min_tokens": int(rng.integers(0, 8)),
    }
    return SamplingParams(**{k: v for k, v in options.items() if rng.random() < 0.4})


def random_row(rng: np.random.Generator, vocab_size: int) -> RowSource:
    params = random_params(rng, vocab_size)
    tokens = rng.integers(0, vocab_size, rng.integers(1, 9)).tolist()
    prompt = int(rng.integers(1, len(tokens) + 1))
    return source(params, tokens, prompt, tuple(rng.integers(0, vocab_size, 2).tolist()))


@pytest.mark.parametrize("seed", range(150))
def test_pipeline_equals_brute_force(seed: int) -> None:
    """Mixed rows, repeated and padded drafts, ties, offsets; equal bit for bit."""
    rng = np.random.default_rng(seed)
    vocab_size = int(rng.integers(3, 20))
    rows = [random_row(rng, vocab_size) for _ in range(rng.integers(1, 5))]
    num_drafts = int(rng.integers(0, 6))
    offset = int(rng.integers(0, num_drafts + 1))
    num_positions = num_drafts - offset + 1
    drafts = rng.integers(-1, min(vocab_size, 4), (len(rows), num_drafts))  # few ids, so repeats
    logits = torch.from_numpy(rng.normal(0, 2, (len(rows), num_positions, vocab_size))).float()
    if seed % 3 == 0:
        logits = (logits * 2).round() / 2  # ties
    before = logits.clone()
    got = process_logits(logits, build(*rows, vocab_size=vocab_size), torch.tensor(drafts), offset)
    assert torch.equal(logits, before)
    assert got.dtype == torch.float32
    for b, row in enumerate(rows):
        for s in range(num_positions):
            want = brute_force(logits[b, s], row, drafts[b, : offset + s].tolist())
            np.testing.assert_array_equal(got[b, s].numpy(), want, err_msg=f"{row} {b} {s}")


@pytest.mark.parametrize("top_k", [0, 1, 40, 1024, 1500, 2999])
@pytest.mark.parametrize("ties", [False, True])
def test_truncation_of_a_large_vocabulary_equals_brute_force(top_k: int, ties: bool) -> None:
    """Beyond the width up to which only the largest logits are looked at, and with ties."""
    logits = torch.randn(6, 1, 3000, generator=torch.Generator().manual_seed(top_k)) * 3
    if ties:
        logits = logits.round()
    logits[..., :9] -= 300.0  # probability 0 in float32: gone with top_p, kept without
    limits = (1e-9, 0.02, 0.5, 0.9, 0.999, 1.0)
    rows = [source(SamplingParams(top_k=top_k, top_p=top_p)) for top_p in limits]
    got = process_logits(logits, build(*rows, vocab_size=3000), NO_DRAFTS.expand(6, 0), 0)
    for b, row in enumerate(rows):
        np.testing.assert_array_equal(got[b, 0].numpy(), brute_force(logits[b, 0], row, []))


@pytest.mark.parametrize("top_k", [0, 2, 7])
@pytest.mark.parametrize(
    ("top_p", "kept"), [(1e-9, 1), (0.05, 1), (0.5, 5), (0.7, 7), (0.9, 9), (1.0, 10)]
)
def test_equal_logits(top_k: int, top_p: float, kept: int) -> None:
    """top_k keeps all ties; top_p keeps the fewest tokens that hold its mass."""
    rows = build(source(SamplingParams(top_k=top_k, top_p=top_p, min_p=1.0)), vocab_size=10)
    got = process_logits(torch.full((1, 1, 10), 2.0), rows, NO_DRAFTS, 0)[0, 0]
    assert got.tolist() == [-INF] * (10 - kept) + [2.0] * kept


def test_rows_positions_and_batches_do_not_influence_each_other() -> None:
    """A window processed at once, in a batch, equals each row and position processed alone."""
    rng = np.random.default_rng(7)
    rows = [random_row(rng, 30) for _ in range(12)]
    drafts = torch.from_numpy(rng.integers(0, 30, (12, 4)))
    logits = torch.from_numpy(rng.normal(0, 2, (12, 5, 30))).float()
    batch = build(*rows, vocab_size=30)
    processed = process_logits(logits, batch, drafts, 0)
    probs = to_probs(processed, batch)
    for b, row in enumerate(rows):
        solo = build(row, vocab_size=30)
        for s in range(5):
            one = process_logits(logits[b : b + 1, s : s + 1], solo, drafts[b : b + 1], s)
            assert torch.equal(one[0, 0], processed[b, s])
            np.testing.assert_array_equal(to_probs(one, solo)[0, 0], probs[b, s])  # NaN alike


def test_plain_rows_use_no_feature() -> None:
    rows = build(source(SamplingParams()), source(SamplingParams(temperature=0)), vocab_size=10**9)
    assert (rows.allowed, rows.bans, rows.biases, rows.penalties) == (None,) * 4
    assert (rows.temperature, rows.log_min_p, rows.truncations) == (None, None, ())
    logits = torch.randn(2, 3, 8)
    assert process_logits(logits, rows, torch.zeros(2, 2, dtype=torch.int64), 0) is logits


def test_ids_above_the_vocabulary_are_ignored() -> None:
    params = SamplingParams(
        logit_bias={50: -100, 51: 3.0, 2: 1.0},
        allowed_token_ids=(1, 2, 50),
        bad_words=((50,), (1, 50), (50, 1)),
        min_tokens=3,
        frequency_penalty=1.0,
    )
    rows = build(source(params, [1, 60, 61], 2, (50,)), vocab_size=4)
    got = process_logits(torch.zeros(1, 2, 4), rows, torch.tensor([[70]]), 0)
    assert got.tolist() == [[[-INF, 0.0, 1.0, -INF]] * 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_become_float32(dtype: torch.dtype) -> None:
    rows = build(source(SamplingParams(logit_bias={0: 1.0})), vocab_size=4)
    got = process_logits(torch.ones(1, 1, 4, dtype=dtype), rows, NO_DRAFTS, 0)
    assert (got.dtype, got.tolist()) == (torch.float32, [[[2.0, 1.0, 1.0, 1.0]]])


class NoHostSync(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails on every operation that makes the host wait for a device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "equal"), name
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), f"{name} by a mask"
        return func(*args, **(kwargs or {}))


def test_step_functions_never_synchronise_with_the_host() -> None:
    rng = np.random.default_rng(1)
    rows = build(*[random_row(rng, 2000) for _ in range(16)], vocab_size=2000)
    logits = torch.randn(16, 4, 2000)
    drafts = torch.randint(-1, 2000, (16, 3))
    num = torch.full((16,), 3)
    with NoHostSync():  # type: ignore[no-untyped-call]
        with pytest.raises(AssertionError, match="_local_scalar_dense"):
            num[0].item()  # control
        u = window_uniforms(rows.seeds, num, 4)
        processed = process_logits(logits, rows, drafts, 0)
        p = to_probs(torch.where(invalid_rows(processed)[..., None], 0.0, processed), rows)
        inverse_cdf(p[:, 0], u.draft[:, 0])
        for q in (p[:, :3], None):
            rejection(p, q, drafts, num, u.accept, u.recover)
        greedy(argmax_lowest(processed), drafts, num)
        raw_logprobs(align_vocab(logits[:, 0], 2100), num, 2)


def test_invalid_rows() -> None:
    nan = float("nan")
    logits = torch.tensor(
        [[[0.0, -INF], [1e30, -1e30]], [[nan, 0.0], [INF, 0.0]], [[-INF, -INF], [-INF, nan]]]
    )
    assert invalid_rows(logits).tolist() == [[False, False], [True, True], [True, True]]


def test_rules_that_leave_nothing_are_reported_for_their_row_only() -> None:
    nothing = SamplingParams(allowed_token_ids=(1,), logit_bias={1: -100}, top_k=2, top_p=0.5)
    rows = build(source(nothing), source(SamplingParams(top_k=2, top_p=0.5)), vocab_size=5)
    logits = torch.randn(2, 2, 5)
    got = process_logits(logits, rows, torch.zeros(2, 1, dtype=torch.int64), 0)
    assert invalid_rows(got).tolist() == [[True, True], [False, False]]


def test_argmax_is_the_lowest_index_and_greedy_rows_are_one_hot() -> None:
    logits = torch.zeros(1, 2, 50_000)
    logits[0, 0, [777, 1234, 49_999]] = 3.0
    rows = build(source(SamplingParams(temperature=0)), vocab_size=50_000)
    assert argmax_lowest(logits).tolist() == [[777, 0]]
    probs = to_probs(logits, rows)
    assert probs.sum(-1).tolist() == [[1.0, 1.0]]
    assert probs[0, 0, 777] == probs[0, 1, 0] == 1.0


def test_a40_aligned_vocabularies() -> None:
    """Ids the draft lacks have q = 0; ids the target lacks are cut."""
    logits = torch.randn(2, 3, 100)
    wide = align_vocab(logits, 104)
    assert torch.equal(wide[..., :100], logits)
    assert bool((wide.softmax(-1)[..., 100:] == 0).all())
    assert torch.equal(align_vocab(wide, 100), logits)
    assert align_vocab(logits, 100).shape == logits.shape


def test_raw_logprobs() -> None:
    logits = torch.randn(4, 9)
    want = logits.double().log_softmax(-1)
    ids = torch.tensor([3, 0, 8, 3])
    own, top_ids, top = raw_logprobs(logits, ids, 3)
    torch.testing.assert_close(own.double(), want[torch.arange(4), ids], atol=1e-6, rtol=0)
    assert torch.equal(top_ids, want.argsort(-1, descending=True)[:, :3])
    torch.testing.assert_close(top.double(), want.gather(1, top_ids), atol=1e-6, rtol=0)
    assert raw_logprobs(logits, ids, 0)[1].shape == (4, 0)
    assert raw_logprobs(logits, ids, 20)[1].shape == (4, 9)


# --- decoding stubs through pipeline and rule -----------------------------------------------------


def decode(
    law: Tensor,
    params: SamplingParams,
    num_tokens: int,
    num_drafts: int,
    *,
    prompt: Sequence[int] = (0,),
    stop_ids: tuple[int, ...] = (),
    seed: int = 0,
    bad_draft_at: int | None = None,
    fixed_draft: int | None = None,
) -> tuple[list[int], list[int]]:
    """Output of the stub law [V, V], logits behind a last token, and the accepted drafts per step.

    Self-drafting; the draft at offset `bad_draft_at` is spoilt, or all are `fixed_draft`.
    """
    tokens, runs, vocab_size = list(prompt), [], law.shape[1]
    while len(tokens) - len(prompt) < num_tokens:
        rows = build(source(params, tokens, len(prompt), stop_ids, seed), vocab_size=vocab_size)
        u = window_uniforms(rows.seeds, torch.tensor([len(tokens)]), num_drafts + 1)
        drafts = torch.full((1, num_drafts), -1)
        for i in range(num_drafts):
            last = drafts[:, i - 1] if i else torch.tensor(tokens[-1:])
            q = to_probs(process_logits(law[last][:, None], rows, drafts, i), rows)[:, 0]
            drafts[:, i] = inverse_cdf(q, u.draft[:, i])
            if i == bad_draft_at:
                drafts[:, i] = (drafts[:, i] + 1) % vocab_size
            if fixed_draft is not None:
                drafts[:, i] = fixed_draft
        logits = law[torch.cat((torch.tensor([tokens[-1:]]), drafts), dim=1)]
        processed = process_logits(logits, rows, drafts, 0)
        assert not bool(invalid_rows(processed).any())
        num = torch.tensor([num_drafts])
        inputs = (drafts, num, u.accept, u.recover)
        accepted, last = rejection(to_probs(processed, rows), None, *inputs)
        if params.greedy:
            assert (accepted, last) == greedy(argmax_lowest(processed), drafts, num)
        tokens += [*drafts[0, : int(accepted)].tolist(), int(last)]
        runs.append(int(accepted))
    return tokens[len(prompt) :][:num_tokens], runs


PENALTIES = [
    {"repetition_penalty": 1.5},
    {"presence_penalty": 0.7},
    {"frequency_penalty": 0.3},
    {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": -0.1},
]
FLAT = torch.ones(12, 12)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_a24_penalties_count_the_drafted_prefix(penalty: dict[str, float]) -> None:
    """Flat logits, greedy: only the penalties decide, so a miscounted prefix changes the text.

    Without the drafted prefix all drafts of a window would be the same token.
    """
    params = SamplingParams(temperature=0, **penalty)  # type: ignore[arg-type]
    plain, _ = decode(FLAT, params, 24, 0)
    for num_drafts in (1, 4):
        text, runs = decode(FLAT, params, 24, num_drafts)
        assert text == plain
        assert set(runs) == {num_drafts}  # self-draft: both sides count alike
    assert plain != decode(FLAT, SamplingParams(temperature=0), 24, 0)[0]


@pytest.mark.parametrize("penalty", PENALTIES)
def test_a26_refused_drafts_leave_no_trace_in_the_penalties(penalty: dict[str, float]) -> None:
    """The draft at position 2 of 5 is refused each step; the text goes on as without drafts."""
    params = SamplingParams(temperature=0, **penalty)  # type: ignore[arg-type]
    law = torch.randn(12, 12, generator=torch.Generator().manual_seed(26)) * 0.3
    for stub in (FLAT, law):
        plain, _ = decode(stub, params, 30, 0)
        text, runs = decode(stub, params, 30, 5, bad_draft_at=1)
        assert text == plain
        assert set(runs) == {1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a27_a_banned_token_is_never_emitted_however_often_it_is_drafted(
    temperature: float,
) -> None:
    """x has by far the largest logit and every draft is x; penalties and min_p are on too."""
    law = torch.zeros(8, 8)
    law[:, 5] = 9.0
    common: dict[str, Any] = {"temperature": temperature, "min_p": 0.2, "presence_penalty": -1.0}
    banned = SamplingParams(logit_bias={5: -100}, **common)
    text, runs = decode(law, banned, 60, 4, fixed_draft=5, seed=3)
    assert 5 not in text
    assert set(runs) == {0}
    assert decode(law, SamplingParams(**common), 60, 4, fixed_draft=5)[0].count(5) > 50  # control


def test_a27_all_positions_are_treated_alike() -> None:
    params = SamplingParams(logit_bias={5: -100}, min_p=0.2)
    rows = build(source(params), vocab_size=8)
    logits = torch.linspace(0, 3, 8).expand(1, 6, -1)
    got = process_logits(logits, rows, torch.full((1, 5), 5), 0)
    assert bool((got == got[:, :1]).all())
    assert torch.equal((got[0, 0] > -INF).nonzero()[:, 0], torch.tensor([4, 6, 7]))


def test_min_tokens_and_bad_words_count_the_drafted_prefix() -> None:
    """Position 0 has 1 output token, position 1 two, position 2 three; min_tokens is 3."""
    params = SamplingParams(min_tokens=3, bad_words=((3, 4, 1), (2,)))
    rows = build(source(params, [0, 3], 1, (7,)), vocab_size=8)
    got = process_logits(torch.zeros(1, 4, 8), rows, torch.tensor([[4, 3, 4]]), 0)
    removed = [set((got[0, s] == -INF).nonzero()[:, 0].tolist()) for s in range(4)]
    assert removed == [{2, 7}, {1, 2, 7}, {2}, {1, 2}]
