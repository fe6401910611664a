"""What the engine did and does, in numbers, and their Prometheus text. It knows no HTTP.

Rules: counters only grow while the server lives; gauges say what is so after the newest step; names and units
follow Prometheus' conventions (text format 0.0.4). What scores a prompt counts among the computed tokens alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from engines.bundled.engine import Engine
from engines.bundled.sequence import Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OUTCOMES = ("stop", "length", "abort")


class Counts(NamedTuple):
    """One moment's numbers."""

    running: int
    waiting: int
    most_running: int  # sequences in one step, the most so far
    pages: int
    pages_held: int
    steps: int
    preemptions: int
    admitted: int  # sequences that went in line
    cached_tokens: int  # prompt tokens that came from a prefix cache
    prompt_tokens: int  # of admitted requests
    computed_tokens: int  # tokens that went through the model, recomputed ones again
    generated_tokens: int
    outcomes: tuple[int, ...]  # requests by OUTCOMES


class Totals:
    """Counters of one server's life. The engine's own are folded in step by step, so that its log stays empty."""

    def __init__(self) -> None:
        """All zero."""
        self._steps = 0
        self._admitted = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._computed_tokens = 0
        self._generated_tokens = 0
        self._most_running = 0
        self._preemptions = 0
        self._outcomes: Counter[str] = Counter()

    def admit(self, sequences: Iterable[Sequence]) -> None:
        """Sequences that went in line."""
        for sequence in sequences:
            if not sequence.request.scored:
                self._admitted += 1
                self._prompt_tokens += len(sequence.request.prompt)

    def step(self, engine: Engine) -> None:
        """Takes over what one step wrote down, and clears it."""
        self._steps += 1
        self._computed_tokens += sum(ran.count for ran in engine.log)
        self._most_running = max(self._most_running, len(engine.log))
        self._preemptions += engine.scheduler.preemptions
        engine.scheduler.preemptions = 0
        engine.log.clear()

    def generate(self, sequence: Sequence, positions: int) -> None:
        """The newest `positions` of a sequence are handed out; counts how it ended if it did."""
        if sequence.request.scored:
            return
        if sequence.generated == positions:  # its first
            self._cached_tokens += sequence.cached_tokens
        self._generated_tokens += positions
        if sequence.finish_reason is not None:
            self._outcomes[sequence.finish_reason] += 1

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """Sequences that ended unfinished."""
        for sequence in sequences:
            if not sequence.request.scored:
                self._cached_tokens += 0 if sequence.generated else sequence.cached_tokens
                self._outcomes["abort"] += 1

    def count(self, engine: Engine) -> Counts:
        """The numbers now."""
        scheduler = engine.scheduler
        return Counts(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            most_running=self._most_running,
            pages=scheduler.pages.count,
            pages_held=scheduler.pages.count - scheduler.pages.free,
            steps=self._steps,
            preemptions=self._preemptions,
            admitted=self._admitted,
            cached_tokens=self._cached_tokens,
            prompt_tokens=self._prompt_tokens,
            computed_tokens=self._computed_tokens,
            generated_tokens=self._generated_tokens,
            outcomes=tuple(self._outcomes[outcome] for outcome in OUTCOMES),
        )


def prometheus_text(counts: Counts, fingerprint: str) -> str:
    """The page of GET /metrics."""
    by_outcome = zip(OUTCOMES, counts.outcomes, strict=True)
    lines = [
        *_metric("requests_running", "gauge", "Sequences that hold a seat.", counts.running),
        *_metric("requests_waiting", "gauge", "Sequences in line.", counts.waiting),
        *_metric("requests_running_max", "gauge", "Most sequences in one step so far.", counts.most_running),
        *_metric("kv_pages", "gauge", "KV pages in the pool.", counts.pages),
        *_metric("kv_pages_held", "gauge", "KV pages that sequences hold.", counts.pages_held),
        *_metric("steps_total", "counter", "Engine steps.", counts.steps),
        *_metric("preemptions_total", "counter", "Sequences put back in line and recomputed.", counts.preemptions),
        *_metric("requests_admitted_total", "counter", "Sequences that went in line.", counts.admitted),
        *_metric("prompt_tokens_total", "counter", "Prompt tokens of admitted sequences.", counts.prompt_tokens),
        *_metric(
            "cached_tokens_total", "counter", "Prompt tokens that came from a prefix cache.", counts.cached_tokens
        ),
        *_metric("computed_tokens_total", "counter", "Tokens that went through the model.", counts.computed_tokens),
        *_metric("generation_tokens_total", "counter", "Tokens generated.", counts.generated_tokens),
        *_header("requests_total", "counter", "Sequences by how they ended."),
        *(f'samebits_requests_total{{outcome="{outcome}"}} {count}' for outcome, count in by_outcome),
        *_header("info", "gauge", "The identity fingerprint's digest."),
        f'samebits_info{{fingerprint="{fingerprint}"}} 1',
    ]
    return "\n".join(lines) + "\n"


def _header(name: str, kind: str, meaning: str) -> tuple[str, str]:
    return f"# HELP samebits_{name} {meaning}", f"# TYPE samebits_{name} {kind}"


def _metric(name: str, kind: str, meaning: str, value: int) -> tuple[str, str, str]:
    return (*_header(name, kind, meaning), f"samebits_{name} {value}")
