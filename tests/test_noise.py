"""Counter-based noise: known answers, ranges, independence, and the law of what it draws.

The last part runs whole windows with start-keyed noise through the rejection rule, over a small
Markov table in place of models, and tests the joint law of at least K + 1 tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.config import SamplingParams
from specdec.sampling.noise import (
    WindowUniforms,
    inverse_cdf,
    philox4x32,
    seed_to_int64,
    uniform,
    window_uniforms,
)
from specdec.sampling.pipeline import process_logits, to_probs
from specdec.sampling.rows import RowSource, SamplingRows
from specdec.verifiers.rejection import rejection

KNOWN_ANSWERS = [  # key, counters, words; Random123's kat_vectors
    (0, (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (2**64 - 1, (2**32 - 1,) * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        0x299F31D0A4093822,
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def plain_philox(seed: int, counters: tuple[int, ...]) -> list[int]:
    """Written out in Python's unbounded integers."""
    x = list(counters)
    key = [seed % 2**32, seed % 2**64 >> 32]
    for _ in range(10):
        a, b = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
        x = [(b >> 32) ^ x[1] ^ key[0], b % 2**32, (a >> 32) ^ x[3] ^ key[1], a % 2**32]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return x


def uniform_law_holds(pairs: Tensor, bins: int = 32) -> bool:
    """Chi-squared of pairs [N, 2] in (0, 1) over bins x bins cells, bound dof + 5 sqrt(2 dof)."""
    cells = (pairs * bins).long()
    counts = torch.bincount(cells[:, 0] * bins + cells[:, 1], minlength=bins**2).double()
    expected = len(pairs) / bins**2
    dof = bins**2 - 1
    return bool(((counts - expected) ** 2 / expected).sum() < dof + 5 * (2 * dof) ** 0.5)


@pytest.mark.parametrize(("seed", "counters", "words"), KNOWN_ANSWERS)
def test_philox_known_answers(seed: int, counters: tuple[int, ...], words: str) -> None:
    got = philox4x32(torch.tensor(seed_to_int64(seed)), *counters)
    assert " ".join(f"{int(word):08x}" for word in got) == words


def test_philox_equals_unbounded_integers_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    seeds = [int(s) for s in rng.integers(-(2**63), 2**63, 200)]
    counters = rng.integers(0, 2**32, (4, 200))
    got = philox4x32(torch.tensor(seeds), *(torch.from_numpy(c) for c in counters))
    want = [
        plain_philox(seed, tuple(int(c) for c in column))
        for seed, column in zip(seeds, counters.T, strict=True)
    ]
    assert torch.stack(got, dim=1).tolist() == want


def test_philox_broadcasts_seeds_against_counters() -> None:
    seeds, offsets = torch.tensor([[3], [-9]]), torch.arange(5)
    words = philox4x32(seeds, offsets, 7, 0, 0)
    assert all(word.shape == (2, 5) for word in words)
    assert [int(word[1, 4]) for word in words] == plain_philox(-9, (4, 7, 0, 0))


def test_uniform_is_exact_and_inside_the_open_interval() -> None:
    words = torch.tensor([0, 511, 512, 2**32 - 1])
    want = [2.0**-24, 2.0**-24, 3 * 2.0**-24, 1 - 2.0**-24]
    got = uniform(words)
    assert got.dtype == torch.float32
    assert got.tolist() == want


def test_uniform_times_q_is_below_q() -> None:
    """What makes p == q always accepted: the largest uniform still rounds u * q below q."""
    rng = np.random.default_rng(0)
    q = torch.from_numpy(np.float32(2.0) ** -rng.uniform(0, 100, 200_000).astype(np.float32))
    assert bool((uniform(torch.tensor(2**32 - 1)) * q < q).all())


def test_seed_to_int64() -> None:
    for seed, want in (
        (0, 0),
        (2**63 - 1, 2**63 - 1),
        (2**64 - 1, -1),
        (-1, -1),
        (2**63, -(2**63)),
    ):
        assert seed_to_int64(seed) == want
    for seed in (2**64, -(2**63) - 1):
        with pytest.raises(ValueError, match=str(seed)):
            seed_to_int64(seed)


