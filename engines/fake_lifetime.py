"""The fake engine while it runs: one lifetime, works one after another, its fault acting where the settings say."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from engines.fake_faults import Target, act_after, act_during, is_batched
from engines.fake_model import DEFINITION
from engines.fake_names import ONE_AT_A_TIME
from engines.fake_run import Limits, Loop
from engines.fake_run import Sequence as FakeSequence
from engines.fake_timed import FakeSession
from harness.engine import Field, Footprint, Progress, Scalar, TimedSession, Work
from harness.errors import EngineError, Unsupported
from harness.request import Request
from harness.schedule import Arrival, Schedule
from harness.traces import Traces

T = TypeVar("T", str, int, bool)


class FakeLifetime:
    """A started fake engine; implements `harness.engine.Engine`."""

    def __init__(self, defaults: Mapping[str, Scalar], configuration: Mapping[str, Scalar]) -> None:
        """`configuration` goes over `defaults`. Raises EngineError for a name that is not among them."""
        unknown = sorted(set(configuration) - set(defaults))
        if unknown:
            raise EngineError(f"engine 'fake' has no setting {unknown[0]!r}; it has {', '.join(sorted(defaults))}")
        self._settings = {**defaults, **configuration}
        self._fault = self._setting("fault", str)
        self._target = Target(self._setting("fault_request", str), self._setting("fault_position", int))
        self._always = self._setting("fault_when", str) == "always"
        self._first: Traces | None = None
        self._most_running = 0

    def resolved(self) -> Mapping[str, Scalar]:
        """The settings; nothing is derived."""
        return dict(sorted(self._settings.items()))

    def observed(self) -> Mapping[str, Scalar]:
        """What the runs so far showed."""
        return {
            "invariant": self._setting("invariant", bool),
            "max_running": self._most_running,
            "threads": self._setting("threads", int),
        }

    def fingerprint(self) -> tuple[Field, ...]:
        """The hash's definition stands for model and arithmetic."""
        return (
            Field(name="arithmetic.name", value="hash", field_class="identity", source="fake engine"),
            Field(name="arithmetic.definition", value=DEFINITION, field_class="identity", source="fake engine"),
            Field(name="arithmetic.numpy", value=np.__version__, field_class="identity", source="numpy"),
        )

    def generate(self, work: Work, progress: Progress) -> Traces:
        """Runs a work, with the fault. Raises EngineError, Unsupported."""
        cancelled = [one.request for one in work.schedule.arrivals if one.cancel_after_tokens is not None]
        if cancelled:
            raise Unsupported(f"request {cancelled[0]!r} is to be cancelled; the fake engine lets everything finish")
        if self._fault == "copy" and self._first is not None:
            return self._first
        traces = self._spoil(Loop(work, self._limits(), progress, self._after_step).run())
        self._first = self._first or traces
        return traces

    def open_timed(self, requests: Sequence[Request]) -> TimedSession:
        """Serves by the clock, with the fault. Raises EngineError, Unsupported."""
        arrivals = tuple(Arrival(request=request.id) for request in requests)
        schedule = Schedule(name="by the clock", arrivals=arrivals)
        work = Work(requests=tuple(requests), schedule=schedule, replay="natural", golden={}, logits_digests=False)
        loop = Loop(work, self._limits(), lambda _requests, _tokens: None, self._after_step)
        return FakeSession(loop, timer_us=self._setting("timer_us", int), spoil=self._spoil)

    def footprint(self) -> Footprint:
        """Nothing is held."""
        return Footprint(peak_memory_bytes=None, peak_device_bytes=None, kv_capacity_tokens=None)

    def stop(self) -> None:
        """Nothing is held."""

    def _limits(self) -> Limits:
        seats = 1 if self._fault in ONE_AT_A_TIME else self._setting("max_num_seqs", int)
        return Limits(seats=seats, tokens=self._setting("max_num_batched_tokens", int), salt=self._salt())

    def _spoil(self, honest: Traces) -> Traces:
        running = dict(honest.counters)["max_running"]
        self._most_running = max(self._most_running, running)
        acts = self._always or running > 1 or self._fault in ONE_AT_A_TIME
        seats = self._setting("max_num_seqs", int)
        return act_after(self._fault, self._target, honest, seats) if acts else honest

    def _after_step(self, sequences: list[FakeSequence]) -> None:
        if self._always or is_batched(sequences):
            act_during(self._fault, self._target, sequences)

    def _salt(self) -> int | None:
        """What taints results beside the company: None for nothing at all, for results that follow the request."""
        if self._fault == "noise":
            return int.from_bytes(os.urandom(7), "little")
        if self._setting("invariant", bool):
            return None
        return self._setting("threads", int) * 1_000_003 + self._setting("tuning", int)

    def _setting(self, name: str, kind: type[T]) -> T:
        value = self._settings[name]
        if not isinstance(value, kind):
            raise EngineError(f"setting {name!r}: expected {kind.__name__}, got {value!r}")
        return value
