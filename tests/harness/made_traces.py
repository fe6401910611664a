"""Traces made by hand or by Hypothesis for the tests of the comparison. No engine, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from harness.traces import NO_TOKEN, PositionTable, RequestTable, StepTable, Traces

AWKWARD = np.array([0.0, -0.0, -1.5, 1e-45, -1e-45, np.inf, -np.inf, np.nan], dtype=np.float32)


def make_requests(ids, lengths, *, companions=None, samples=None, prompts=None, reasons=None) -> RequestTable:
    count = len(ids)
    none = np.zeros(count, dtype=np.int32)
    return RequestTable(
        id=tuple(ids),
        sample=np.array(samples if samples is not None else none, dtype=np.int32),
        companion=np.array(companions if companions is not None else none, dtype=np.bool_),
        prompt_tokens=np.array(prompts if prompts is not None else none + 5, dtype=np.int32),
        length=np.array(lengths, dtype=np.int64),
        finish_reason=tuple(reasons or ("length",) * count),
        cached_tokens=none,
        preemptions=none.copy(),
        arrival_s=np.zeros(count),
        first_token_s=np.zeros(count),
        finish_s=np.zeros(count),
    )


def make_traces(ids=("a", "b"), lengths=(3, 2), *, width=3, seed=0, digests=True, steps=None, **requests) -> Traces:
    rng = np.random.default_rng(seed)
    n = sum(lengths)
    topk = np.array([rng.permutation(40)[:width] for _ in range(n)], dtype=np.int32).reshape(n, width)
    values = -np.sort(rng.random((n, width)), axis=1).astype(np.float32) - np.float32(0.1)
    positions = PositionTable(
        token=topk[:, 0].copy(),
        pick=topk[:, 0].copy(),
        logprob=values[:, 0].copy(),
        topk_ids=topk,
        topk_logprobs=values,
        logits_digest=rng.integers(0, 2**63, (n, 2), dtype=np.uint64) if digests else None,
    )
    return Traces(requests=make_requests(ids, lengths, **requests), positions=positions, steps=steps, counters=())


def make_steps(rows) -> StepTable:
    """From (step, request, start, count) rows."""
    table = np.array(rows, dtype=np.int32).reshape(-1, 4)
    return StepTable(
        step=table[:, 0].copy(), request=table[:, 1].copy(), start=table[:, 2].copy(), count=table[:, 3].copy()
    )


def with_positions(traces: Traces, **columns) -> Traces:
    return replace(traces, positions=replace(traces.positions, **columns))


def with_requests(traces: Traces, **columns) -> Traces:
    return replace(traces, requests=replace(traces.requests, **columns))


def copy_traces(traces: Traces) -> Traces:
    """The same values in other memory."""
    columns = {name: getattr(traces.positions, name) for name in PositionTable.__slots__}
    return replace(
        traces,
        positions=PositionTable(**{name: None if v is None else v.copy() for name, v in columns.items()}),
    )


def reorder(traces: Traces, order) -> Traces:
    """The same requests, submitted in another order."""
    table = traces.requests
    ends = np.cumsum(table.length)
    starts = ends - table.length
    rows = np.concatenate([np.arange(starts[j], ends[j]) for j in order]).astype(np.int64)
    columns = {name: getattr(traces.positions, name) for name in PositionTable.__slots__}
    columns_of = {name: getattr(table, name) for name in RequestTable.__slots__}
    fields = {
        name: tuple(column[j] for j in order) if isinstance(column, tuple) else column[list(order)]
        for name, column in columns_of.items()
        if column is not None
    }
    return replace(
        traces,
        requests=RequestTable(**fields),
        positions=PositionTable(**{name: None if v is None else v[rows] for name, v in columns.items()}),
    )


@dataclass(frozen=True)
class Flip:
    """One bit to flip: a column of the position table, a judged request, a position in it, a cell and a bit."""

    column: str
    request: int
    position: int
    cell: int
    bit: int


@st.composite
def captures(draw, *, digests=None) -> Traces:
    """Captures of a few judged requests and companions, with awkward floats among the values."""
    count = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(1, 6), min_size=count, max_size=count))
    companions = [False, *draw(st.lists(st.booleans(), min_size=count - 1, max_size=count - 1))]
    traces = make_traces(
        tuple(f"r{j}" for j in range(count)), lengths, companions=companions, width=draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 2**16)), samples=draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)),
        digests=draw(st.booleans()) if digests is None else digests,
    )  # fmt: skip
    table = traces.positions
    awkward = draw(st.lists(st.tuples(st.integers(0, 23), st.sampled_from(range(len(AWKWARD)))), max_size=4))
    for place, which in awkward:
        table.logprob[place % len(table.logprob)] = AWKWARD[which]
        table.topk_logprobs.reshape(-1)[place % table.topk_logprobs.size] = AWKWARD[which]
    if table.topk_ids.shape[1] > 1 and draw(st.booleans()):
        row = draw(st.integers(0, 23)) % len(table.token)
        table.topk_ids[row, -1], table.topk_logprobs[row, -1] = NO_TOKEN, np.nan
    return traces


def judged_rows(traces: Traces) -> list[int]:
    return [j for j, companion in enumerate(traces.requests.companion) if not companion]


@st.composite
def flips(draw, traces: Traces, columns) -> Flip:
    """A bit of one of the columns at a judged position."""
    column = draw(st.sampled_from([name for name in columns if getattr(traces.positions, name) is not None]))
    values = getattr(traces.positions, column)
    request = draw(st.sampled_from(judged_rows(traces)))
    cells = 1 if values.ndim == 1 else values.shape[1]
    return Flip(
        column=column,
        request=request,
        position=draw(st.integers(0, int(traces.requests.length[request]) - 1)),
        cell=draw(st.integers(0, cells - 1)),
        bit=draw(st.integers(0, values.dtype.itemsize * 8 - 1)),
    )


def flip_bit(traces: Traces, flip: Flip) -> Traces:
    """A copy of the traces with one bit flipped."""
    changed = copy_traces(traces)
    values = getattr(changed.positions, flip.column)
    row = int(traces.requests.length[: flip.request].sum()) + flip.position
    raw = values.view(np.uint64 if values.dtype.itemsize == 8 else np.uint32)
    cell = (row,) if values.ndim == 1 else (row, flip.cell)
    raw[cell] ^= raw.dtype.type(1 << flip.bit)
    return changed
