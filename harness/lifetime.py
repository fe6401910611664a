"""Runs one engine process: starts it, hands it cases, watches its deadline, ends it. The parent's side of `worker`.

It does not know cells or verdicts. Rules: a crash, a hang and a refusal each become a `Failure` with the log's tail;
the process is a group of its own and is always ended; nothing it prints reaches our terminal.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, Self, cast

TAIL_LINES = 20
GRACE_S = 5.0
DEADLINE_S = 900.0  # for one case, and for starting an engine, unless the command line says otherwise
Event = Mapping[str, object]
Kind = Literal["error", "unsupported"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a case has no capture: the engine's reason, and the last lines of its log."""

    kind: Kind
    message: str
    log_tail: tuple[str, ...]


class LifetimeError(Exception):
    """The process failed; carries the Failure. `dead` says whether the process is gone."""

    def __init__(self, failure: Failure, *, dead: bool) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.dead = dead


class LifetimeProcess:
    """One engine process. Use as a context manager; leaving it ends the process group."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: IO[bytes] | None = None
        self._buffer = b""

    def __enter__(self) -> Self:
        read, write = os.pipe()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            command = [sys.executable, "-P", "-m", "harness.worker", str(write)]
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env={**os.environ, **self._environment},
                pass_fds=(write,), start_new_session=True,
            )  # fmt: skip
        os.close(write)
        self._answers = os.fdopen(read, "rb", buffering=0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(patiently=kind is None)
        if self._answers is not None:
            self._answers.close()

    @property
    def pid(self) -> int:
        """The process id, which is also its group's."""
        return self._running().pid

    def ask(
        self,
        command: Mapping[str, object],
        deadline_s: float,
        progress: Callable[[Event], None] | None = None,
    ) -> Event:
        """Sends a command and returns its answer. Raises LifetimeError on refusal, crash or a passed deadline."""
        stdin = cast("IO[bytes]", self._running().stdin)
        try:
            stdin.write(json.dumps(command).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None
        for event in self._events(deadline_s):
            if event["event"] == "progress":
                if progress is not None:
                    progress(event)
            elif event["event"] == "failed":
                kind: Kind = "unsupported" if event["kind"] == "unsupported" else "error"
                raise LifetimeError(self._failure(str(event["message"]), kind), dead=event.get("dead") is True)
            else:
                return event
        raise self._gone()

    def _events(self, deadline_s: float) -> Iterator[Event]:
        """Answers as they come; ends when the process closes the pipe. Raises LifetimeError at the deadline."""
        answers = cast("IO[bytes]", self._answers)
        limit = time.monotonic() + deadline_s
        with selectors.DefaultSelector() as selector:
            selector.register(answers, selectors.EVENT_READ)
            while True:
                line, newline, rest = self._buffer.partition(b"\n")
                if newline:
                    self._buffer = rest
                    yield cast("Event", json.loads(line))
                    continue
                if not selector.select(max(0.0, limit - time.monotonic())):
                    self._end(patiently=False)
                    message = f"no answer within {deadline_s:.0f} s; the engine process was ended"
                    raise LifetimeError(self._failure(message, "error"), dead=True)
                chunk = os.read(answers.fileno(), 1 << 16)
                if not chunk:
                    return
                self._buffer += chunk

    def _gone(self) -> LifetimeError:
        code = self._running().wait()
        how = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return LifetimeError(self._failure(f"the engine process {how} before it answered", "error"), dead=True)

    def _failure(self, message: str, kind: Kind) -> Failure:
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            text = f"(log unreadable: {error.strerror})"
        return Failure(kind=kind, message=message, log_tail=tuple(text.splitlines()[-TAIL_LINES:]))

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the lifetime has not been entered")
        return self._process

    def _end(self, *, patiently: bool) -> None:
        process = self._running()
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        if patiently:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
