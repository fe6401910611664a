"""The fake engine serving by the clock: the real one, or a scripted one that makes every time a known number.

It does not know loads or latencies. Rules: on the scripted clock a step takes what its tokens take and nothing else
takes any time; with nothing to do the clock moves to the next arrival.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from engines.fake_run import Loop, Sequence
from harness.engine import Emission
from harness.errors import EngineError
from harness.schedule import Arrival
from harness.traces import Traces

STEP_TOKENS = 4  # tokens a step takes beside its own, so that batching pays
LONGEST_NAP_S = 0.05


class FakeSession:
    """One timed serving; implements `harness.engine.TimedSession`."""

    def __init__(self, loop: Loop, *, timer_us: int, spoil: Callable[[Traces], Traces]) -> None:
        """`timer_us` microseconds per token on a scripted clock, 0 for the real one; `spoil` is the fault."""
        self._loop = loop
        self._timer_s = timer_us * 1e-6
        self._spoil = spoil
        self._scripted = 0.0
        self._began = time.perf_counter()
        self._told: dict[tuple[str, int], int] = {}

    def now(self) -> float:
        """Seconds since the session was opened."""
        return self._scripted if self._timer_s else time.perf_counter() - self._began

    def submit(self, request: str) -> None:
        """Puts a request in line. Raises EngineError if it is unknown or was submitted before."""
        if request not in self._loop.requests or (request, 0) in self._told:
            raise EngineError(f"request {request!r}: not opened in this session, or submitted twice")
        for sample in range(self._loop.requests[request].sampling.n):
            self._told[request, sample] = 0
        self._loop.admit(Arrival(request=request))

    def advance(self, until_s: float | None) -> list[Emission]:
        """One step; without work, on to the next arrival."""
        if not (self._loop.waiting or self._loop.running):
            self._wait(until_s)
            return []
        open_before = [one for one in self._loop.sequences if one.finish_reason is None]
        tokens = self._loop.run_step()
        self._scripted += (STEP_TOKENS + tokens) * self._timer_s
        now = self.now()
        return [emission for one in open_before if (emission := self._tell(one, now)) is not None]

    def finish(self) -> Traces:
        """The traces, with the fault."""
        return self._spoil(self._loop.traces())

    def _tell(self, sequence: Sequence, now: float) -> Emission | None:
        key = (sequence.request.id, sequence.sample)
        fresh, ended = len(sequence.positions) - self._told[key], sequence.finish_reason is not None
        self._told[key] += fresh
        if not fresh and not ended:
            return None
        return Emission(request=key[0], sample=key[1], tokens=fresh, finished=ended, at_s=now)

    def _wait(self, until_s: float | None) -> None:
        if self._timer_s:
            self._scripted = max(self._scripted, until_s or self._scripted)
        elif (wait := LONGEST_NAP_S if until_s is None else min(until_s - self.now(), LONGEST_NAP_S)) > 0:
            time.sleep(wait)
