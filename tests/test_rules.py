"""The acceptance rules: exact identities by enumeration, numerics, padding.

The joint law of sampled tokens is tested in test_noise.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import specdec.verifiers.rejection as rejection_module
from specdec.config import SamplingParams
from specdec.sampling.noise import inverse_cdf, window_uniforms
from specdec.sampling.pipeline import process_logits, to_probs
from specdec.sampling.rows import RowSource, SamplingRows
from specdec.verifiers.greedy import greedy, refuse_sampling
from specdec.verifiers.rejection import rejection

Rule = Callable[..., tuple[Tensor, Tensor]]


# --- exact identities, by enumeration -----------------------------------------------------------


def random_law(rng: np.random.Generator, vocab_size: int, zeros: bool) -> np.ndarray:
    law = rng.dirichlet(np.full(vocab_size, 0.7))
    if zeros:
        law[rng.integers(vocab_size)] = 0
        law /= law.sum()
    return law


class World:
    """Laws p and q of every context up to K tokens, and all V^K drafted paths as one batch."""

    def __init__(self, seed: int, vocab_size: int, num_drafts: int, zeros: bool) -> None:
        rng = np.random.default_rng(seed)
        self.vocab_size, self.num_drafts = vocab_size, num_drafts
        contexts = [
            c for d in range(num_drafts + 1) for c in itertools.product(range(vocab_size), repeat=d)
        ]
        self.p = {c: random_law(rng, vocab_size, zeros) for c in contexts}
        self.q = {c: random_law(rng, vocab_size, zeros) for c in contexts}
        self.paths = list(itertools.product(range(vocab_size), repeat=num_drafts))

    def batch(self, one_hot: bool) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        k = self.num_drafts
        p = np.array([[self.p[path[:i]] for i in range(k + 1)] for path in self.paths])
        q = np.array([[self.q[path[:i]] for i in range(k)] for path in self.paths])
        num_drafts = torch.full((len(self.paths),), k)
        draft_probs = None if one_hot else torch.from_numpy(q)
        return torch.from_numpy(p), draft_probs, torch.tensor(self.paths), num_drafts

    def law(self) -> np.ndarray:
        """Joint law of K + 1 tokens under p."""
        shape = (self.vocab_size,) * (self.num_drafts + 1)
        out = np.ones(shape)
        for tokens in np.ndindex(*shape):
            for i, token in enumerate(tokens):
                out[tokens] *= self.p[tokens[:i]][token]
        return out


class Probe:
    """Reads the probabilities a rule acts on out of the rule itself, without sampling."""

    def __init__(self, rule: Rule, world: World, one_hot: bool, patch: pytest.MonkeyPatch) -> None:
        self._rule = rule
        self._inputs = world.batch(one_hot)
        self._shape = (len(world.paths), world.num_drafts + 1)
        self._weights = torch.empty(0)
        patch.setattr(rejection_module, "inverse_cdf", self._record)

    def _record(self, weights: Tensor, u: Tensor) -> Tensor:
        self._weights = weights
        return weights.argmax(-1)

    def _run(self, accept: Tensor) -> Tensor:
        num_accepted, _ = self._rule(*self._inputs, accept, torch.full(self._shape, 0.5))
        return num_accepted

    def acceptance(self, i: int) -> np.ndarray:
        """P(draft i kept | those before it kept) of every path, by bisection of its uniform."""
        low = torch.zeros(self._shape[0], dtype=torch.float64)
        high = torch.ones_like(low)
        for _ in range(60):
            middle = (low + high) / 2
            accept = torch.full(self._shape, 1e-300, dtype=torch.float64)
            accept[:, i] = middle
            kept = self._run(accept) > i
            low, high = torch.where(kept, middle, low), torch.where(kept, high, middle)
        return high.numpy()

    def last_law(self, num_kept: int) -> np.ndarray:
        """Law of the token behind num_kept drafts (valid where the next one can be refused)."""
        accept = torch.full(self._shape, 1e-300, dtype=torch.float64)
        accept[:, num_kept:] = 1.0
        self._run(accept)
        weights = self._weights.numpy()
        return np.asarray(weights / weights.sum(-1, keepdims=True))


def emitted_law(world: World, probe: Probe, one_hot: bool) -> tuple[np.ndarray, np.ndarray, float]:
    """Joint law of the emitted tokens continued by p; a [K, paths]; E[num_accepted].

    With one-hot q only the first path is drafted, always.
    """
    k, v = world.num_drafts, world.vocab_size
    accept = np.array([probe.acceptance(i) for i in range(k)])
    last = [probe.last_law(t) for t in range(k + 1)]
    joint, mean = np.zeros((v,) * (k + 1)), 0.0
    for n, path in enumerate(world.paths[: 1 if one_hot else None]):
        drafted = 1.0 if one_hot else np.prod([world.q[path[:i]][path[i]] for i in range(k)])
        for t in range(k + 1):
            stop = np.prod(accept[:t, n]) * (1 - accept[t, n] if t < k else 1.0)
            weight = drafted * stop
            mean += weight * t
            if weight < 1e-13:
                continue
            for rest in itertools.product(range(v), repeat=k + 1 - t):
                mass = weight * last[t][n, rest[0]]
                for i in range(1, len(rest)):
                    mass *= world.p[path[:t] + rest[:i]][rest[i]]
                joint[path[:t] + rest] += mass
    return joint, accept, mean


WORLDS = [(v, k, zeros) for v, k, zeros in itertools.product((2, 3), (1, 2, 3, 4), (False, True))]


@pytest.mark.parametrize(("vocab_size", "num_drafts", "zeros"), WORLDS)
@pytest.mark.parametrize("one_hot", [False, True])
def test_emitted_tokens_have_the_target_law_exactly(
    vocab_size: int, num_drafts: int, zeros: bool, one_hot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Identity (b): joint law of K + 1 tokens; (d): expected number of accepted drafts."""
    world = World(vocab_size * 10 + num_drafts, vocab_size, num_drafts, zeros)
    probe = Probe(rejection, world, one_hot, monkeypatch)
    joint, _, mean = emitted_law(world, probe, one_hot)
    assert abs(joint - world.law()).max() < 1e-12
    want = 0.0
    for path in world.paths[: 1 if one_hot else None]:
        reach = 1.0  # E over drafts of prod min(1, p/q) = sum over drafts of prod min(q, p)
        for i, token in enumerate(path):
            q = 1.0 if one_hot else world.q[path[:i]][token]
            reach *= min(world.p[path[:i]][token], q)
            rest = 1.0 if one_hot else vocab_size ** (num_drafts - i - 1)
            want += reach / rest
    assert abs(mean - want) < 1e-12


