"""Driver: an engine shared by threads. Whoever waits for a request runs the next step for all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.config import SamplingParams
from specdec.engine import Engine
from specdec.outputs import Request, RequestOutput
from specdec.stats import SpecStats


@dataclass(frozen=True, slots=True)
class Query:
    """A prompt on its way to the engine."""

    token_ids: list[int]
    params: SamplingParams
    text: str | None = None


class Driver:
    """Guards an engine by one lock, which is free between steps: others add, abort and read
    then.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = threading.Lock()

    def add(self, queries: Sequence[Query]) -> list[Request]:
        """Queue all or, if one cannot be served, none (ValueError names which)."""
        requests: list[Request] = []
        with self._lock:
            try:
                for query in queries:
                    requests.append(
                        self.engine.add(query.token_ids, query.params, prompt=query.text)
                    )
            except ValueError as error:
                for request in requests:
                    self.engine.abort(request.request_id)
                where = f"prompt {len(requests)}: " if len(queries) > 1 else ""
                raise ValueError(f"{where}{error}") from None
        return requests

    def run(
        self,
        requests: Sequence[Request],
        advance: Callable[[int, SpecStats], None] | None = None,
    ) -> None:
        """Step until all are finished; `advance` hears how many more are, after each step."""
        pending = list(requests)
        while pending:
            with self._lock:
                if not all(request.finished for request in pending):
                    self.engine.step()
            left = [request for request in pending if not request.finished]
            if advance is not None:
                advance(len(pending) - len(left), self.engine.stats)
            pending = left

    def advance(self, request: Request, seen: int) -> tuple[int, RequestOutput]:
        """Step until the request has more than `seen` tokens or is finished."""
        while True:
            with self._lock:
                count = sum(sample.seq.num_output_tokens for sample in request.samples)
                if count > max(seen, 0) or request.finished:
                    return count, request.output()
                self.engine.step()

    def abort(self, request_id: str) -> bool:
        """End one request; False if it is unknown or has ended."""
        with self._lock:
            return self.engine.abort(request_id)

    def abort_all(self, requests: Sequence[Request]) -> None:
        """End all of these that still run."""
        with self._lock:
            for request in requests:
                self.engine.abort(request.request_id)

    def stats(self) -> dict[str, Any]:
        """The engine's counts."""
        with self._lock:
            return self.engine.stats.as_dict()
