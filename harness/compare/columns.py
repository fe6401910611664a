"""Finds differing rows of two columns, block by block: the inner loop of every comparison.

It does not know requests, rules or fields. Rules: values are compared as integers of their bits; a block fits in the
processor's cache; the result is the sorted row numbers that differ, so equal data costs one pass and no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.traces import Float32, Int32, Int64, UInt64

Bits = npt.NDArray[np.int32] | npt.NDArray[np.int64]
BLOCK_CELLS = 65_536  # two operands of int32 and the mask take 576 KiB: they fit in a 1 or 2 MiB L2 cache


class Run(NamedTuple):
    """Rows [reference, reference + rows) against rows [variant, variant + rows); `out` numbers the first."""

    reference: int
    variant: int
    out: int
    rows: int


def join_runs(reference: Int64, variant: Int64, out: Int64, counts: Int64) -> tuple[Run, ...]:
    """Runs of requests, neighbours joined where they touch on all three sides. Empty ones are left out."""
    kept = counts > 0
    sides = np.stack([reference[kept], variant[kept], out[kept]])  # (3, R)
    rows = counts[kept]
    if not rows.size:
        return ()
    touches = (sides[:, 1:] == sides[:, :-1] + rows[:-1]).all(axis=0)
    heads = np.flatnonzero(np.concatenate(([True], ~touches)))
    joined = np.concatenate((sides[:, heads], np.add.reduceat(rows, heads)[None]))
    return tuple(Run(*run) for run in joined.T.tolist())


def bits(column: Int32 | Float32 | UInt64) -> Bits:
    """A (N,) or (N, W) column of 4- or 8-byte values as (N, W) signed integers of the same bits, without a copy."""
    rows = np.ascontiguousarray(column if column.ndim == 2 else column[:, None])
    return rows.view(np.int64) if column.dtype.itemsize == 8 else rows.view(np.int32)


def differing_rows(reference: Bits, variant: Bits, runs: tuple[Run, ...]) -> Int64:
    """Numbers (by the runs' `out`) of the rows in which any of the W values differs, ascending.

    Both are (N, W) of one integer type and the runs ascend in `out`. The cost is one pass over both, and work per
    differing value.
    """
    most = max(1, BLOCK_CELLS // max(1, reference.shape[1]))  # rows per block
    unequal = np.empty(most * reference.shape[1], dtype=np.bool_)
    found: list[Int64] = []
    for group in _group(runs, most):
        first, *others = group
        if others:
            a = np.concatenate([reference[run.reference : run.reference + run.rows] for run in group])
            b = np.concatenate([variant[run.variant : run.variant + run.rows] for run in group])
        else:
            a = reference[first.reference : first.reference + first.rows]
            b = variant[first.variant : first.variant + first.rows]
        mask = unequal[: a.size]
        np.not_equal(a.reshape(-1), b.reshape(-1), out=mask)
        cells = np.flatnonzero(mask)
        if cells.size:
            found.append(_numbers(cells // reference.shape[1], group))
    return _merge(found)


def _group(runs: tuple[Run, ...], most: int) -> Iterator[list[Run]]:
    """The runs in groups of at most `most` rows: long ones cut, short ones put together, in their order."""
    group: list[Run] = []
    rows = 0
    for run in runs:
        if group and rows + run.rows > most:
            yield group
            group, rows = [], 0
        if run.rows <= most:
            group.append(run)
            rows += run.rows
            continue
        for start in range(0, run.rows, most):
            count = min(most, run.rows - start)
            yield [Run(run.reference + start, run.variant + start, run.out + start, count)]
    if group:
        yield group


def _numbers(rows: Int64, group: list[Run]) -> Int64:
    """The `out` numbers of rows that count through a group."""
    if len(group) == 1:
        return rows + group[0].out
    counts = np.array([run.rows for run in group], dtype=np.int64)
    begins = np.cumsum(counts) - counts
    which = np.searchsorted(begins, rows, side="right") - 1
    return rows - begins[which] + np.array([run.out for run in group], dtype=np.int64)[which]


def _merge(found: list[Int64]) -> Int64:
    """All rows once, in order: a row with several differing values was found several times."""
    if not found:
        return np.empty(0, dtype=np.int64)
    rows = np.concatenate(found).astype(np.int64, copy=False)
    first: Int64 = rows[np.concatenate(([True], np.diff(rows) != 0))]
    return first
