"""Builds schedules by name from request ids: alone, together, reversed, …, with companions.

It does not know prompts or engines. Rules: arrivals are staggered by steps so that each request meets a different
step composition; a builder is a pure function of ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

from harness.background import background_mistake
from harness.engine import Scalar
from harness.schedule import Arrival, Schedule

SCHEDULES = ("alone", "together", "reversed", "interleaved", "while-decoding", "urgent-last", "two-of-three-fast")
COMPANIONS = re.compile(r"([A-Za-z0-9._:-]+):([1-9][0-9]*)")
CANCELLED = ":cancelled"  # ends a companions value: each of them leaves in mid-stream
ENVIRONMENT_AXES = ("attention-backend", "driver", "engine-version", "hardware", "torch-version")
AXIS_VALUES: dict[str, tuple[str, ...]] = {
    "batch": ("alone", "together"),
    "order": ("together", "reversed", "interleaved"),
    "arrivals": ("alone", "together", "while-decoding"),
    "restart": ("same", "new"),
    "cached_prefix": ("cold", "warm", "partial", "foreign"),
    "cache_restore": ("cold", "restored"),
    **dict.fromkeys(ENVIRONMENT_AXES, ("baseline", "now")),
}
NOTHING = {"companions": "none", "server_history": "fresh"}  # axes that take CORPUS:COUNT, and their empty value
NO_HISTORY = ("cold", "fresh")  # values of history axes under which nothing is served before
DECODED_BEFORE_NEXT = 3  # tokens the running request has generated when the next one arrives


def value_mistake(axis: str, value: Scalar) -> str | None:
    """Why `value` is no value of a schedule, process or history axis, or None."""
    if axis == "load":
        return background_mistake(str(value))
    if axis in NOTHING:
        plain = value.removesuffix(CANCELLED) if isinstance(value, str) and axis == "companions" else value
        if isinstance(plain, str) and (value == NOTHING[axis] or COMPANIONS.fullmatch(plain)):
            return None
        return f"expected {NOTHING[axis]!r} or CORPUS:COUNT such as 'smoke:2', got {value!r}"
    if value in AXIS_VALUES[axis]:
        return None
    return f"expected one of {', '.join(AXIS_VALUES[axis])}, got {value!r}"


def companion_source(value: str) -> tuple[str, int] | None:
    """(corpus, count) of a companions value, cancelled or not; None for 'none'."""
    match = COMPANIONS.fullmatch(value.removesuffix(CANCELLED))
    return (match[1], int(match[2])) if match else None


def build_schedule(
    name: str, ids: Sequence[str], companions: Sequence[str] = (), *, cancelled: bool = False,
    background: Sequence[Arrival] = (),
) -> Schedule:  # fmt: skip
    """The schedule `name` over judged `ids`, companions arriving among them.

    Companion i arrives two steps after companion i - 1, from step 0 on, whatever the judged requests do. Cancelled
    companions leave one after another: the first after one token, each further one two tokens later in its life.
    A `background` brings its own arrivals.
    """
    arrivals = [
        Arrival(request=name, companion=True, at_step=2 * i, cancel_after_tokens=1 + 2 * i if cancelled else None)
        for i, name in enumerate(companions)
    ]
    arrivals += [*background, *_BUILDERS[name](ids)]
    return Schedule(name=name, arrivals=tuple(arrivals))


def _alone(ids: Sequence[str]) -> list[Arrival]:
    first = [Arrival(request=ids[0])]
    return first + [Arrival(request=after, after=before) for before, after in pairwise(ids)]


def _together(ids: Sequence[str]) -> list[Arrival]:
    return [Arrival(request=request, at_step=step) for step, request in enumerate(ids)]


def _reversed(ids: Sequence[str]) -> list[Arrival]:
    return _together(ids[::-1])


def _interleaved(ids: Sequence[str]) -> list[Arrival]:
    return _together([*ids[1::2], *ids[0::2]])


def _while_decoding(ids: Sequence[str]) -> list[Arrival]:
    chain = [Arrival(request=after, after=before, after_tokens=DECODED_BEFORE_NEXT) for before, after in pairwise(ids)]
    return [Arrival(request=ids[0]), *chain]


def _urgent_last(ids: Sequence[str]) -> list[Arrival]:
    """Each more urgent than the one before it, so that a line by priority turns the order round."""
    return [Arrival(request=request, at_step=step, priority=-step) for step, request in enumerate(ids)]


def _two_of_three_fast(ids: Sequence[str]) -> list[Arrival]:
    """Two of three ask for a fast path and verification, the third is ordinary traffic between them."""
    return [Arrival(request=request, at_step=step, rollback=step % 3 != 2) for step, request in enumerate(ids)]


_BUILDERS: dict[str, Callable[[Sequence[str]], list[Arrival]]] = {
    "alone": _alone,
    "together": _together,
    "reversed": _reversed,
    "interleaved": _interleaved,
    "while-decoding": _while_decoding,
    "urgent-last": _urgent_last,
    "two-of-three-fast": _two_of_three_fast,
}
