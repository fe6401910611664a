"""Asynchronous scheduling: the next step is scheduled on a second thread while the first computes this one.

It does not know what a step computes. Rules: the scheduler is touched by one thread at a time; a step's results are
taken in before the next one starts, so a plan only names tokens that exist by then; what ended or left meanwhile is
dropped from the plan, and the scheduler completes it with what hung on the results; how long both threads worked at the
same time is measured, not assumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from engines.bundled.logits import StepLogits
from engines.bundled.scheduler import Scheduler, Slice


@dataclass(frozen=True, slots=True)
class _Span:
    """From when to when somebody worked, in nanoseconds of a monotonic clock."""

    begun: int
    ended: int

    def overlap(self, other: _Span) -> int:
        """Nanoseconds that lie in both."""
        return max(0, min(self.ended, other.ended) - max(self.begun, other.begun))


class Ahead:
    """Holds the plan for the next step, and how much scheduling was hidden behind steps."""

    def __init__(self, scheduler: Scheduler) -> None:
        """The thread is made with the first step."""
        self.overlapped_steps = 0  # steps during which the next one was scheduled, by the clock
        self.overlap_ns = 0
        self.served_steps = 0  # the same since the engine started
        self.planned_steps = 0  # steps that ran as they were planned ahead, since the engine started
        self._scheduler = scheduler
        self._plan: list[Slice] = []
        self._pool = ThreadPoolExecutor(1, "scheduler")

    def take(self) -> list[Slice]:
        """The planned step without sequences that ended or left since; empty if nothing was planned."""
        plan, self._plan = self._plan, []
        kept = [piece for piece in plan if piece.sequence in self._scheduler.running]
        self.planned_steps += bool(kept)
        return kept

    def run(self, forward: Callable[[], StepLogits], slices: list[Slice]) -> StepLogits:
        """What `forward` returns; meanwhile the step after `slices` is planned."""
        planning = self._pool.submit(self._make_plan, slices)
        begun = time.perf_counter_ns()
        try:
            return forward()
        finally:
            span = _Span(begun, time.perf_counter_ns())
            self._count(span.overlap(planning.result()))

    def reset(self) -> None:
        """Drops the plan and the counters of one work."""
        self._plan = []
        self.overlapped_steps = self.overlap_ns = 0

    def close(self) -> None:
        """Ends the thread."""
        self._pool.shutdown()

    def drop_plan(self) -> None:
        """After a step that raised: everything is scheduled anew."""
        self._plan = []

    def _make_plan(self, slices: list[Slice]) -> _Span:
        begun = time.perf_counter_ns()
        self._plan = self._scheduler.schedule_ahead(slices)
        return _Span(begun, time.perf_counter_ns())

    def _count(self, overlap: int) -> None:
        self.overlap_ns += overlap
        self.overlapped_steps += overlap > 0
        self.served_steps += overlap > 0
