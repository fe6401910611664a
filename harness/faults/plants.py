"""How the selftest's faults are planted: builders for rows of `harness.faults.listing`, and edits of a trial.

It does not run anything and expects nothing by itself. Rules: the given trial stays as it was; a builder names in its
arguments what is expected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from harness.axis import AXES
from harness.capture import Capture
from harness.faults import captures as faults
from harness.faults.captures import Place
from harness.specimen import SHAPES, Trial
from harness.traces import Int32, StepTable, Traces

Expected = Literal["FAIL", "ERROR", "INSUFFICIENT"]
Finder = Literal["comparator", "claims", "witness", "judge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One planted fault. `at` is where the comparator must locate the first difference, None if not by position."""

    name: str
    place: str
    expected: Expected
    found_by: Finder
    plant: Callable[[Trial], Trial]
    at: tuple[str, int] | None = None


def make_fault(
    name: str, place: str, expected: Expected, found_by: Finder, plant: Callable[[Trial], Trial],
    at: tuple[str, int] | None = None,
) -> Fault:  # fmt: skip
    """A fault of any kind."""
    return Fault(name=name, place=place, expected=expected, found_by=found_by, plant=plant, at=at)


def locate(name: str, where: str, change: Callable[[Traces, Place], Traces], place: Place) -> Fault:
    """A fault that the comparator locates to the position."""
    return make_fault(name, where, "FAIL", "comparator", _at(change, place), (place.request, _from_start(place)))


def locate_in_natural(name: str, where: str, change: Callable[[Traces, Place], Traces], place: Place) -> Fault:
    """The same in a cell that replays naturally."""

    def plant(trial: Trial) -> Trial:
        planted = _at(change, place)(trial)
        return replace(planted, pair=replace(trial.pair, cell=replace(trial.pair.cell, replay="natural")))

    return make_fault(name, where, "FAIL", "comparator", plant, (place.request, _from_start(place)))


def plant_at(
    name: str, where: str, expected: Expected, found_by: Finder, change: Callable[[Traces, Place], Traces], place: Place
) -> Fault:
    """A fault at one place of the variant."""
    return make_fault(name, where, expected, found_by, _at(change, place))


def contradict(name: str, where: str, change: Callable[[Traces, Place], Traces], place: Place) -> Fault:
    """A fault that makes the capture contradict itself; the comparator sees it too."""
    return make_fault(name, where, "ERROR", "claims", _at(change, place), (place.request, _from_start(place)))


def plant_in_request(
    name: str, request: str, expected: Expected, change: Callable[[Traces, str], Traces], position: int | None = None
) -> Fault:
    """A fault in one request of the variant; `position` is where the comparator must locate it."""
    at = None if position is None else (request, position)
    plant = on_varied(lambda traces: change(traces, request))
    return make_fault(name, f"request {request}", expected, "comparator", plant, at)


def _from_start(place: Place) -> int:
    lengths = {shape.name: shape.length for shape in SHAPES}
    return place.position % lengths[place.request]


def _at(change: Callable[[Traces, Place], Traces], place: Place) -> Callable[[Trial], Trial]:
    return on_varied(lambda traces: change(traces, place))


def set_counter(counter: str, number: int) -> Callable[[Traces], Traces]:
    """A counter claims a number."""
    return lambda traces: faults.claim(traces, **{counter: number})


def set_value(change: Callable[[Traces, Place, float], Traces], value: float) -> Callable[[Traces, Place], Traces]:
    """A change that writes one value."""

    def changed(traces: Traces, place: Place) -> Traces:
        return change(traces, place, value)

    return changed


def on_role(trial: Trial, role: str, change: Callable[[Traces], Traces]) -> Trial:
    """The trial with one capture's traces changed."""
    capture: Capture = getattr(trial, role)
    return replace(trial, **{role: replace(capture, traces=change(capture.traces))})  # type: ignore[arg-type]


def on_varied(change: Callable[[Traces], Traces]) -> Callable[[Trial], Trial]:
    """A change of the variant's traces."""
    return partial(on_role, role="varied", change=change)


def on_all(change: Callable[[Traces], Traces], trial: Trial) -> Trial:
    """The same fault in the reference, its floor and the variant."""
    for role in ("reference", "floor", "varied"):
        trial = on_role(trial, role, change)
    return trial


def without_reference_steps(trial: Trial) -> Trial:
    """The reference and its floor show no steps."""
    for role in ("reference", "floor"):
        trial = on_role(trial, role, lambda traces: faults.edit_steps(traces, None))
    return trial


def edit_capture(trial: Trial, role: str, **values: str) -> Trial:
    """The trial with fields of one capture changed."""
    capture: Capture = getattr(trial, role)
    return replace(trial, **{role: replace(capture, **values)})  # type: ignore[arg-type]


def other_model(trial: Trial) -> Trial:
    """The variant's fingerprint names another model."""
    fields = tuple(replace(field, value="1" * 64) for field in trial.varied.subject)
    return replace(trial, varied=replace(trial.varied, subject=fields))


def control_becomes(trial: Trial, role: str, like: str) -> Trial:
    """A control capture with another one's results."""
    other: Capture = getattr(trial, like)
    return on_role(trial, role, lambda _: other.traces)


def lose_variant(trial: Trial) -> Trial:
    """The variant was never captured."""
    return replace(trial, pair=replace(trial.pair, varied="a case that was never run"))


def not_restarted(trial: Trial) -> Trial:
    """The axis is the restart, but one process served both sides."""
    return replace(trial, pair=replace(trial.pair, cell=replace(trial.pair.cell, axis=AXES["restart"])))


def other_prompt(traces: Traces, request: str) -> Traces:
    """The request ran with one prompt token less."""
    j = traces.requests.id.index(request)
    return faults.edit_request(traces, request, prompt_tokens=int(traces.requests.prompt_tokens[j]) - 1)


def shift_all_but_tokens(traces: Traces, request: str) -> Traces:
    """Everything but the tokens moves by a position."""
    moved = faults.shift_positions(traces, request)
    return replace(moved, positions=replace(moved.positions, token=traces.positions.token))


def stop_early(traces: Traces, request: str) -> Traces:
    """The request ended a token early, and says so."""
    return faults.edit_request(faults.truncate_request(traces, request), request, finish_reason="stop")


def drop_columns(traces: Traces, names: tuple[str, ...]) -> Traces:
    """Whole columns are missing."""
    return faults.drop_columns(traces, *names)


def all_companions(traces: Traces) -> Traces:
    """No request is judged."""
    everyone = np.ones(len(traces.requests.id), dtype=np.bool_)
    return replace(traces, requests=replace(traces.requests, companion=everyone))


def edit_steps(traces: Traces, change: Callable[[StepTable], dict[str, Int32]], *, recount: bool) -> Traces:
    """The step table is changed; with `recount` the counters join in the lie."""
    if traces.steps is None:
        raise ValueError("the capture shows no step table")
    changed = faults.edit_steps(traces, change(traces.steps))
    return faults.recount(changed) if recount else changed