@pytest.mark.parametrize("zeros", [False, True])
def test_one_step_identities(zeros: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """(a) q(x) a(x) + (1 - alpha) r(x) = p(x) at each x; (c) alpha = sum min(p, q) = 1 - TV."""
    for seed in range(20):
        world = World(seed, 5, 1, zeros)
        probe = Probe(rejection, world, False, monkeypatch)
        p, q = world.p[()], world.q[()]
        kept = probe.acceptance(0)
        alpha = float((q * kept).sum())
        residual = probe.last_law(0)[int((q * (1 - kept)).argmax())]
        assert abs(q * kept + (1 - alpha) * residual - p).max() < 1e-12
        assert abs(alpha - np.minimum(p, q).sum()) < 1e-12
        assert abs(alpha - (1 - abs(p - q).sum() / 2)) < 1e-12


def patched_residual(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """_last_token_weights with another residual."""

    def weights(p: Tensor, q: Tensor, ids: Tensor, accepted: Tensor, num: Tensor) -> Tensor:
        rows = torch.arange(len(accepted))
        at = accepted.clamp(max=ids.shape[1] - 1)
        wrong = change(p[rows, accepted], q[rows, at])
        return torch.where((accepted < num)[:, None], wrong, p[rows, accepted])

    return weights


BROKEN_RESIDUALS = {
    "abs": lambda p, q: (p - q).abs(),
    "from p": lambda p, q: p,
    "clip at 1e-3": lambda p, q: (p - q).clamp(min=1e-3),
}


@pytest.mark.parametrize("name", BROKEN_RESIDUALS)
def test_enumeration_finds_a_wrong_residual(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change = BROKEN_RESIDUALS[name]
    monkeypatch.setattr(rejection_module, "_last_token_weights", patched_residual(change))
    world = World(1, 3, 2, False)
    joint, _, _ = emitted_law(world, Probe(rejection, world, False, monkeypatch), False)
    assert abs(joint - world.law()).max() > 1e-4


def test_enumeration_finds_a_wrong_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    def generous(p: Tensor, q: Tensor, x: Tensor, n: Tensor, u: Tensor, r: Tensor) -> Any:
        return rejection(p, q, x, n, u * 0.99, r)

    world = World(1, 3, 2, False)
    joint, _, _ = emitted_law(world, Probe(generous, world, False, monkeypatch), False)
    assert abs(joint - world.law()).max() > 1e-4


# --- numerics and padding -----------------------------------------------------------------------


def random_step(seed: int, num_rows: int, num_drafts: int, vocab_size: int) -> tuple[Any, ...]:
    """p [B, K+1, V], q [B, K, V] from independent logits, x drawn from q, noise."""
    gen = torch.Generator().manual_seed(seed)
    p = (torch.randn(num_rows, num_drafts + 1, vocab_size, generator=gen) * 3).softmax(-1)
    q = (torch.randn(num_rows, num_drafts, vocab_size, generator=gen) * 3).softmax(-1)
    noise = window_uniforms(
        torch.arange(num_rows) + seed, torch.full((num_rows,), 9), num_drafts + 1
    )
    return p, q, inverse_cdf(q, noise.draft[:, :num_drafts]), noise


def test_self_draft_is_always_accepted_whole() -> None:
    """p == q bit for bit, up to the largest uniform there is."""
    p, _, _, noise = random_step(0, 2000, 4, 500)
    q = p[:, :4].clone()
    x = inverse_cdf(q, noise.draft[:, :4])
    num = torch.full((2000,), 4)
    for accept in (noise.accept, torch.full_like(noise.accept, 1 - 2.0**-24)):
        accepted, last = rejection(p, q, x, num, accept, noise.recover)
        assert bool((accepted == 4).all())
        assert torch.equal(last, inverse_cdf(p[:, 4], noise.recover[:, 4]))
        lowered, _ = rejection(p * 0.99, q, x, num, accept, noise.recover)
        assert not bool((lowered == 4).all())


def test_one_ulp_apart_is_accepted_and_finite() -> None:
    """The residual is rounding dust; the recovered token still comes from the support of p."""
    p, _, _, noise = random_step(1, 2000, 4, 500)
    p[..., ::7] = 0
    up = torch.rand(2000, 4, 500, generator=torch.Generator().manual_seed(1)) < 0.5
    q = torch.nextafter(p[:, :4], up.float())
    x = inverse_cdf(q, noise.draft[:, :4])
    num = torch.full((2000,), 4)
    accepted, last = rejection(p, q, x, num, noise.accept, noise.recover)
    assert float((accepted == 4).float().mean()) > 0.999
    refusing = torch.full_like(noise.accept, 1.0)
    for a, y in ((accepted, last), rejection(p, q, x, num, refusing, noise.recover)):
        assert bool((p[torch.arange(2000), a, y] > 0).all())


def test_no_residual_mass_draws_from_p() -> None:
    p = torch.tensor([[[0.25, 0.75, 0.0], [1.0, 0.0, 0.0]]]).expand(400, -1, -1)
    noise = window_uniforms(torch.arange(400), torch.zeros(400, dtype=torch.int64), 2)
    x = torch.ones(400, 1, dtype=torch.int64)
    one = torch.ones(400, dtype=torch.int64)
    accepted, last = rejection(p, p[:, :1], x, one, torch.ones(400, 2), noise.recover)
    assert bool((accepted == 0).all())
    assert torch.equal(last, inverse_cdf(p[:, 0], noise.recover[:, 0]))
    assert set(last.tolist()) == {0, 1}


@pytest.mark.parametrize("one_hot", [False, True])
def test_padded_rows_equal_the_same_rows_alone(one_hot: bool) -> None:
    p, q, x, noise = random_step(2, 300, 5, 40)
    num = torch.randint(0, 6, (300,), generator=torch.Generator().manual_seed(2))
    padded = torch.where(torch.arange(5) < num[:, None], x, -1)
    draft_probs = None if one_hot else q
    accepted, last = rejection(p, draft_probs, padded, num, noise.accept, noise.recover)
    assert bool((accepted <= num).all())
    assert {0, 1}.issubset(set((accepted == num).long().tolist()))
    for b in range(300):
        n, row = int(num[b]), slice(b, b + 1)
        solo = rejection(
            p[row, : n + 1],
            None if one_hot else q[row, :n],
            x[row, :n],
            num[row],
            noise.accept[row, : n + 1],
            noise.recover[row, : n + 1],
        )
        assert (int(solo[0]), int(solo[1])) == (int(accepted[b]), int(last[b]))


def test_without_drafts_the_rule_is_plain_sampling() -> None:
    p, _, _, noise = random_step(3, 50, 0, 20)
    none = torch.zeros(50, dtype=torch.int64)
    for q in (None, torch.empty(50, 0, 20)):
        accepted, last = rejection(
            p, q, torch.empty(50, 0, dtype=torch.int64), none, noise.accept, noise.recover
        )
        assert bool((accepted == 0).all())
        assert torch.equal(last, inverse_cdf(p[:, 0], noise.recover[:, 0]))


@pytest.mark.parametrize("q_is_zero", [False, True])
def test_a15_impossible_tokens_are_refused_and_never_emitted(q_is_zero: bool) -> None:
    """A drafted x with p(x) = 0, and q(x) = 0 too, so 0 < 0 decides: refused, and never drawn."""
    p, q, _, noise = random_step(4, 2000, 3, 30)
    x = p[:, :3].argmin(-1)
    p[:, :3] = p[:, :3].scatter(2, x[..., None], 0.0)
    if q_is_zero:
        q = q.scatter(2, x[..., None], 0.0)
    num = torch.full((2000,), 3)
    for draft_probs in (q, None):
        accepted, last = rejection(p, draft_probs, x, num, noise.accept, noise.recover)
        assert bool((accepted == 0).all())
        assert bool((p[:, 0].gather(1, last[:, None]) > 0).all())
    possible = p[:, :3].argmax(-1)  # control: q(x) = 0 but p(x) > 0 is kept, and stays finite
    zero = q.scatter(2, possible[..., None], 0.0)
    accepted, last = rejection(p, zero, possible, num, noise.accept, noise.recover)
    assert bool((accepted == 3).all())
    assert bool(((last >= 0) & (last < 30)).all())


def test_greedy_keeps_the_leading_run_of_equal_tokens() -> None:
    target = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    drafts = torch.tensor([[1, 2, 3], [1, 9, 3], [1, 2, -1], [-1, -1, -1]])
    accepted, last = greedy(target, drafts, torch.tensor([3, 3, 1, 0]))
    assert accepted.tolist() == [3, 1, 1, 0]
    assert last.tolist() == [4, 2, 2, 1]
    empty = torch.empty(4, 0, dtype=torch.int64)
    accepted, last = greedy(target[:, :1], empty, torch.zeros(4, dtype=torch.int64))
    assert (accepted.tolist(), last.tolist()) == ([0] * 4, [1] * 4)


def test_greedy_is_rejection_for_one_hot_p() -> None:
    gen = torch.Generator().manual_seed(5)
    target = torch.randint(0, 3, (500, 5), generator=gen)
    drafts = torch.randint(0, 3, (500, 4), generator=gen)
    num = torch.randint(0, 5, (500,), generator=gen)
    p = torch.nn.functional.one_hot(target, 3).float()
    q = torch.nn.functional.one_hot(drafts, 3).float()
    noise = window_uniforms(torch.arange(500), torch.ones(500, dtype=torch.int64), 5)
    want = greedy(target, drafts, num)
    for draft_probs in (q, None):
        got = rejection(p, draft_probs, drafts, num, noise.accept, noise.recover)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_greedy_acceptance_refuses_a_step_that_samples() -> None:
    p, q, x, noise = random_step(6, 2, 1, 4)
    with pytest.raises(ValueError, match="temperature=0"):
        refuse_sampling(p, q, x, torch.ones(2), noise.accept, noise.recover)


def test_a20_ties_and_mixed_rows() -> None:
    """Logits (1, 1, 0): greedy is index 0 always; beside it temperature 1, and an unset one."""
    greedy_row = SamplingParams(temperature=0, top_k=50)
    others = (SamplingParams(temperature=1.0), SamplingParams(top_k=50))
    sampled: list[set[int]] = [set(), set()]
    for seed in range(40):
        sources = [RowSource(p, [0], 1, seed, (), ()) for p in (greedy_row, *others)]
        rows = SamplingRows.build(sources, 3, "cpu")
        u = window_uniforms(rows.seeds, torch.ones(3, dtype=torch.int64), 3)
        logits = torch.tensor([1.0, 1.0, 0.0]).expand(3, 3, 3)
        probs = to_probs(process_logits(logits, rows, torch.zeros(3, 2).long(), 0), rows)
        drafts = inverse_cdf(probs[:, :2], u.draft[:, :2])
        num = torch.full((3,), 2)
        accepted, last = rejection(probs, probs[:, :2], drafts, num, u.accept, u.recover)
        assert accepted.tolist() == [2, 2, 2]
        assert [*drafts[0].tolist(), int(last[0])] == [0, 0, 0]
        for kind, row in enumerate((1, 2)):
            sampled[kind] |= {*drafts[row].tolist(), int(last[row])}
    assert sampled == [{0, 1, 2}] * 2