def test_window_uniforms_are_the_words_of_offset_and_start() -> None:
    got = window_uniforms(torch.tensor([5, -2]), torch.tensor([3, 100_000]), 4)
    for b, (seed, start) in enumerate(((5, 3), (-2, 100_000))):
        for i in range(4):
            words = torch.tensor(plain_philox(seed, (i, start, 0, 0)))
            streams = torch.stack((got.draft[b, i], got.accept[b, i], got.recover[b, i]))
            assert torch.equal(streams, uniform(words)[:3])


def test_window_uniforms_do_not_depend_on_the_batch_or_on_the_number_of_positions() -> None:
    seeds, starts = torch.arange(6) * 977 - 2000, torch.arange(6) + 10
    batch = window_uniforms(seeds, starts, 6)
    for b in range(6):
        solo = window_uniforms(seeds[b : b + 1], starts[b : b + 1], 2)
        for name in ("draft", "accept", "recover"):
            assert torch.equal(getattr(solo, name)[0], getattr(batch, name)[b, :2])


@pytest.mark.parametrize("neighbours", ["offsets", "starts", "seeds", "streams", "last streams"])
def test_neighbouring_draws_are_independent(neighbours: str) -> None:
    n = 400_000
    seeds, starts = torch.arange(n), torch.full((n,), 17)
    noise = window_uniforms(seeds, starts, 2)
    first = noise.draft[:, 0]
    second = {
        "offsets": noise.draft[:, 1],
        "starts": window_uniforms(seeds, starts + 1, 1).draft[:, 0],
        "seeds": first.roll(1),
        "streams": noise.accept[:, 0],
        "last streams": noise.recover[:, 0],
    }[neighbours]
    assert uniform_law_holds(torch.stack((first, second), dim=1))
    shared = torch.where(torch.arange(n) % 50 == 0, first, second)  # one draw in 50 used twice
    assert not uniform_law_holds(torch.stack((first, shared), dim=1))


def test_inverse_cdf_takes_the_first_index_above_the_threshold() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 2.0, 1.0, 0.0]])
    for u, want in ((1e-7, 1), (0.24, 1), (0.25, 3), (0.5, 3), (0.75, 4), (1 - 2.0**-24, 4)):
        assert inverse_cdf(weights, torch.tensor([u])).tolist() == [want]
        assert inverse_cdf(weights * 1e-20, torch.tensor([u])).tolist() == [want]


def test_inverse_cdf_of_nothing_is_a_valid_index() -> None:
    weights = torch.stack((torch.zeros(5), torch.full((5,), float("nan"))))
    got = inverse_cdf(weights, torch.tensor([0.5, 0.5]))
    assert bool(((got >= 0) & (got < 5)).all())


def test_inverse_cdf_has_the_law_of_the_weights() -> None:
    weights = torch.tensor([3.0, 0.0, 1.0, 0.5, 2.5])
    u = window_uniforms(torch.arange(200_000), torch.zeros(200_000, dtype=torch.int64), 1).draft

    def holds(law: Tensor) -> bool:
        expected = law[law > 0].double() / law.sum() * len(u)
        counts = torch.bincount(inverse_cdf(weights.expand(len(u), -1), u[:, 0]), minlength=5)
        statistic = ((counts[law > 0] - expected) ** 2 / expected).sum()
        return bool(counts[1] == 0) and bool(statistic < 3 + 5 * 6**0.5)

    assert holds(weights)
    assert not holds(torch.tensor([3.0, 0.0, 1.0, 0.55, 2.45]))


def test_inverse_cdf_sums_in_double_over_large_vocabularies() -> None:
    """A sequential float32 sum over 131,072 ids misses the total by 1e-4 and shifts the law."""
    weights = torch.rand(131_072, generator=torch.Generator().manual_seed(0)).softmax(0)
    exact = weights.double().cumsum(0)
    for u in (0.1, 0.5, 0.9, 0.999):
        u32 = torch.tensor(u)
        want = int((exact <= u32.double() * exact[-1]).sum())
        assert int(inverse_cdf(weights, u32)) == want


# --- windows of drafts over a Markov table ------------------------------------------------------

Noise = Callable[[Tensor, Tensor, int], WindowUniforms]
Rule = Callable[..., tuple[Tensor, Tensor]]


