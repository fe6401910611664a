"""Plants faults in stored captures: each function takes traces and returns a changed copy, the original untouched.

It does not know verdicts; `harness.faults.listing` says what each fault must come to. Rules: one function, one fault,
at one stated place; a fault that would change nothing is an error, because a fault that is not there cannot be found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np

from harness.engine import Replay, Rule
from harness.judged import find_judged
from harness.traces import NO_TOKEN, Float32, Int32, Int64, PositionTable, RequestTable, StepTable, Traces


class Place(NamedTuple):
    """A request by id, a position in it and a top-k column; negative numbers count from the end."""

    request: str
    position: int = 0
    column: int = 0


def plant_least(traces: Traces, rule: Rule, replay: Replay) -> Traces:
    """The smallest fault that a rule must find, at the first judged position: one ulp, or another choice for ids."""
    place = Place(find_judged(traces).keys[0].id)
    if rule in ("text", "tokens"):
        return wrong_pick(traces, place) if replay == "golden" else wrong_token(traces, place)
    return ulp_in_logprob(traces, place)


def row_of(traces: Traces, place: Place) -> int:
    """The place's row in the position table. Raises ValueError for a place that does not exist."""
    table = traces.requests
    j = table.id.index(place.request)
    length = int(table.length[j])
    if not -length <= place.position < length:
        raise ValueError(f"request {place.request!r} has {length} positions, there is no {place.position}")
    return int(table.length[:j].sum()) + place.position % length


def ulp_in_logprob(traces: Traces, place: Place) -> Traces:
    """The chosen logprob moves to its neighbour below."""
    column = _logprob(traces).copy()
    row = row_of(traces, place)
    column[row] = np.nextafter(column[row], np.float32(-np.inf))
    return _positions(traces, logprob=column)


def logprob_becomes(traces: Traces, place: Place, value: float) -> Traces:
    """The chosen logprob becomes a value: a NaN, an infinity, a zero of another sign."""
    column = _logprob(traces).copy()
    column[row_of(traces, place)] = np.float32(value)
    return _positions(traces, logprob=column)


def ulp_in_topk(traces: Traces, place: Place) -> Traces:
    """One top-k value moves to its neighbour below."""
    column = _topk(traces)[1].copy()
    cell = (row_of(traces, place), place.column)
    column[cell] = np.nextafter(column[cell], np.float32(-np.inf))
    return _positions(traces, topk_logprobs=column)


def topk_becomes(traces: Traces, place: Place, value: float) -> Traces:
    """One top-k value becomes a value."""
    column = _topk(traces)[1].copy()
    column[row_of(traces, place), place.column] = np.float32(value)
    return _positions(traces, topk_logprobs=column)


def wrong_candidate(traces: Traces, place: Place) -> Traces:
    """One top-k id becomes one that is not listed."""
    column = _topk(traces)[0].copy()
    row = row_of(traces, place)
    column[row, place.column] = int(column[row].max()) + 1
    return _positions(traces, topk_ids=column)


def swap_candidates(traces: Traces, place: Place) -> Traces:
    """A candidate and its right neighbour change places in the list, values with ids: a wrong order."""
    ids, values = (column.copy() for column in _topk(traces))
    row, left, right = row_of(traces, place), place.column, place.column + 1
    for column in (ids, values):
        column[row, [left, right]] = column[row, [right, left]]
    return _positions(traces, topk_ids=ids, topk_logprobs=values)


def swap_logits(traces: Traces, place: Place) -> Traces:
    """A candidate and its right neighbour exchange their logits; chosen logprob and pick follow."""
    ids, values = _topk(traces)
    row = row_of(traces, place)
    first, second = (int(token) for token in ids[row, place.column : place.column + 2])
    other = {first: second, second: first}
    swapped = ids.copy()
    swapped[row, place.column : place.column + 2] = second, first
    logprob, pick = _logprob(traces).copy(), traces.positions.pick.copy()
    token = int(traces.positions.token[row])
    if token in other:
        logprob[row] = values[row, place.column + (token == first)]
    pick[row] = other.get(int(pick[row]), int(pick[row]))
    return _positions(traces, topk_ids=swapped, logprob=logprob, pick=pick)


def no_candidates(traces: Traces, place: Place) -> Traces:
    """One position lists nothing."""
    ids, values = (column.copy() for column in _topk(traces))
    row = row_of(traces, place)
    ids[row], values[row] = NO_TOKEN, np.nan
    return _positions(traces, topk_ids=ids, topk_logprobs=values)


def narrow_topk(traces: Traces) -> Traces:
    """Every list is one candidate shorter."""
    ids, values = _topk(traces)
    return _positions(traces, topk_ids=ids[:, :-1].copy(), topk_logprobs=values[:, :-1].copy())


def wrong_pick(traces: Traces, place: Place) -> Traces:
    """The sampler's own pick becomes another id."""
    column = traces.positions.pick.copy()
    column[row_of(traces, place)] ^= 1
    return _positions(traces, pick=column)


def no_pick(traces: Traces, place: Place) -> Traces:
    """The sampler's own pick is not reported."""
    column = traces.positions.pick.copy()
    column[row_of(traces, place)] = NO_TOKEN
    return _positions(traces, pick=column)


def wrong_token(traces: Traces, place: Place) -> Traces:
    """The token itself becomes another id."""
    column = traces.positions.token.copy()
    column[row_of(traces, place)] ^= 1
    return _positions(traces, token=column)


def wrong_digest(traces: Traces, place: Place) -> Traces:
    """One bit of a position's logits digest flips."""
    if traces.positions.logits_digest is None:
        raise ValueError("the capture carries no logits digests")
    column = traces.positions.logits_digest.copy()
    column[row_of(traces, place), place.column] ^= np.uint64(1)
    return _positions(traces, logits_digest=column)


