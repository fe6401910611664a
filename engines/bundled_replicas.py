"""Two replicas of one configuration behind one front: which of them serves must not matter.

It does not know models or kernels. Rules: the front only deals requests out, in the order of their arrival, and puts
traces together; a replica sees its own requests alone, and so another batch than one that serves all; whatever the
replicas' fingerprints do not agree on shows as both values.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from engines.bundled_caches import TunesNothing
from engines.bundled_child import ChildEngine
from engines.bundled_timed import NotByTheClock
from harness.capture import RESIDENT
from harness.engine import Field, Progress, Scalar, Work
from harness.errors import EngineError, Unsupported
from harness.schedule import Schedule
from harness.traces import NO_TOKEN, PositionTable, RequestTable, StepTable, Traces

Kind = TypeVar("Kind", np.int32, np.float32)
NAMES = ("first", "second")
SAME = "same"
OWN_FIELDS = ("model.", "tokenizer.", "chat_template.", "arithmetic.", "kernels.", "process.")  # of an engine process
LARGEST = ("max_running",)  # counters of which the larger one holds; the others add up


class ReplicaFront(TunesNothing, NotByTheClock):
    """Implements `harness.engine.Engine` over two engine processes."""

    def __init__(self, serves: str, replicas: Sequence[ChildEngine], folder: tempfile.TemporaryDirectory[str]) -> None:
        """`serves` is "first", "second" or "both"; the folder goes with the front."""
        self._serves, self._replicas, self._folder = serves, tuple(replicas), folder
        self._served = [0 for _ in replicas]
        self.form = f"replica={serves}"

    def resolved(self) -> Mapping[str, Scalar]:
        """What both settled on; where they differ, both values."""
        first, second = (replica.resolved for replica in self._replicas)
        both = {name: _both(first.get(name), second.get(name)) for name in sorted({*first, *second})}
        return {**both, "replica": self._serves}

    def observed(self) -> Mapping[str, Scalar]:
        """How many requests each process has served."""
        counts = ", ".join(f"{name} {count}" for name, count in zip(NAMES, self._served, strict=True))
        return {"replica": counts, "replicas": len({replica.pid for replica in self._replicas})}

    def fingerprint(self) -> tuple[Field, ...]:
        """The replicas' own fields; where they differ, both values."""
        first, second = ({field.name: field for field in replica.subject} for replica in self._replicas)
        return tuple(
            first[name]
            if first[name] == second[name]
            else dataclasses.replace(first[name], value=_both(first[name].value, second[name].value))
            for name in sorted(set(first) & set(second))
            if name.startswith(OWN_FIELDS) and name != RESIDENT  # which the front's own process says of itself
        )

    def generate(self, work: Work, progress: Progress) -> Traces:
        """Deals the requests out, lets the replicas run at the same time, and joins their traces."""
        shares = [part for part in deal(work, self._serves) if part[1].requests]
        with ThreadPoolExecutor(len(shares)) as pool:
            running = [pool.submit(self._replicas[index].generate, part) for index, part in shares]
            traces = [(index, share.result()) for (index, _), share in zip(shares, running, strict=True)]
        for index, found in traces:
            self._served[index] += len(found.requests.id)
        joined = join_traces([found for _, found in traces], [arrival.request for arrival in work.schedule.arrivals])
        progress(len(joined.requests.id), len(joined.positions.token))
        return joined

    def stop(self) -> None:
        """Ends both processes."""
        for replica in self._replicas:
            replica.close()
        self._folder.cleanup()


def start_replicas(model: str, settings: Mapping[str, Scalar], environment: Mapping[str, str]) -> ReplicaFront:
    """Starts both. Raises EngineError, Unsupported, naming the replica that does not start."""
    folder = tempfile.TemporaryDirectory(prefix="samebits-replicas-")
    plain = {**settings, "replica": "off", "replica_arithmetic": SAME}
    other = {} if settings["replica_arithmetic"] == SAME else {"arithmetic": settings["replica_arithmetic"]}
    replicas: list[ChildEngine] = []
    try:
        for name, changed in zip(NAMES, ({}, other), strict=True):
            place = Path(folder.name) / name
            replicas.append(ChildEngine(f"{name} replica", model, {**plain, **changed}, environment, place))
    except BaseException:
        for replica in replicas:
            replica.close()
        folder.cleanup()
        raise
    return ReplicaFront(str(settings["replica"]), replicas, folder)


def deal(work: Work, serves: str) -> list[tuple[int, Work]]:
    """(replica, its part of the work): all to one of them, or one request after another to each in turn.

    Raises Unsupported for a request that waits for one that another replica serves.
    """
    names = [arrival.request for arrival in work.schedule.arrivals]
    if serves != "both":
        return [(NAMES.index(serves), work)]
    replica_of = {name: place % 2 for place, name in enumerate(names)}
    for arrival in work.schedule.arrivals:
        if arrival.after is not None and replica_of[arrival.after] != replica_of[arrival.request]:
            raise Unsupported(
                f"request {arrival.request!r} waits for {arrival.after!r}, which another replica serves; "
                "use a schedule whose arrivals are tied to steps, for example together"
            )
    return [(index, _part(work, {name for name in names if replica_of[name] == index})) for index in range(2)]


