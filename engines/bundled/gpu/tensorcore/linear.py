"""Ways to form x W^T in bfloat16: by tiles, by cuBLASLt, split along K by rows, or as plain torch does.

They know no model. Rules: `Tiled` and `CublasLt` give one chain over K per element, whatever the rows, which the
start-up self-test holds them to; `Split` follows the rows on purpose; `Plain` promises nothing.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
import triton

from engines.bundled.gpu.order import split_width
from engines.bundled.gpu.tensorcore import kernels
from engines.bundled.gpu.tensorcore.tiles import ONE, Tile, choose_tile, fit

Tensor = torch.Tensor
SMALL = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)  # and the multiples of the last
GROUP = 8  # row tiles that share the outputs' weights in the cache


class Linear(Protocol):
    """x (T, K) times weight (N, K), transposed."""

    name: str

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """(T, N), of x's dtype."""

    def padded(self, rows: int) -> int:
        """The number of rows a step of `rows` tokens should have."""


class Tiled:
    """Our kernel, with the table's tile for the rows or with one tile for all."""

    def __init__(self, *, by_rows: bool) -> None:
        self._by_rows = by_rows
        self.name = "tiles by rows" if by_rows else "one tile"

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return multiply(x, weight, choose_tile(len(x), len(weight)) if self._by_rows else ONE)

    def padded(self, rows: int) -> int:
        """Any number will do."""
        return rows


class CublasLt:
    """torch's product in a process that closed cuBLASLt's split-K off; trusted after the self-test alone.

    It is asked for shapes and numbers of rows alone that the self-test asked it for: other numbers are padded, and what
    is beyond goes to our kernel with one tile, which has the same bits.
    """

    name = "cuBLASLt without split-K"

    def __init__(self) -> None:
        self._trusted: dict[tuple[int, ...], int] = {}

    def trust(self, weight: Tensor, rows: int) -> None:
        """Up to `rows` rows of a matrix of this shape are in the test."""
        self._trusted[tuple(weight.shape)] = rows

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        rows = len(x)
        wanted = self.padded(rows)
        if wanted > self._trusted.get(tuple(weight.shape), 0):
            return multiply(x, weight, ONE)
        if wanted == rows:
            return torch.mm(x, weight.t())
        return torch.mm(torch.nn.functional.pad(x, (0, 0, 0, wanted - rows)), weight.t())[:rows]

    def padded(self, rows: int) -> int:
        """The next of `row_sizes`."""
        return next((size for size in SMALL if size >= rows), -(-rows // SMALL[-1]) * SMALL[-1])


class Plain:
    """torch's product as it is."""

    name = "torch"

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, weight)

    def padded(self, rows: int) -> int:
        """Any number will do."""
        return rows


class Split:
    """K split further for fewer rows, partial sums rounded to x's type as torch's own split-K does: the control."""

    name = "split by rows"

    def __init__(self, tuning: int) -> None:
        self._tuning = tuning

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        (rows, columns), outputs = x.shape, len(weight)
        width = split_width(columns, rows=rows, tuning=self._tuning)
        splits = triton.cdiv(columns, width)
        partial = torch.empty((splits, rows, outputs), dtype=x.dtype, device=x.device)
        tile = 16 if rows <= 16 else 64
        kernels.split_kernel[(triton.cdiv(rows, tile), triton.cdiv(outputs, 64), splits)](
            x, weight, partial, rows, width, outputs, columns, BM=tile, BN=64, BK=64, num_warps=4, num_stages=3
        )
        return partial.sum(0, dtype=torch.float32).to(x.dtype)

    def padded(self, rows: int) -> int:
        """Any number will do."""
        return rows


def row_sizes(most: int) -> tuple[int, ...]:
    """The numbers of rows of at most `most` tokens that `CublasLt` is ever asked for."""
    sizes = (*SMALL, *range(2 * SMALL[-1], most + SMALL[-1], SMALL[-1]))
    return tuple(size for size in sizes if size <= CublasLt().padded(most))


@cache
def shared_bytes(device: torch.device) -> int:
    """Memory that one block may use on the device."""
    if device.type != "cuda":
        return 1 << 20
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["max_shared_mem"])


def multiply(x: Tensor, weight: Tensor, tile: Tile) -> Tensor:
    """One product by our kernel with one tile."""
    (rows, columns), outputs = x.shape, len(weight)
    tile = fit(tile, shared_bytes(x.device))
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if rows:
        kernels.linear_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs),)](
            x, weight, out, rows, outputs, columns, EVEN=columns % tile.inputs == 0,
            BM=tile.rows, BN=tile.outputs, BK=tile.inputs, GROUP=GROUP, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out
