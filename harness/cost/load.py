"""A load: which requests are served, and when each is due.

It does not know engines. Rules: a load is data, made before anything runs and the same for every arm; requests come
in the corpus's order, again from its start when it is used up, each copy under an id of its own; arrivals of an open
loop are fixed beforehand and wait for no answer.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import numpy as np

from harness.errors import UsageError
from harness.request import Request

Kind = Literal["closed", "poisson", "trace"]
COPY = "~"  # separates a request's id from the number of its copy
LEAST_REQUESTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`requests` are ids of the corpus in order of arrival; `due_s` is None in a closed loop."""

    name: str
    kind: Kind
    concurrency: int | None  # requests under way at once, in a closed loop
    rate: float | None  # requests per second, where arrivals are drawn
    requests: tuple[str, ...]
    due_s: tuple[float, ...] | None

    @property
    def timed_ids(self) -> tuple[str, ...]:
        """The id of each copy, in order."""
        seen: dict[str, int] = {}
        ids = []
        for name in self.requests:
            seen[name] = seen.get(name, -1) + 1
            ids.append(f"{name}{COPY}{seen[name]}")
        return tuple(ids)


def original(timed_id: str) -> tuple[str, int]:
    """(request of the corpus, number of the copy)."""
    name, _, number = timed_id.rpartition(COPY)
    return name, int(number)


def copies(load: Load, requests: Sequence[Request]) -> tuple[Request, ...]:
    """The requests a load serves, each copy under its own id."""
    known = {request.id: request for request in requests}
    return tuple(
        dataclasses.replace(known[name], id=timed) for name, timed in zip(load.requests, load.timed_ids, strict=True)
    )


def closed_loop(ids: Sequence[str], concurrency: int, count: int | None = None) -> Load:
    """`concurrency` requests at once, the next as soon as one is over; by default two rounds of seats, at least 8."""
    wanted = count if count is not None else max(LEAST_REQUESTS, 2 * concurrency)
    return Load(
        name=f"concurrency {concurrency}", kind="closed", concurrency=concurrency, rate=None,
        requests=cycle(ids, wanted), due_s=None,
    )  # fmt: skip


def poisson(ids: Sequence[str], rate: float, count: int, seed: int) -> Load:
    """Arrivals of a Poisson process; the same draws scaled for every rate, so that rates differ in nothing else."""
    gaps = np.random.default_rng(seed).exponential(1.0, count) / rate
    due = tuple(float(time) for time in np.cumsum(gaps))
    return Load(
        name=f"rate {rate:g}/s", kind="poisson", concurrency=None, rate=rate, requests=cycle(ids, count), due_s=due
    )


def cycle(ids: Sequence[str], count: int) -> tuple[str, ...]:
    """The first `count` of the ids, again from the start when they are used up."""
    return tuple(ids[index % len(ids)] for index in range(count))


def read_trace(file: Path, ids: Sequence[str]) -> Load:
    """A recorded trace: JSON Lines of `{"at_s": seconds, "request": id}`; without `request` the corpus's next one.

    Raises:
        UsageError: every mistake of the file, with its line.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--trace {file}: cannot be read: {error}") from error
    due: list[float] = []
    names: list[str] = []
    mistakes: list[str] = []
    for number, line in enumerate((line for line in lines if line.strip()), start=1):
        try:
            at, name = _arrival(line, ids, number - 1)
        except ValueError as error:
            mistakes.append(f"--trace {file}, line {number}: {error}")
            continue
        if due and at < due[-1]:
            mistakes.append(f"--trace {file}, line {number}: at_s {at:g} is before {due[-1]:g}; arrivals are in order")
        due.append(at)
        names.append(name)
    if not lines or not (due or mistakes):
        mistakes.append(f'--trace {file}: no arrivals; expected lines such as {{"at_s": 0.25}}')
    if mistakes:
        raise UsageError("\n".join(mistakes))
    return Load(
        name=f"trace {file.name}", kind="trace", concurrency=None, rate=None, requests=tuple(names), due_s=tuple(due)
    )


def _arrival(line: str, ids: Sequence[str], index: int) -> tuple[float, str]:
    """Raises ValueError with what is wrong."""
    try:
        item = json.loads(line)
    except ValueError:
        raise ValueError(f"expected a JSON object, found {line[:40]!r}") from None
    if not isinstance(item, dict):
        raise ValueError(f"expected a JSON object, found {line[:40]!r}")  # noqa: TRY004 - a mistake of the file
    unknown = sorted(set(item) - {"at_s", "request"})
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; expected at_s and request")
    at = item.get("at_s")
    if isinstance(at, bool) or not isinstance(at, int | float) or not math.isfinite(at) or at < 0:
        raise ValueError(f"at_s: expected seconds of at least 0, found {at!r}")
    name = item.get("request", ids[index % len(ids)])
    if name not in ids:
        raise ValueError(f"request {name!r}: the corpus has no such request")
    return float(at), cast("str", name)


def load_json(load: Load) -> dict[str, object]:
    """A load as plain data."""
    return dataclasses.asdict(load)


def load_from_json(value: dict[str, object]) -> Load:
    """The inverse of `load_json`."""
    due = cast("list[float] | None", value["due_s"])
    return Load(
        name=cast("str", value["name"]), kind=cast("Kind", value["kind"]),
        concurrency=cast("int | None", value["concurrency"]), rate=cast("float | None", value["rate"]),
        requests=tuple(cast("list[str]", value["requests"])), due_s=None if due is None else tuple(due),
    )  # fmt: skip
