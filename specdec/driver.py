"""Driver: an engine shared by threads. Whoever waits for a request runs the next step for all."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from specdec.config import SamplingParams
from specdec.engine import Engine
from specdec.outputs import Request, RequestOutput
from specdec.stats import SpecStats

ADD_SECONDS = 1e-4  # how often a stepping thread looks whether others have added


@dataclass(frozen=True, slots=True)
class Query:
    """A prompt on its way to the engine."""

    token_ids: list[int]
    params: SamplingParams
    text: str | None = None


class Driver:
    """Guards an engine by one lock, which is free between steps: others add and read then.

    Aborts never wait for the lock, since a finaliser may run in the middle of a step of its own
    thread: they are noted, and carried out by whoever holds or next takes the lock.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = threading.Lock()
        self._to_abort: deque[str] = deque()
        self._adding: deque[None] = deque()  # one entry per thread that wants to add

    def add(self, queries: Sequence[Query]) -> list[Request]:
        """Queue all or, if one cannot be served, none (ValueError names which)."""
        requests: list[Request] = []
        with self._announced(), self._engine_at_rest() as engine:
            try:
                for query in queries:
                    requests.append(engine.add(query.token_ids, query.params, prompt=query.text))
            except BaseException as error:
                for request in requests:
                    engine.abort(request.request_id)
                if not isinstance(error, ValueError):
                    raise
                where = f"prompt {len(requests)}: " if len(queries) > 1 else ""
                raise ValueError(f"{where}{error}") from None
        return requests

    def run(
        self,
        requests: Sequence[Request],
        advance: Callable[[int, SpecStats], None] | None = None,
    ) -> None:
        """Step until all are finished; `advance` hears how many more are, after each step.

        Work per step does not grow with the number of requests: they end about in order, so only
        the first one left is looked at.
        """
        own = {request.request_id for request in requests}
        pending = deque(requests)
        told = 0
        while pending:
            self._let_others_add()
            touched: list[Request] = []
            with self._engine_at_rest() as engine:
                if not pending[0].finished:
                    touched = engine.step()
            while pending and pending[0].finished:
                pending.popleft()
            ended = sum(r.finished and r.request_id in own for r in touched)
            if not pending:
                ended = len(requests) - told  # some ended in other threads' steps
            told += ended
            if advance is not None:
                advance(ended, self.engine.stats)

    def advance(self, request: Request, seen: int) -> tuple[int, RequestOutput]:
        """Step until the request has more than `seen` tokens or is finished."""
        while True:
            self._let_others_add()
            with self._engine_at_rest() as engine:
                count = sum(sample.seq.num_output_tokens for sample in request.samples)
                if count > seen or request.finished:
                    return count, request.output()
                engine.step()

    def abort(self, request_id: str) -> bool:
        """End one request, before the next step at the latest; False if it is unknown or ended."""
        known = self.engine.serves(request_id)
        self._abort([request_id] if known else [])
        return known

    def abort_all(self, requests: Sequence[Request]) -> None:
        """End all of these that still run."""
        self._abort([request.request_id for request in requests if not request.finished])

    def stats(self) -> dict[str, Any]:
        """The engine's counts."""
        with self._engine_at_rest() as engine:
            return engine.stats.as_dict()

    def _abort(self, request_ids: Sequence[str]) -> None:
        self._to_abort.extend(request_ids)
        self._abort_if_free()

    def _abort_if_free(self) -> None:
        """Carry out noted aborts unless somebody holds the lock, who then does it on leaving."""
        while self._to_abort and self._lock.acquire(blocking=False):
            try:
                self._carry_out_aborts()
            finally:
                self._lock.release()

    def _carry_out_aborts(self) -> None:
        while self._to_abort:
            self.engine.abort(self._to_abort.popleft())
        self.engine.take_ended()  # nobody asks for them: requests are watched one by one

    @contextmanager
    def _announced(self) -> Iterator[None]:
        """Say that this thread wants to add: the lock is not fair by itself."""
        self._adding.append(None)
        try:
            yield
        finally:
            self._adding.pop()

    def _let_others_add(self) -> None:
        """Between two steps: new requests join the batch before the next one."""
        while self._adding:
            time.sleep(ADD_SECONDS)

    @contextmanager
    def _engine_at_rest(self) -> Iterator[Engine]:
        """The engine between two steps, for this thread alone."""
        try:
            with self._lock:
                self._carry_out_aborts()
                yield self.engine
        finally:
            self._abort_if_free()  # noted while the lock was held
