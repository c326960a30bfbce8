"""K from cost: the lookahead that emits most tokens a second, from measured forwards and the
acceptance seen so far.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specdec.stats import SpecStats

MAX_LOOKAHEAD = 8  # the largest K that is chosen
SEEDED_LOOKAHEAD = 3  # of seeded requests: their text must not depend on how fast a machine is
MARGIN = 1.03  # speculation must promise this much over plain decoding
PRIOR_WEIGHT = 64  # drafts that the assumed acceptance counts as


@dataclass(frozen=True, slots=True)
class Prior:
    """What is assumed of a proposer before anything was accepted."""

    hit_rate: float  # share of a sequence's steps in which it drafts at all
    acceptance: float  # chance that the first draft is kept
    decay: float  # the next one's, given that the last was kept

    def by_position(self, count: int) -> np.ndarray:
        """[count] float: chance that the draft at each position is kept."""
        return self.acceptance * self.decay ** np.arange(count)


PRIORS = {
    "draft_model": Prior(1.0, 0.70, 0.75),
    "hybrid": Prior(1.0, 0.70, 0.75),
    "ngram": Prior(0.4, 0.50, 0.70),
}


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a forward by its number of tokens; a line between measured points and beyond."""

    target: dict[int, float]
    draft: dict[int, float]  # empty: drafting costs nothing

    def step(self, num_rows: int, num_drafts: int) -> float:
        """Seconds of one step of `num_rows` sequences that draft `num_drafts` tokens each."""
        total = _at(self.target, num_rows * (num_drafts + 1))
        if num_drafts and self.draft:
            first = _at(self.draft, 2 * num_rows)  # the last two tokens are fed
            total += first + (num_drafts - 1) * _at(self.draft, num_rows)
        return total


def _at(points: dict[int, float], num_tokens: int) -> float:
    known = sorted(points)
    if num_tokens > known[-1] and len(known) > 1:
        before, last = known[-2:]
        slope = (points[last] - points[before]) / (last - before)
        return points[last] + max(slope, 0.0) * (num_tokens - last)
    return float(np.interp(num_tokens, known, [points[n] for n in known]))


class LookaheadChooser:
    """K by the number of decoding sequences. It looks at counts of whole steps, never at a draft,
    so what is emitted keeps the target's distribution.
    """

    def __init__(self, costs: StepCosts, prior: Prior, max_lookahead: int = MAX_LOOKAHEAD) -> None:
        self._costs = costs
        self._prior = prior
        self._max = max_lookahead
        self._kept = prior.by_position(max_lookahead)
        self._chosen: dict[int, int] = {}

    def best(self, num_rows: int) -> int:
        """The K of steps of `num_rows` sequences."""
        if num_rows not in self._chosen:
            self._chosen[num_rows] = self._choose(num_rows)
        return self._chosen[num_rows]

    def summary(self) -> str:
        """The choice in words, for small and large batches."""
        told = ", ".join(f"{self.best(n)} at {n}" for n in (1, 8, 32))
        return f"by measured cost: K = {told} sequences"

    def speedup(self, num_rows: int, num_drafts: int) -> float:
        """Expected tokens a second over plain decoding's."""
        hit = self._prior.hit_rate
        any_hit = 1 - (1 - hit) ** num_rows  # one row's drafts make the whole batch wider
        plain = self._costs.step(num_rows, 0)
        cost = any_hit * self._costs.step(num_rows, num_drafts) + (1 - any_hit) * plain
        return float((1 + hit * self._kept[:num_drafts].sum()) * plain / cost)

    def learn(self, stats: SpecStats) -> None:
        """Take over the acceptance seen so far."""
        count = min(self._max, len(stats.drafted_by_position))
        drafted = np.zeros(self._max)
        accepted = np.zeros(self._max)
        drafted[:count] = stats.drafted_by_position[:count]
        accepted[:count] = stats.accepted_by_position[:count]
        prior = self._prior.by_position(self._max)
        self._kept = (accepted + PRIOR_WEIGHT * prior) / (drafted + PRIOR_WEIGHT)
        self._chosen.clear()

    def _choose(self, num_rows: int) -> int:
        speedups = [self.speedup(num_rows, k) for k in range(1, self._max + 1)]
        best = int(np.argmax(speedups))
        return best + 1 if speedups[best] >= MARGIN else 0
