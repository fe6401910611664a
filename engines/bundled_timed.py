"""Serves requests on the bundled engine by the clock: the session behind `harness.engine.Timed`.

It does not know loads or latencies. Rules: one `advance` is one step, and what came out of it carries the time at
which the step ended; an engine with nothing to do sleeps until the next arrival, never past it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Requests
from dataclasses import dataclass, field

from engines.bundled.engine import Engine
from engines.bundled.request import Request
from engines.bundled.sequence import Sequence
from engines.bundled_adapter import harness_errors
from engines.bundled_traces import Row, write_traces
from engines.bundled_work import prepare
from harness.engine import Emission, Footprint, TimedSession, Work
from harness.errors import EngineError, Unsupported
from harness.request import Request as HarnessRequest
from harness.schedule import Schedule
from harness.traces import Traces

LONGEST_NAP_S = 0.25


class NotByTheClock:
    """A form of the engine that consists of several engine processes, and so cannot serve by the clock.

    It implements `harness.engine.Timed` to refuse by name: those processes are told whole works and answer with whole
    captures, so nobody sees when a token came. `form` is what it is, as settings say it.
    """

    __slots__ = ()
    form: str

    def open_timed(self, requests: Requests[HarnessRequest]) -> TimedSession:  # noqa: ARG002 - refused whatever they are
        """Raises Unsupported."""
        raise self._refusal()

    def footprint(self) -> Footprint:
        """Raises Unsupported."""
        raise self._refusal()

    def _refusal(self) -> Unsupported:
        return Unsupported(f"{self.form}: its engine processes answer whole works, so no token has a time of its own; "
                           "measure one engine of the same configuration without it")  # fmt: skip


@dataclass(slots=True, kw_only=True)
class _Served:
    """One sample under way: how much of it was told already, and when, in seconds from the session's start."""

    sequence: Sequence
    arrival_s: float
    told: int = 0
    first_token_s: float = 0.0
    finish_s: float = 0.0
    later: list[Request] = field(default_factory=list)  # samples that wait for this one


class BundledSession:
    """One timed serving; implements `harness.engine.TimedSession`."""

    def __init__(self, engine: Engine, requests: Requests[HarnessRequest], *, one_by_one: bool) -> None:
        """`one_by_one`: each sample of a request waits for the one before it. Raises NotSupported, RequestError."""
        nobody = Schedule(name="by the clock", arrivals=())
        work = Work(requests=tuple(requests), schedule=nobody, replay="natural", golden={}, logits_digests=False)
        self._engine = engine
        self._prepared = prepare(work, {request.id: request for request in requests})
        for samples in self._prepared.values():
            for sample in samples:
                engine.check(sample)
        self._one_by_one = one_by_one
        self._served: list[_Served] = []
        self._open: list[_Served] = []
        self._began = time.perf_counter()

    def now(self) -> float:
        """Seconds since the session was opened."""
        return time.perf_counter() - self._began

    def submit(self, request: str) -> None:
        """Puts a request in line. Raises EngineError if it is unknown or was submitted before."""
        samples = self._prepared.pop(request, None)
        if samples is None:
            raise EngineError(f"request {request!r}: not opened in this session, or submitted twice")
        if self._one_by_one:
            self._start(samples[0], samples[1:])
        else:
            for sample in samples:
                self._start(sample, [])

    def advance(self, until_s: float | None) -> list[Emission]:
        """One step; without work, sleep towards `until_s`. Raises EngineError."""
        if not self._engine.has_work:
            wait = LONGEST_NAP_S if until_s is None else min(until_s - self.now(), LONGEST_NAP_S)
            if wait > 0:
                time.sleep(wait)
            return []
        with harness_errors():
            self._engine.step()
        return self._collect(self.now())

    def finish(self) -> Traces:
        """The traces so far; the engine is reset. Raises EngineError if pages are still held."""
        rows = [Row(one.sequence, False, one.arrival_s, one.first_token_s, one.finish_s) for one in self._served]
        try:
            with harness_errors():
                self._engine.check_pages()
            return write_traces(self._engine, rows)
        finally:
            self._engine.reset()

    def _start(self, request: Request, later: list[Request]) -> None:
        served = _Served(sequence=self._engine.submit(request), arrival_s=self.now(), later=later)
        self._served.append(served)
        self._open.append(served)

    def _collect(self, now: float) -> list[Emission]:
        """What the step brought, per sample."""
        emissions: list[Emission] = []
        for served in tuple(self._open):
            sequence = served.sequence
            fresh, ended = sequence.generated - served.told, sequence.finish_reason is not None
            if not fresh and not ended:
                continue
            request = sequence.request
            emissions.append(
                Emission(request=request.id, sample=request.sample, tokens=fresh, finished=ended, at_s=now)
            )
            served.first_token_s = served.first_token_s if served.told else now
            served.told += fresh
            if ended:
                self._end(served, now)
        return emissions

    def _end(self, served: _Served, now: float) -> None:
        served.finish_s = now
        self._open.remove(served)
        if served.later:
            self._start(served.later[0], served.later[1:])
