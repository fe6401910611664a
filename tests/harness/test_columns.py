"""The inner loop: rows that differ, against plain Python, over runs in any order and across blocks."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.compare import columns
from harness.compare.columns import Run, bits, differing_rows, join_runs


@given(st.data(), st.sampled_from([1, 3, 7]), st.sampled_from([np.int32, np.float32, np.uint64]))
@settings(max_examples=150)
def test_equals_a_plain_loop(data, width, dtype):
    block = data.draw(st.sampled_from([4, 16, 65_536]))
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    order = data.draw(st.permutations(range(len(lengths))))
    n = sum(lengths)
    a = np.arange(n * width, dtype=dtype).reshape(n, width)
    touched = data.draw(st.lists(st.integers(0, max(0, n * width - 1)), max_size=5)) if n else []
    counts = np.array(lengths)
    starts = np.cumsum(counts) - counts
    shuffled = np.concatenate([a[starts[j] : starts[j] + counts[j]] for j in order]) if n else a
    where = np.empty(len(lengths), dtype=np.int64)
    moved = counts[list(order)]
    where[list(order)] = np.cumsum(moved) - moved
    for cell in touched:
        shuffled.reshape(-1)[cell] += 1
    gaps = data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    out = starts + 100 + np.cumsum(gaps)
    expected = [
        int(out[j]) + i
        for j in range(len(lengths))
        for i in range(lengths[j])
        if (a[starts[j] + i] != shuffled[where[j] + i]).any()
    ]
    runs = join_runs(starts, where, out, counts)
    before, columns.BLOCK_CELLS = columns.BLOCK_CELLS, block
    try:
        assert differing_rows(bits(a), bits(shuffled), runs).tolist() == expected
    finally:
        columns.BLOCK_CELLS = before


def test_runs_join_where_all_three_sides_touch():
    starts = np.array([0, 3, 5, 5, 9])
    counts = np.array([3, 2, 0, 4, 1])
    assert join_runs(starts, starts + 7, starts, counts) == (Run(0, 7, 0, 10),)
    apart = np.array([7, 10, 12, 20, 24])
    assert join_runs(starts, apart, starts, counts) == (Run(0, 7, 0, 5), Run(5, 20, 5, 5))
    assert join_runs(starts, starts + 7, apart, counts) == (Run(0, 7, 7, 5), Run(5, 12, 20, 5))
    assert join_runs(apart, starts, starts, counts) == (Run(7, 0, 0, 5), Run(20, 5, 5, 5))
    assert join_runs(starts, starts, starts, counts * 0) == ()


def test_bits_are_a_view():
    column = np.array([0.0, -0.0], dtype=np.float32)
    assert bits(column).tolist() == [[0], [-(2**31)]]
    assert np.shares_memory(bits(column), column)