def generate(
    p: Tensor,
    q: Tensor,
    num_drafts: int,
    num_tokens: int,
    *,
    num_samples: int = 120_000,
    reported: Tensor | None = None,
    one_hot: bool = False,
    noise: Noise = window_uniforms,
    rule: Rule = rejection,
) -> Tensor:
    """Tokens [num_samples, num_tokens]; tables p, q [V, V, V] are indexed by the last two tokens.

    Each sample is a request with a seed of its own; its window starts where its tokens end. The
    rule is told `reported` (default q), or one-hot.
    """
    reported = q if reported is None else reported
    seeds = torch.arange(num_samples) * 0x9E3779B97F4A7C15 % 2**62
    rows, offsets = torch.arange(num_samples), torch.arange(num_drafts + 1)
    lens = torch.zeros(num_samples, dtype=torch.int64)
    out = torch.zeros(num_samples, 2 + num_tokens + 2 * num_drafts + 1, dtype=torch.int64)
    num = torch.full((num_samples,), num_drafts)
    while bool((lens < num_tokens).any()):
        u = noise(seeds, lens, num_drafts + 1)
        context = [out[rows, lens], out[rows, lens + 1]]
        for i in range(num_drafts):
            context.append(inverse_cdf(q[context[-2], context[-1]], u.draft[:, i]))
        pairs = list(itertools.pairwise(context))
        drafts = torch.stack(context[2:], 1) if num_drafts else torch.empty_like(out[:, :0])
        accepted, last = rule(
            torch.stack([p[s, t] for s, t in pairs], 1),
            None if one_hot else torch.stack([reported[s, t] for s, t in pairs], 1)[:, :-1],
            drafts,
            num,
            u.accept,
            u.recover,
        )
        window = torch.cat((drafts, last[:, None]), dim=1)
        window = torch.where(offsets == accepted[:, None], last[:, None], window)
        out.scatter_(1, lens[:, None] + 2 + offsets, window)
        lens = torch.where(lens < num_tokens, lens + accepted + 1, lens)
    return out[:, 2 : 2 + num_tokens]