def shift_positions(traces: Traces, request: str) -> Traces:
    """All columns of a request move by one position, the last one coming first."""
    start, length = row_of(traces, Place(request)), int(traces.requests.length[traces.requests.id.index(request)])
    order = np.arange(len(traces.positions.token))
    order[start : start + length] = np.roll(order[start : start + length], 1)
    return replace(traces, positions=take_positions(traces.positions, order))


def drop_columns(traces: Traces, *names: str) -> Traces:
    """Whole columns are missing."""
    return _positions(traces, **dict.fromkeys(names))


def drop_request(traces: Traces, request: str) -> Traces:
    """A request is missing from every table."""
    keep = np.array([name != request for name in traces.requests.id])
    steps = traces.steps
    if steps is not None:
        kept = keep[steps.request]
        numbers = (np.cumsum(keep) - 1).astype(np.int32)
        steps = StepTable(step=steps.step[kept], request=numbers[steps.request[kept]],
                          start=steps.start[kept], count=steps.count[kept])  # fmt: skip
    rows = np.flatnonzero(np.repeat(keep, traces.requests.length))
    return replace(traces, requests=take_requests(traces.requests, np.flatnonzero(keep)),
                   positions=take_positions(traces.positions, rows), steps=steps)  # fmt: skip


def duplicate_request(traces: Traces, request: str) -> Traces:
    """A request is reported twice, tables and steps alike."""
    j = traces.requests.id.index(request)
    rows = np.append(np.arange(len(traces.requests.id)), j)
    start, length = row_of(traces, Place(request)), int(traces.requests.length[j])
    places = np.append(np.arange(len(traces.positions.token)), np.arange(start, start + length))
    return replace(traces, requests=take_requests(traces.requests, rows), steps=None,
                   positions=take_positions(traces.positions, places))  # fmt: skip


def truncate_request(traces: Traces, request: str, by: int = 1) -> Traces:
    """The last positions are missing from the position table, and from the steps as well."""
    j = traces.requests.id.index(request)
    length = traces.requests.length.copy()
    stop = int(length[: j + 1].sum())
    length[j] -= by
    rows = np.delete(np.arange(len(traces.positions.token)), np.arange(stop - by, stop))
    end = int(traces.requests.prompt_tokens[j] + length[j])
    return recount(replace(
        traces, requests=replace(traces.requests, length=length), steps=_cut(traces.steps, j, end),
        positions=take_positions(traces.positions, rows),
    ))  # fmt: skip


def edit_request(traces: Traces, request: str, **values: str | int | bool) -> Traces:
    """Cells of one request's row take other values."""
    j = traces.requests.id.index(request)
    changes: dict[str, object] = {}
    for name, value in values.items():
        column = getattr(traces.requests, name)
        if isinstance(column, tuple):
            changes[name] = (*column[:j], value, *column[j + 1 :])
        else:
            changes[name] = column.copy()
            changes[name][j] = value  # type: ignore[index]
    return replace(traces, requests=replace(traces.requests, **changes))  # type: ignore[arg-type]


def claim(traces: Traces, **counters: int) -> Traces:
    """Counters claim other numbers."""
    return replace(traces, counters=tuple(sorted({**dict(traces.counters), **counters}.items())))


def edit_steps(traces: Traces, columns: Mapping[str, Int32] | None) -> Traces:
    """Columns of the step table are replaced; None removes the table."""
    if columns is None or traces.steps is None:
        return replace(traces, steps=None)
    return replace(traces, steps=replace(traces.steps, **columns))


def recount(traces: Traces) -> Traces:
    """The known counters say what the tables show."""
    steps = traces.steps
    if steps is None:
        return traces
    _, sizes = np.unique(steps.step, return_counts=True)
    return claim(
        traces, max_running=int(sizes.max(initial=0)), preemptions=int(traces.requests.preemptions.sum()),
        steps=len(sizes), tokens_computed=int(steps.count.sum()),
    )  # fmt: skip


def take_requests(table: RequestTable, rows: Int64) -> RequestTable:
    """Rows of a request table, in the given order."""
    columns: dict[str, object] = {}
    for field in fields(table):
        column = getattr(table, field.name)
        if column is None:  # this engine does not report it
            columns[field.name] = None
            continue
        columns[field.name] = tuple(column[row] for row in rows) if isinstance(column, tuple) else column[rows]
    return replace(table, **columns)  # type: ignore[arg-type]


def take_positions(table: PositionTable, rows: Int64) -> PositionTable:
    """Rows of a position table, in the given order."""
    columns = {field.name: getattr(table, field.name) for field in fields(table)}
    taken = {name: column[rows] for name, column in columns.items() if column is not None}
    return replace(table, **taken)


def _cut(steps: StepTable | None, request: int, end: int) -> StepTable | None:
    """Steps without what a request computed from its last output on."""
    if steps is None:
        return None
    keep = (steps.request != request) | (steps.start < end - 1)
    return StepTable(
        step=steps.step[keep], request=steps.request[keep], start=steps.start[keep], count=steps.count[keep]
    )


def _positions(traces: Traces, **columns: object) -> Traces:
    return replace(traces, positions=replace(traces.positions, **columns))  # type: ignore[arg-type]


def _logprob(traces: Traces) -> Float32:
    if traces.positions.logprob is None:
        raise ValueError("the capture carries no logprobs")
    return traces.positions.logprob


def _topk(traces: Traces) -> tuple[Int32, Float32]:
    if traces.positions.topk_ids is None or traces.positions.topk_logprobs is None:
        raise ValueError("the capture carries no top-k lists")
    return traces.positions.topk_ids, traces.positions.topk_logprobs
