"""One engine process under measurement: starts an arm, captures its untimed reference, serves loads by the clock.

It does not know rounds or statistics. Rules: every arm starts in a process of its own; start-up time is from the
process's creation to its word that it serves; a failure carries the engine's reason and its log's tail.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from harness.canonical import digest
from harness.corpus.json_lines import request_json
from harness.cost.arm import Arm
from harness.cost.audit import Answer, Reference, reference_key
from harness.cost.load import Load, load_json
from harness.cost.serve import tokens_only
from harness.cost.timing import Timing, read_timings
from harness.digest import judged_keys, request_digests
from harness.engine import Adapter, Field, Footprint, Scalar
from harness.errors import EngineError, SamebitsError, Unsupported
from harness.lifetime import Event, LifetimeError, LifetimeProcess
from harness.request import Request
from harness.schedules import build_schedule
from harness.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What an engine process said when it was ready."""

    startup_s: float
    resolved: dict[str, Scalar]
    fields: tuple[Field, ...]


class Bench(Protocol):
    """An engine that can be measured."""

    @property
    def started(self) -> Started:
        """What it settled on, and how long that took."""

    def serve(self, load: Load) -> tuple[Timing, ...]:
        """Serves a load by the clock. Raises EngineError, Unsupported."""

    def footprint(self) -> Footprint:
        """Its memory as of the last serving."""

    def reference(self, ids: Sequence[str]) -> Reference:
        """The untimed answers to requests, each served alone. Raises EngineError."""


OpenBench = Callable[[Arm, str], AbstractContextManager[Bench]]  # (arm, a name for its log)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is measured: an engine with a model, and the requests it is given."""

    adapter: Adapter
    model: str
    requests: tuple[Request, ...]
    folder: Path
    session: str
    deadline_s: float


class ProcessBench:
    """A bench over a child process."""

    def __init__(self, process: LifetimeProcess, subject: Subject, arm: Arm, name: str, begun: float) -> None:
        self._process, self._subject, self._arm, self._name = process, subject, arm, name
        self._footprint = Footprint(peak_memory_bytes=None, peak_device_bytes=None, kv_capacity_tokens=None)
        self._servings = 0
        event = process.ask(
            {"do": "start", "engine": subject.adapter.name, "model": subject.model, "settings": dict(arm.settings),
             "store": str(self._store.folder.resolve()), "session": subject.session}, subject.deadline_s,
        )  # fmt: skip
        rows = cast("list[dict[str, object]]", event["subject"])
        self._started = Started(
            startup_s=time.perf_counter() - begun, resolved=cast("dict[str, Scalar]", event["resolved"]),
            fields=tuple(Field(**row) for row in rows),  # type: ignore[arg-type]
        )  # fmt: skip

    @property
    def started(self) -> Started:
        """What it settled on, and how long that took."""
        return self._started

    def serve(self, load: Load) -> tuple[Timing, ...]:
        """Serves a load by the clock. Raises LifetimeError, StoreError."""
        file = self._subject.folder / "timings" / f"{self._name}-{self._servings:02d}.parquet"
        self._servings += 1
        wanted = set(load.requests)
        requests = [request_json(request) for request in self._subject.requests if request.id in wanted]
        event = self._ask({"do": "time", "requests": requests, "load": load_json(load), "slowed": self._arm.slowed,
                           "file": str(file.resolve())})  # fmt: skip
        self._footprint = Footprint(**cast("dict[str, int | None]", event["footprint"]))
        return read_timings(file, str(event["sha256"]))

    def footprint(self) -> Footprint:
        """Its memory as of the last serving."""
        return self._footprint

    def reference(self, ids: Sequence[str]) -> Reference:
        """The untimed answers to requests, each served alone. Raises LifetimeError, StoreError."""
        wanted = set(ids)
        requests = [request for request in self._subject.requests if request.id in wanted]
        schedule = build_schedule("alone", [request.id for request in requests])
        case = digest([self._name, [request.id for request in requests]])[:16]
        self._ask({"do": "capture", "case": case, "requests": [request_json(request) for request in requests],
                   "schedule": dataclasses.asdict(schedule), "replay": "natural", "golden": {},
                   "logits_digests": False, "work": {}, "prelude": [], "cache": None, "reset": False})  # fmt: skip
        traces = self._store.read(case).traces
        tokens = tokens_only(traces)
        return {
            reference_key(key.id, key.sample): Answer(judged=judged, tokens_only=tokens[key])
            for key, judged in zip(judged_keys(traces), request_digests(traces), strict=True)
        }

    @property
    def _store(self) -> Store:
        return Store(self._subject.folder / "references" / self._arm.name)

    def _ask(self, command: Event) -> Event:
        return self._process.ask(command, self._subject.deadline_s)


def open_processes(subject: Subject) -> OpenBench:
    """Benches over child processes of a subject."""

    @contextmanager
    def open_bench(arm: Arm, name: str) -> Iterator[Bench]:
        environment = subject.adapter.environment(dict(arm.settings))
        log = subject.folder / "logs" / f"{name}.log"
        begun = time.perf_counter()
        try:
            with LifetimeProcess(environment, log) as process:
                yield ProcessBench(process, subject, arm, name, begun)
        except LifetimeError as error:
            raise _error(error, arm) from error

    return open_bench


def _error(error: LifetimeError, arm: Arm) -> SamebitsError:
    kind = Unsupported if error.failure.kind == "unsupported" else EngineError
    return kind("\n".join([f"arm {arm.name!r} ({arm.label}): {error.failure.message}", *error.failure.log_tail]))
