"""Who ran beside whom, as far as the streams of answers show it: a step table read from the outside.

It does not know HTTP or verdicts. Rules: two tokens share a step only if each stream was between two of its own tokens
when the other's arrived, so that both requests were being decoded at that time; a first token shares a step with
nobody, for waiting in line and prefill look the same from outside; two streams must meet several times, for a server
that hands over from one to the next can look like one meeting to a client that was busy; where the server's metrics
never showed two requests at once, nothing is shared.

The table says that requests were decoded at the same time, not that one kernel computed both.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np

from harness.traces import StepTable

MEETINGS = 6  # a hand-over shows as one change, and as up to four meetings where a busy client saw it late


class Stream(NamedTuple):
    """One answer's tokens in time. `times` do not fall."""

    prompt_tokens: int
    cached_tokens: int
    times: Sequence[float]


class _Token(NamedTuple):
    """One token's arrival; `since` is when the one before it arrived."""

    at: float
    stream: int
    position: int
    since: float


def meetings(a: Sequence[float], b: Sequence[float]) -> int:
    """How often two streams met: times at which both had tokens, and changes from one to the other between those."""
    both = set(a) & set(b)
    order = sorted([(at, 0) for at in set(a) - both] + [(at, 1) for at in set(b) - both])
    return len(both) + sum(x != y for (_, x), (_, y) in pairwise(order))


def build_steps(streams: Sequence[Stream], *, apart: bool = False) -> StepTable:
    """The step table of one work; `apart`: the server was seen to run one request at a time."""
    met = {} if apart else _find_met(streams)
    tokens = sorted(
        _Token(at=at, stream=index, position=p, since=stream.times[p - 1] if p else at)
        for index, stream in enumerate(streams)
        for p, at in enumerate(stream.times)
    )
    steps: list[int] = []
    number, members, begun, closed = -1, set[int](), 0.0, True
    for token in tokens:
        joins = not closed and token.position and token.since < begun and members <= met.get(token.stream, set())
        if not joins:
            number, members, begun = number + 1, set(), token.at
        closed = token.position == 0
        members.add(token.stream)
        steps.append(number)
    rows = [_row(streams[token.stream], token.position) for token in tokens]
    return StepTable(
        step=np.array(steps, np.int32),
        request=np.array([token.stream for token in tokens], np.int32),
        start=np.array([start for start, _ in rows], np.int32),
        count=np.array([count for _, count in rows], np.int32),
    )


def shared(steps: StepTable) -> int:
    """Rows that share their step with another stream's."""
    _, inverse, sizes = np.unique(steps.step, return_inverse=True, return_counts=True)
    return int((sizes[inverse] > 1).sum())


def _find_met(streams: Sequence[Stream]) -> dict[int, set[int]]:
    """For each stream, the others that it met often enough."""
    met: dict[int, set[int]] = {index: set() for index in range(len(streams))}
    for (i, a), (j, b) in combinations(enumerate(streams), 2):
        if (
            a.times
            and b.times
            and a.times[0] <= b.times[-1]
            and b.times[0] <= a.times[-1]
            and meetings(a.times, b.times) >= MEETINGS
        ):
            met[i].add(j)
            met[j].add(i)
    return met


def _row(stream: Stream, position: int) -> tuple[int, int]:
    """(start, count) in the sequence of prompt and output."""
    if position:
        return stream.prompt_tokens + position - 1, 1
    cached = min(stream.cached_tokens, stream.prompt_tokens - 1)
    return cached, stream.prompt_tokens - cached
