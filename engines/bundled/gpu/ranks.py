"""Launches that ranks of one model need beside those of one process (kernels/ranks.cu). It holds no buffers."""

from __future__ import annotations

from engines.bundled.gpu.interface import Launch

ADD = -1  # in a program of `complete_tree`
_MOST_BLOCKS = 4096


def take_columns(x: int, out: int, *, rows: int, stride: int, begin: int, count: int) -> Launch:
    """Columns [begin, begin + count) of x (rows, stride) as a matrix of their own; stride 0 repeats the first row."""
    return Launch(
        kernel="take_columns", grid=(_blocks(rows * count), 1, 1), block=256, shared=0,
        arguments={"x": x, "out": out, "M": rows, "K": stride, "begin": begin, "count": count},
    )  # fmt: skip


def complete_tree(sums: int, program: int, steps: int, hidden: int, size: int) -> Launch:
    """Adds to `hidden` (size floats) the tree over `sums` (`size` floats each) that `program` (steps words) writes out.

    A word of the program is the number of a sum, or ADD.
    """
    return Launch(
        kernel="complete_tree", grid=(_blocks(size), 1, 1), block=256, shared=0,
        arguments={"sums": sums, "program": program, "hidden": hidden, "size": size, "steps": steps},
    )  # fmt: skip


def _blocks(elements: int) -> int:
    return min(-(-elements // 256), _MOST_BLOCKS)