def _part(work: Work, names: set[str]) -> Work:
    arrivals = tuple(arrival for arrival in work.schedule.arrivals if arrival.request in names)
    return dataclasses.replace(
        work,
        requests=tuple(request for request in work.requests if request.id in names),
        schedule=Schedule(name=work.schedule.name, arrivals=arrivals),
        golden={name: path for name, path in work.golden.items() if name in names},
    )


def join_traces(parts: Sequence[Traces], order: Sequence[str]) -> Traces:
    """One capture of several engines' traces, requests in `order`; step s of part p becomes step s * parts + p.

    Raises EngineError unless every request of `order`, and no other, is in one of the parts.
    """
    rows = [
        (name, sample, p, r)
        for p, part in enumerate(parts)
        for r, (name, sample) in enumerate(zip(part.requests.id, part.requests.sample.tolist(), strict=True))
    ]
    if {name for name, *_ in rows} != set(order):
        raise EngineError(f"replicas returned {len(rows)} requests, expected {len(order)}: {', '.join(order)}")
    place = {name: index for index, name in enumerate(order)}
    rows.sort(key=lambda row: (place[row[0]], row[1]))
    picked = [(p, r) for _, _, p, r in rows]
    return Traces(
        requests=_join_requests(parts, picked),
        positions=_join_positions(parts, picked),
        steps=_join_steps(parts, picked),
        counters=_join_counters(parts),
    )


def _join_requests(parts: Sequence[Traces], picked: Sequence[tuple[int, int]]) -> RequestTable:
    columns: dict[str, object] = {}
    for field in dataclasses.fields(RequestTable):
        values = [getattr(part.requests, field.name) for part in parts]
        if any(value is None for value in values):
            columns[field.name] = None
        elif isinstance(values[0], tuple):
            columns[field.name] = tuple(values[p][r] for p, r in picked)
        else:
            columns[field.name] = np.array([values[p][r] for p, r in picked], values[0].dtype)
    return RequestTable(**columns)  # type: ignore[arg-type]


def _join_positions(parts: Sequence[Traces], picked: Sequence[tuple[int, int]]) -> PositionTable:
    ends = [np.cumsum(part.requests.length) for part in parts]
    spans = [(p, slice(int(ends[p][r] - parts[p].requests.length[r]), int(ends[p][r]))) for p, r in picked]
    lists = [part.positions.topk_ids for part in parts]
    width = max((ids.shape[1] for ids in lists if ids is not None), default=0)
    columns: dict[str, object] = {}
    for field in dataclasses.fields(PositionTable):
        values = [getattr(part.positions, field.name) for part in parts]
        if any(value is None for value in values):
            columns[field.name] = None
            continue
        if field.name.startswith("topk"):
            padding = NO_TOKEN if field.name == "topk_ids" else np.nan
            values = [_widen(value, width, padding) for value in values]
        columns[field.name] = np.concatenate([values[p][span] for p, span in spans])
    return PositionTable(**columns)  # type: ignore[arg-type]


def _widen(rows: npt.NDArray[Kind], width: int, padding: float) -> npt.NDArray[Kind]:
    """Pads rows of candidates as `write_traces` does."""
    wide = np.full((len(rows), width), padding, rows.dtype)
    wide[:, : rows.shape[1]] = rows
    return wide


def _join_steps(parts: Sequence[Traces], picked: Sequence[tuple[int, int]]) -> StepTable | None:
    row_of = {pair: row for row, pair in enumerate(picked)}
    columns: list[tuple[int, int, int, int]] = []
    for p, part in enumerate(parts):
        if part.steps is None:
            return None
        table = part.steps
        for step, request, start, count in zip(table.step, table.request, table.start, table.count, strict=True):
            columns.append((int(step) * len(parts) + p, row_of[p, int(request)], int(start), int(count)))
    columns.sort(key=lambda row: row[0])
    step, request, start, count = (np.array(column, np.int32) for column in zip(*columns, strict=True))
    return StepTable(step=step, request=request, start=start, count=count)


def _join_counters(parts: Sequence[Traces]) -> tuple[tuple[str, int], ...]:
    tables = [dict(part.counters) for part in parts]
    joined = {}
    for name in sorted(set().union(*tables)):
        values = [table[name] for table in tables if name in table]
        joined[name] = max(values) if name in LARGEST else sum(values)
    return tuple(joined.items())


def _both(first: Scalar | None, second: Scalar | None) -> Scalar:
    return first if first is not None and first == second else f"{first} | {second}"
