"""Serves one load on a timed session and writes down when each token came.

It does not know engines, arms or statistics. Rules: in an open loop every request is handed over as soon as it is due
and the session lets us, and its latency counts from when it was due (no coordinated omission: a stall delays nobody
unnoticed); in a closed loop it is due when a seat becomes free; a load ends when every sample of every request has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.cost.load import Load
from harness.engine import Emission, TimedSession
from harness.errors import EngineError
from harness.request import Request


@dataclass(slots=True, kw_only=True)
class Clocked:
    """One sample of a request: when it was due, handed over, and when each of its tokens came. Session seconds."""

    request: str
    sample: int
    due_s: float
    submitted_s: float
    finish_s: float | None = None
    token_s: list[float] = field(default_factory=list)


def drive(session: TimedSession, load: Load, requests: Sequence[Request]) -> list[Clocked]:
    """Serves the load to its end; `requests` are its copies. Raises EngineError for tokens that nobody asked for."""
    run = _Run(session, load, requests)
    while run.pending or run.open:
        run.submit_due()
        run.note(session.advance(run.next_due()))
    return list(run.clocked.values())


class _Run:
    def __init__(self, session: TimedSession, load: Load, requests: Sequence[Request]) -> None:
        self.session = session
        self.seats = load.concurrency
        self.samples = {request.id: request.sampling.n for request in requests}
        due = load.due_s if load.due_s is not None else (None,) * len(load.requests)
        self.pending = deque(zip(load.timed_ids, due, strict=True))
        self.open: dict[str, int] = {}  # request to samples that are not over
        self.clocked: dict[tuple[str, int], Clocked] = {}

    def submit_due(self) -> None:
        """Hands over what is due; in a closed loop, what has a seat."""
        while self.pending:
            name, due = self.pending[0]
            now = self.session.now()
            if due is None and self.seats is not None and len(self.open) >= self.seats:
                return
            if due is not None and due > now:
                return
            self.pending.popleft()
            self.session.submit(name)
            self.open[name] = self.samples[name]
            for sample in range(self.samples[name]):
                self.clocked[name, sample] = Clocked(
                    request=name, sample=sample, due_s=now if due is None else due, submitted_s=now
                )

    def next_due(self) -> float | None:
        """When the next arrival is; None when none has a time."""
        return self.pending[0][1] if self.pending else None

    def note(self, emissions: Sequence[Emission]) -> None:
        """Writes down what came."""
        for emission in emissions:
            clocked = self.clocked.get((emission.request, emission.sample))
            if clocked is None or clocked.finish_s is not None:
                raise EngineError(f"request {emission.request!r}, sample {emission.sample}: tokens came for it "
                                  "though it was not submitted or is over")  # fmt: skip
            clocked.token_s += [emission.at_s] * emission.tokens
            if emission.finished:
                clocked.finish_s = emission.at_s
                self.open[emission.request] -= 1
                if not self.open[emission.request]:
                    del self.open[emission.request]
