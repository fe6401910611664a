"""Tile shapes of the matrix product by rows, and attention's: shipped data, measured on an H200, not tuned at run time.

It launches nothing. Rules: a tile decides who computes an element and when, never its expression; the start-up
self-test holds every tile of the table to the bits of the first one, on the model's own shapes.
"""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """Rows, outputs and inputs of a block, pipeline stages and warps of 32 threads."""

    rows: int
    outputs: int
    inputs: int
    stages: int
    warps: int


ONE = Tile(128, 128, 64, 3, 8)  # what is used for every number of rows where the table does not pass its self-test

# (largest number of rows, tile), ascending; the last holds for any larger one. Source: 39 shapes timed at ten numbers
# of rows; `benchmarks/gpu_tensorcore.py` prints the ratios to cuBLAS.
NARROW: tuple[tuple[int, Tile], ...] = (
    (1, Tile(16, 64, 256, 3, 4)),
    (16, Tile(16, 32, 256, 3, 4)),
    (32, Tile(32, 32, 256, 3, 4)),
    (64, Tile(64, 32, 256, 3, 4)),
    (128, Tile(64, 64, 256, 3, 4)),
    (256, Tile(64, 128, 128, 3, 4)),
    (512, Tile(128, 128, 128, 3, 8)),
    (1 << 30, Tile(128, 128, 64, 4, 4)),
)
WIDE: tuple[tuple[int, Tile], ...] = (
    (16, Tile(16, 128, 128, 3, 4)),
    (32, Tile(32, 128, 128, 3, 4)),
    (64, Tile(64, 128, 128, 3, 4)),
    (128, Tile(128, 128, 128, 3, 8)),
    (512, ONE),
    (1 << 30, Tile(128, 128, 64, 4, 4)),
)
WIDE_FROM = 8193  # outputs


class Form(NamedTuple):
    """How attention is computed. `keys` and `step` are part of the order of sums; the others move no bit."""

    keys: int  # of a split, by absolute position
    step: int  # keys that are scored at a time, a power of two
    decode_warps: int
    decode_stages: int
    rows: int  # query rows of a prefill tile
    prefill_warps: int
    prefill_stages: int
    merged: int  # splits whose loads are under way at once


# Source: `benchmarks/gpu_attention.py` on an H200.
FORM = Form(keys=512, step=64, decode_warps=2, decode_stages=3, rows=128, prefill_warps=8, prefill_stages=3, merged=8)


def fit_stages(stages: int, *, step: int, block: int, rows: int, shared: int) -> int:
    """As many of `stages` as `shared` bytes hold beside `rows` queries of dimension `block`."""
    return max(1, min(stages, (shared - 2 * rows * block - 4096) // (4 * step * block)))


def choose_tile(rows: int, outputs: int) -> Tile:
    """The table's tile."""
    table = WIDE if outputs >= WIDE_FROM else NARROW
    return next(tile for most, tile in table if rows <= most)


def fit(tile: Tile, shared: int) -> Tile:
    """The tile with as many pipeline stages as `shared` bytes of a block's memory hold; stages move no bit."""
    stage = 2 * (tile.rows + tile.outputs) * tile.inputs
    return tile._replace(stages=max(1, min(tile.stages, shared // stage)))


def all_tiles() -> tuple[Tile, ...]:
    """Every tile that may be chosen, each once."""
    return tuple(dict.fromkeys([ONE, *(tile for _, tile in (*NARROW, *WIDE))]))
