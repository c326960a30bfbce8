"""Counters of speculative decoding, with their definitions in one place."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

DEFINITIONS = {
    "num_target_steps": "target forwards counted once per sequence that decoded in them",
    "num_draft_tokens": "draft tokens really proposed to the target (an n-gram miss proposes 0)",
    "num_accepted_tokens": "draft tokens that the acceptance rule kept",
    "num_verified_tokens": (
        "tokens the rule released: accepted + one recovered or bonus token per target step"
    ),
    "num_emitted_tokens": (
        "verified tokens less those cut behind an end token, a stop string or max_tokens"
    ),
    "acceptance_rate": "num_accepted_tokens / num_draft_tokens",
    "acceptance_by_position": (
        "share of the drafts proposed at window position i (0-based) that were kept"
    ),
    "mean_accepted_length": "num_emitted_tokens / num_target_steps, the bonus token included",
    "num_steps": "engine steps, prefill and decode together",
    "num_requests": "requests that were queued",
    "num_finished": "requests that ended, failed and aborted ones included",
    "num_failed": "requests that ended with an error",
    "num_preemptions": "sequences that gave their blocks back and are computed again",
    "num_prompt_tokens": (
        "tokens prefilled by the target: prompts, and what a preempted sequence had already"
    ),
    "num_prefix_hit_tokens": "tokens whose KV came from the prefix cache",
    "seconds": (
        "wall-clock time per phase; on a GPU, launches are asynchronous and waits fall to `read`"
    ),
}


@dataclass(slots=True)
class SpecStats:
    """Counts of one request or of a whole engine; see DEFINITIONS."""

    num_target_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_verified_tokens: int = 0
    num_emitted_tokens: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)

    def record(self, num_drafted: int, num_accepted: int, num_emitted: int) -> None:
        """Count one target step of one sequence."""
        self.num_target_steps += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        self.num_verified_tokens += num_accepted + 1
        self.num_emitted_tokens += num_emitted
        if num_drafted == 0:
            return
        missing = num_drafted - len(self.drafted_by_position)
        self.drafted_by_position += [0] * missing
        self.accepted_by_position += [0] * missing
        for position in range(num_drafted):
            self.drafted_by_position[position] += 1
            self.accepted_by_position[position] += position < num_accepted

    @property
    def acceptance_rate(self) -> float:
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def mean_accepted_length(self) -> float:
        return _ratio(self.num_emitted_tokens, self.num_target_steps)

    @property
    def acceptance_by_position(self) -> list[float]:
        pairs = zip(self.accepted_by_position, self.drafted_by_position, strict=True)
        return [_ratio(accepted, drafted) for accepted, drafted in pairs]

    def as_dict(self) -> dict[str, Any]:
        """All counts and rates, ready for JSON."""
        return {name: getattr(self, name) for name in DEFINITIONS if hasattr(self, name)}


@dataclass(slots=True)
class EngineStats(SpecStats):
    """A whole engine's counts, prefill and time included."""

    num_steps: int = 0
    num_requests: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the wall-clock time of a block to a phase: schedule, prefill, draft, verify, read,
        commit.
        """
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def as_dict(self) -> dict[str, Any]:
        """All counts and rates, ready for JSON; seconds are rounded."""
        rounded = {name: round(value, 6) for name, value in self.seconds.items()}
        return {**SpecStats.as_dict(self), "seconds": rounded}


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
