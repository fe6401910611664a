"""A planted slowdown: a session that takes a known factor longer for everything it computes.

It exists so that a comparison can be seen to find what is there. It never touches results, and the record names it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from harness.engine import Emission, TimedSession
from harness.traces import Traces


class SlowedSession:
    """Wraps a session: each `advance` that brought something is followed by (factor - 1) times its own duration."""

    def __init__(self, session: TimedSession, factor: float) -> None:
        self._session = session
        self._factor = factor

    def now(self) -> float:
        """The session's clock."""
        return self._session.now()

    def submit(self, request: str) -> None:
        """The session's."""
        self._session.submit(request)

    def advance(self, until_s: float | None) -> Sequence[Emission]:
        """The session's, later."""
        begun = time.perf_counter()
        emissions = self._session.advance(until_s)
        if not emissions:
            return emissions
        end = begun + (time.perf_counter() - begun) * self._factor
        while time.perf_counter() < end:  # spins: a sleep would come back late
            pass
        now = self.now()
        return [dataclasses.replace(emission, at_s=now) for emission in emissions]

    def finish(self) -> Traces:
        """The session's."""
        return self._session.finish()
