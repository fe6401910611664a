"""Hands out a schedule's arrivals as an engine's steps and requests move on. It knows no engine.

Rules: requests that are due together come in the order of the schedule; a request that finishes short of
`after_tokens` releases whoever waits for that many of its tokens, for they will never come; when nothing
runs, the step counter moves on to the next arrival's step; a schedule that can never complete is an error
that says who waits for whom.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from harness.errors import EngineError
from harness.schedule import Arrival, Schedule


class Standing(NamedTuple):
    """How far a submitted request has come."""

    generated: int
    finished: bool


class Arrivals:
    """The arrivals still to come, and which of them are due."""

    def __init__(self, schedule: Schedule, requests: Collection[str]) -> None:
        """`requests` are the ids that exist. Raises EngineError for a schedule that can never complete."""
        check_schedule(schedule, requests)
        self._name = schedule.name
        self._pending = list(schedule.arrivals)

    @property
    def pending(self) -> bool:
        """True while an arrival is still to come."""
        return bool(self._pending)

    def take_due(self, step: int, standings: Mapping[str, Standing]) -> list[Arrival]:
        """The arrivals due once `step` steps were run, in the order of the schedule; each is handed out once."""
        due = [arrival for arrival in self._pending if _is_due(arrival, step, standings)]
        self._pending = [arrival for arrival in self._pending if arrival not in due]
        return due

    def next_step(self) -> int:
        """The least step at which an arrival is due by its step alone; for an engine with nothing to run.

        Raises EngineError if every pending arrival waits for a request, since none runs that could release
        it.
        """
        steps = [arrival.at_step for arrival in self._pending if arrival.after is None]
        if not steps:
            first = self._pending[0]
            msg = f"schedule {self._name!r}: nothing runs and {first.request!r} still waits for {first.after!r}"
            raise EngineError(msg)
        return min(steps)


def check_schedule(schedule: Schedule, requests: Collection[str]) -> None:
    """Raises EngineError, naming requests, unless each is scheduled once and every wait can end."""
    names = [arrival.request for arrival in schedule.arrivals]
    twice = sorted({name for name in names if names.count(name) > 1})
    faults = [f"{name!r} arrives more than once" for name in twice]
    faults += [f"{name!r} arrives but there is no such request" for name in sorted(set(names) - set(requests))]
    faults += [f"request {name!r} never arrives" for name in sorted(set(requests) - set(names))]
    faults += [
        f"{arrival.request!r} waits for {arrival.after!r}, which never arrives"
        for arrival in schedule.arrivals
        if arrival.after is not None and arrival.after not in names
    ]
    faults += [f"{name!r} waits for itself in the end" for name in _in_cycles(schedule)]
    if faults:
        msg = f"schedule {schedule.name!r} can never complete: " + "; ".join(faults[:5])
        raise EngineError(msg)


def _in_cycles(schedule: Schedule) -> list[str]:
    """Requests whose chain of waits never ends, in order."""
    waits = {arrival.request: arrival.after for arrival in schedule.arrivals}
    return sorted(name for name in waits if _returns(name, waits))


def _returns(name: str, waits: Mapping[str, str | None]) -> bool:
    seen: set[str] = set()
    current: str | None = waits[name]
    while current is not None and current not in seen:
        if current == name:
            return True
        seen.add(current)
        current = waits.get(current)
    return False


def _is_due(arrival: Arrival, step: int, standings: Mapping[str, Standing]) -> bool:
    if arrival.after is None:
        return arrival.at_step <= step
    standing = standings.get(arrival.after)
    if standing is None:
        return False
    return standing.finished or (arrival.after_tokens is not None and standing.generated >= arrival.after_tokens)
