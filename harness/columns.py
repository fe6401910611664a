"""Finds differing rows of two columns, block by block: the inner loop of every comparison.

It does not know requests, rules or fields. Rules: values are compared as integers of their bits; a block fits in the
processor's cache; the result is the sorted row numbers that differ, so equal data costs one pass and no memory.
"""

from __future__ import annotations

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
    rows = np.ascontiguousarray(column).reshape(len(column), -1)
    return rows.view(np.int64) if column.dtype.itemsize == 8 else rows.view(np.int32)


def differing_rows(reference: Bits, variant: Bits, runs: tuple[Run, ...]) -> Int64:
    """Numbers (by the runs' `out`) of the rows in which any of the W values differs, ascending.

    Both are (N, W) of one integer type; the cost is one pass over both plus work per differing value.
    """
    width = reference.shape[1]
    a, b = reference.reshape(-1), variant.reshape(-1)
    unequal = np.empty(BLOCK_CELLS, dtype=np.bool_)
    found: list[Int64] = []
    for run in runs:
        a_cells, b_cells = run.reference * width, run.variant * width
        for start in range(0, run.rows * width, BLOCK_CELLS):
            size = min(BLOCK_CELLS, run.rows * width - start)
            mask = unequal[:size]
            left, right = a_cells + start, b_cells + start
            np.not_equal(a[left : left + size], b[right : right + size], out=mask)
            cells = np.flatnonzero(mask)
            if cells.size:
                found.append((cells + start) // width + run.out)
    return _merge(found)


def _merge(found: list[Int64]) -> Int64:
    """Sorted unique rows; blocks may split a row, runs may come in any order of `out`."""
    if not found:
        return np.empty(0, dtype=np.int64)
    rows = np.concatenate(found).astype(np.int64, copy=False)
    steps = np.diff(rows)
    if steps.size and int(steps.min()) < 0:
        rows = np.sort(rows)
        steps = np.diff(rows)
    return rows[np.concatenate(([True], steps != 0))]