def tables(vocab_size: int, seed: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    shape = (vocab_size, vocab_size)
    p = rng.dirichlet(np.full(vocab_size, 0.8), shape)
    q = 0.35 * p + 0.65 * rng.dirichlet(np.full(vocab_size, 0.8), shape)
    return torch.from_numpy(p).float(), torch.from_numpy(q).float()


def constant(law: list[float] | Tensor) -> Tensor:
    """The table of a law that ignores its context."""
    law = torch.as_tensor(law)
    return law.expand(len(law), len(law), -1)


def joint_law_holds(tokens: Tensor, p: Tensor) -> bool:
    """Chi-squared of tokens [N, T] against p, cells below 5 merged, bound dof + 5 sqrt(2 dof)."""
    vocab_size, num_tokens = p.shape[-1], tokens.shape[1]
    law, s, t = torch.ones(1, dtype=torch.float64), torch.tensor([0]), torch.tensor([0])
    for _ in range(num_tokens):
        law = (law[:, None] * p[s, t].double()).flatten()
        s, t = t.repeat_interleave(vocab_size), torch.arange(vocab_size).repeat(len(t))
    code = (tokens * vocab_size ** torch.arange(num_tokens - 1, -1, -1)).sum(1)
    counts = torch.bincount(code, minlength=len(law)).double()
    expected = law / law.sum() * len(tokens)
    if bool((counts[law == 0] > 0).any()):
        return False
    small = expected < 5
    counts = torch.cat((counts[~small], counts[small].sum()[None]))
    expected = torch.cat((expected[~small], expected[small].sum()[None]))
    counts, expected = counts[expected > 0], expected[expected > 0]
    dof = len(counts) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    return bool(statistic < dof + 5 * (2 * dof) ** 0.5)


def recovered_from_p(p: Tensor, q: Any, x: Tensor, n: Tensor, u: Tensor, r: Tensor) -> Any:
    accepted, _ = rejection(p, q, x, n, u, r)
    rows = torch.arange(len(x))
    return accepted, inverse_cdf(p[rows, accepted], r[rows, accepted])


def bonus_from_the_last_draft_row(
    p: Tensor, q: Any, x: Tensor, n: Tensor, u: Tensor, r: Tensor
) -> Any:
    return rejection(torch.cat((p[:, :-1], p[:, -2:-1]), dim=1), q, x, n, u, r)


def generous(p: Tensor, q: Any, x: Tensor, n: Tensor, u: Tensor, r: Tensor) -> Any:
    return rejection(p, q, x, n, u * 0.9, r)


def same_noise_at_all_offsets(seeds: Tensor, starts: Tensor, n: int) -> WindowUniforms:
    u = window_uniforms(seeds, starts, 1)
    return WindowUniforms(*(w.expand(-1, n) for w in (u.draft, u.accept, u.recover)))


def recover_with_the_draft_noise(seeds: Tensor, starts: Tensor, n: int) -> WindowUniforms:
    u = window_uniforms(seeds, starts, n)
    return WindowUniforms(u.draft, u.accept, u.draft)


def accept_with_the_draft_noise(seeds: Tensor, starts: Tensor, n: int) -> WindowUniforms:
    u = window_uniforms(seeds, starts, n)
    return WindowUniforms(u.draft, u.draft, u.recover)


def recover_with_the_accept_noise(seeds: Tensor, starts: Tensor, n: int) -> WindowUniforms:
    u = window_uniforms(seeds, starts, n)
    return WindowUniforms(u.draft, u.accept, u.accept)


@pytest.mark.parametrize(
    ("vocab_size", "num_drafts", "num_tokens"),
    [(4, 0, 3), (4, 1, 3), (4, 2, 3), (4, 2, 4), (3, 4, 5)],
)
def test_joint_law_of_a_window_and_more(vocab_size: int, num_drafts: int, num_tokens: int) -> None:
    for seed in range(2):
        p, q = tables(vocab_size, seed)
        assert joint_law_holds(generate(p, q, num_drafts, num_tokens), p)


@pytest.mark.parametrize(
    "fault",
    [
        {"rule": recovered_from_p},
        {"rule": bonus_from_the_last_draft_row},
        {"rule": generous},
        {"noise": same_noise_at_all_offsets},
        {"noise": accept_with_the_draft_noise},
        {"noise": recover_with_the_accept_noise},
    ],
    ids=lambda fault: next(iter(fault.values())).__name__,
)
def test_joint_law_test_rejects(fault: dict[str, Any]) -> None:
    p, q = tables(4, 0)
    assert not joint_law_holds(generate(p, q, 2, 4, **fault), p)


def test_a11_recovery_noise_is_not_the_draft_noise() -> None:
    """Drawing the recovered token with the number that drew the draft bends the law by TV 0.1.

    Four tokens at K = 3 reach the bonus; the bias shows from 11,000 draws, 120,000 are made.
    """
    p, q = constant([0.1, 0.6, 0.3]), constant([0.5, 0.3, 0.2])
    assert joint_law_holds(generate(p, q, 3, 4), p)
    assert not joint_law_holds(generate(p, q, 3, 4, noise=recover_with_the_draft_noise), p)


def test_a12_q_is_the_truncated_law_the_draft_was_drawn_from() -> None:
    """The draft draws with top_k = 2; reporting its whole softmax as q keeps too many drafts."""
    gen = torch.Generator().manual_seed(12)
    logits_p, logits_q = torch.randn(2, 1, 1, 6, generator=gen) * 1.5

    def law(logits: Tensor, **params: Any) -> Tensor:
        source = RowSource(SamplingParams(**params), [0], 1, 0, (), ())
        rows = SamplingRows.build([source], 6, "cpu")
        none = torch.empty(1, 0, dtype=torch.int64)
        return to_probs(process_logits(logits, rows, none, 0), rows)[0, 0]

    drawn, whole = law(logits_q, top_k=2), law(logits_q)
    assert int((drawn > 0).sum()) == 2
    for p in (constant(law(logits_p, top_k=2)), constant(law(logits_p))):
        assert joint_law_holds(generate(p, constant(drawn), 2, 3), p)
        wrong = generate(p, constant(drawn), 2, 3, reported=constant(whole))
        assert not joint_law_holds(wrong, p)


def test_a13_a_greedy_drafter_has_one_hot_q() -> None:
    """The target samples at temperature 1; taking the softmax of an argmax draft as q is wrong."""
    p, softmax = tables(4, 13)
    drawn = torch.nn.functional.one_hot(softmax.argmax(-1), 4).float()
    for options in ({"one_hot": True}, {}):  # q = None and q as a one-hot table
        assert joint_law_holds(generate(p, drawn, 2, 3, **options), p)  # type: ignore[arg-type]
    assert not joint_law_holds(generate(p, drawn, 2, 3, reported=softmax, num_samples=5000), p)
