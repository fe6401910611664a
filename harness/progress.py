"""Shows long work as it goes: a live line on a terminal, plain lines elsewhere, nothing when quiet.

It does not know what is run. Rules: output goes to standard error; the estimate of the time left comes from positions
done of positions planned.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol, TextIO

PLAIN_EVERY_S = 10.0


class Progress(Protocol):
    """What the runner tells. `requests` and `tokens` are counts within the current case."""

    def begin(self, cases: int, tokens: int) -> None: ...
    def note(self, text: str) -> None: ...
    def case(self, name: str, requests: int, tokens: int) -> None: ...
    def advance(self, requests: int, tokens: int) -> None: ...
    def done(self, tokens: int, seconds: float) -> None: ...
    def end(self) -> None: ...


class Quiet:
    """Says nothing."""

    def begin(self, cases: int, tokens: int) -> None:
        """Ignored."""

    def note(self, text: str) -> None:
        """Ignored."""

    def case(self, name: str, requests: int, tokens: int) -> None:
        """Ignored."""

    def advance(self, requests: int, tokens: int) -> None:
        """Ignored."""

    def done(self, tokens: int, seconds: float) -> None:
        """Ignored."""

    def end(self) -> None:
        """Ignored."""


@dataclass(slots=True)
class Tally:
    """Counts shared by both shown forms."""

    cases: int = 0
    tokens: int = 0
    done_cases: int = 0
    done_tokens: int = 0
    name: str = ""
    requests: int = 0
    now_requests: int = 0
    now_tokens: int = 0
    begun: float = field(default_factory=time.monotonic)
    case_begun: float = field(default_factory=time.monotonic)

    def line(self) -> str:
        """Case, requests, speed and time left, in one line."""
        elapsed = time.monotonic() - self.case_begun
        speed = self.now_tokens / elapsed if elapsed > 0 else 0.0
        return (f"case {self.done_cases + 1}/{self.cases} {self.name}: {self.now_requests}/{self.requests} requests, "
                f"{speed:.0f} tokens/s, {self.left()} left")  # fmt: skip

    def left(self) -> str:
        """Estimated time to the end, from the positions done so far."""
        done = self.done_tokens + self.now_tokens
        if not done:
            return "time unknown"
        seconds = (time.monotonic() - self.begun) / done * max(0, self.tokens - done)
        return f"{int(seconds // 60)}:{int(seconds % 60):02d}"


class Plain:
    """One line when a case begins and ends, and one every PLAIN_EVERY_S seconds between."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.tally = Tally()
        self.last = 0.0

    def begin(self, cases: int, tokens: int) -> None:
        """Sets the totals."""
        self.tally = Tally(cases=cases, tokens=tokens)

    def note(self, text: str) -> None:
        """Prints a line."""
        print(text, file=self.stream, flush=True)

    def case(self, name: str, requests: int, tokens: int) -> None:  # noqa: ARG002 - part of the protocol
        """Begins a case."""
        tally = self.tally
        tally.name, tally.requests, tally.now_requests, tally.now_tokens = name, requests, 0, 0
        tally.case_begun = self.last = time.monotonic()

    def advance(self, requests: int, tokens: int) -> None:
        """Prints a line now and then."""
        self.tally.now_requests, self.tally.now_tokens = requests, tokens
        if time.monotonic() - self.last >= PLAIN_EVERY_S:
            self.last = time.monotonic()
            self.note(self.tally.line())

    def done(self, tokens: int, seconds: float) -> None:
        """Ends a case."""
        tally = self.tally
        tally.done_cases += 1
        tally.done_tokens += tokens
        tally.now_tokens = 0
        speed = tokens / seconds if seconds > 0 else 0.0
        self.note(f"case {tally.done_cases}/{tally.cases} {tally.name}: {tokens} tokens in {seconds:.1f} s "
                  f"({speed:.0f} tokens/s), {tally.left()} left")  # fmt: skip

    def end(self) -> None:
        """Nothing to close."""


class Live:
    """One line that is rewritten, on a terminal."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.status import Status

        self.console = Console(file=stream)
        self.status = Status("planning", console=self.console)
        self.tally = Tally()

    def begin(self, cases: int, tokens: int) -> None:
        """Sets the totals and shows the line."""
        self.tally = Tally(cases=cases, tokens=tokens)
        self.status.start()

    def note(self, text: str) -> None:
        """Prints a line above the live one."""
        self.console.print(text, highlight=False, markup=False)

    def case(self, name: str, requests: int, tokens: int) -> None:  # noqa: ARG002 - part of the protocol
        """Begins a case."""
        tally = self.tally
        tally.name, tally.requests, tally.now_requests, tally.now_tokens = name, requests, 0, 0
        tally.case_begun = time.monotonic()
        self._show()

    def advance(self, requests: int, tokens: int) -> None:
        """Rewrites the line."""
        self.tally.now_requests, self.tally.now_tokens = requests, tokens
        self._show()

    def done(self, tokens: int, seconds: float) -> None:  # noqa: ARG002 - part of the protocol
        """Ends a case."""
        self.tally.done_cases += 1
        self.tally.done_tokens += tokens
        self.tally.now_tokens = 0

    def end(self) -> None:
        """Takes the line away."""
        self.status.stop()

    def _show(self) -> None:
        from rich.text import Text

        self.status.update(Text(self.tally.line()))


def open_progress(stream: TextIO, *, quiet: bool) -> Progress:
    """The form that suits the stream."""
    if quiet:
        return Quiet()
    return Live(stream) if stream.isatty() else Plain(stream)
