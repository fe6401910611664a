"""The engine's thread: takes requests while it runs, steps, and hands out what each step brought.

It does not know HTTP, text or asyncio. Rules: one thread alone touches the engine; a caller never waits for it;
requests of one job go in together; every job ends with one last event: each of its requests finished, or a failure
that says why; what is cancelled gives its pages back before the next step.

    submit --queue--> [ take commands | step | hand out ] --sink--> events
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from engines.bundled.engine import Engine
from engines.bundled.errors import BundledError, ComputeError
from engines.bundled.request import Request
from engines.bundled.sequence import FinishReason, Position, Sequence
from engines.serve.counts import Totals

FailureKind = Literal["engine", "shutdown"]


class Delta(NamedTuple):
    """What a step brought one request of a job."""

    choice: int  # the request's number in its job
    positions: tuple[Position, ...]
    finish: FinishReason | None  # None while it goes on
    cached: int = 0  # prompt tokens that came from the prefix cache


class Failed(NamedTuple):
    """The job's last event when it did not finish."""

    kind: FailureKind
    message: str


Event = Delta | Failed
Sink = Callable[[Event], None]


@dataclass(slots=True, eq=False)
class Job:
    """Requests that one HTTP request stands for, and where their events go (called in the engine's thread)."""

    requests: tuple[Request, ...]
    sink: Sink
    sequences: list[Sequence] = field(default_factory=list)
    handed_out: list[int] = field(default_factory=list)  # positions per sequence

    @property
    def finished(self) -> bool:
        """True once every sequence ended and was handed out."""
        return all(
            sequence.finish_reason is not None and count == sequence.generated
            for sequence, count in zip(self.sequences, self.handed_out, strict=True)
        )

    def deltas(self) -> Iterator[Delta]:
        """What is new since the last call, in the order of the requests."""
        for index, (sequence, count) in enumerate(zip(self.sequences, self.handed_out, strict=True)):
            if sequence.generated > count:
                self.handed_out[index] = sequence.generated
                positions = tuple(sequence.positions[count:])
                yield Delta(index, positions, sequence.finish_reason, sequence.cached_tokens)


class _Submit(NamedTuple):
    job: Job


class _Cancel(NamedTuple):
    job: Job


class _CancelAll(NamedTuple):
    message: str


class _Stop(NamedTuple):
    pass


_Command = _Submit | _Cancel | _CancelAll | _Stop


class Bridge:
    """Owns one engine and the thread that drives it."""

    def __init__(self, engine: Engine) -> None:
        """The engine is the thread's from `start` on; nobody else may call it."""
        self._engine = engine
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._jobs: list[Job] = []
        self._outbox: list[tuple[Sink, Event]] = []
        self._totals = Totals()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopped = False
        self.counts = self._totals.count(engine)  # replaced whole after every step; read it from any thread
        self.broken: str | None = None  # why the engine can serve no more

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after the step that runs; jobs still there fail. False if it is not over in time."""
        self._commands.put(_Stop())
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, requests: tuple[Request, ...], sink: Sink) -> Job:
        """Puts requests in line; they passed `check_request`. Events come to `sink`, the last one marked."""
        job = Job(requests, sink)
        self._commands.put(_Submit(job))
        return job

    def cancel(self, job: Job) -> None:
        """Takes a job out; no event follows the step that runs. Nothing happens if it is over."""
        self._commands.put(_Cancel(job))

    def cancel_all(self, message: str) -> None:
        """Ends every job with a failure that says `message`."""
        self._commands.put(_CancelAll(message))

    def _run(self) -> None:
        while not self._stopped:
            self._take_commands()
            if self._engine.has_work and not self._stopped:
                self._step()
            self._deliver()

    def _deliver(self) -> None:
        """Counts first: whoever has an answer finds it counted."""
        self.counts = self._totals.count(self._engine)
        for sink, event in self._outbox:
            sink(event)
        self._outbox.clear()

    def _take_commands(self) -> None:
        """Waits for a command if there is nothing else to do, then takes all that are there."""
        commands = [] if self._engine.has_work else [self._commands.get()]
        while not self._commands.empty():
            commands.append(self._commands.get())
        for command in commands:
            self._obey(command)

    def _obey(self, command: _Command) -> None:
        match command:
            case _Submit(job):
                self._admit(job)
            case _Cancel(job):
                self._drop(job)
            case _CancelAll(message):
                self._fail_all("shutdown", message)
            case _Stop():
                self._fail_all("shutdown", "the server stopped")
                self._stopped = True

    def _admit(self, job: Job) -> None:
        if self.broken is not None:
            self._outbox.append((job.sink, Failed("engine", self.broken)))
            return
        self._jobs.append(job)
        try:
            for request in job.requests:
                job.sequences.append(self._engine.submit(request))
                job.handed_out.append(0)
        except BundledError as error:
            self._drop(job)
            self._outbox.append((job.sink, Failed("engine", str(error))))
            return
        self._totals.admit(job.sequences)

    def _step(self) -> None:
        try:
            self._engine.step()
        except ComputeError as error:
            self._blame(error)
        except Exception as error:  # noqa: BLE001 - the engine boundary: whoever waits must hear of it
            self.broken = f"the engine stopped: {type(error).__name__}: {error}"
            self._engine.reset()
            self._fail_all("engine", self.broken)
        self._totals.step(self._engine)
        for job in list(self._jobs):
            self._hand_out(job)

    def _blame(self, error: ComputeError) -> None:
        """The request at fault ends, the others are recomputed; without one at fault all end."""
        guilty = [job for job in self._jobs if any(one.id == error.request_id for one in job.requests)]
        self._engine.recover()
        for job in guilty or list(self._jobs):
            self._fail(job, "engine", str(error))

    def _hand_out(self, job: Job) -> None:
        for delta in job.deltas():
            self._totals.generate(job.sequences[delta.choice], len(delta.positions))
            self._outbox.append((job.sink, delta))
        if job.finished:
            self._jobs.remove(job)

    def _drop(self, job: Job) -> None:
        """Gives a job's pages back. One that is over, or was never admitted, is no error."""
        if job not in self._jobs:
            return
        self._jobs.remove(job)
        unfinished = [sequence for sequence in job.sequences if sequence.finish_reason is None]
        for name in dict.fromkeys(request.id for request in job.requests):
            self._engine.abort(name)
        self._totals.abort(unfinished)

    def _fail_all(self, kind: FailureKind, message: str) -> None:
        for job in list(self._jobs):
            self._fail(job, kind, message)

    def _fail(self, job: Job, kind: FailureKind, message: str) -> None:
        self._drop(job)
        self._outbox.append((job.sink, Failed(kind, message)))
