"""Products over a dimension that ranks may share (`k_order=tree`): sums of chunks of K, added by T, rounded once.

It knows no ranks. Rules: the number of chunks follows the model alone, so a rank that holds some of them forms the very
sums that one process forms; which program holds how many chunks follows the rows, and moves no bit, because a program
holds a whole sub-tree of T.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from engines.bundled.config import ModelConfig
from engines.bundled.gpu.tensorcore import tree_kernels
from engines.bundled.gpu.tensorcore.linear import GROUP, shared_bytes
from engines.bundled.gpu.tensorcore.tiles import ONE, Tile, fit

Tensor = torch.Tensor
MOST_CHUNKS = 8  # of K, where the KV heads come out even
MOST_HELD = 8  # chunks that one program adds
MOST_SUMS = 32  # that `tree_sum_kernel` adds
_SUM_BLOCK = 1024
_WHOLE = 16  # columns of one instruction: where K does not divide evenly, a chunk is a multiple of them


class Cut(NamedTuple):
    """A tile and how many chunks of K one program adds at most."""

    tile: Tile
    held: int


# (largest number of rows, cut), ascending, as in `tiles`. Source: `benchmarks/gpu_tree.py --sweep` on an H200.
CUTS: tuple[tuple[int, Cut], ...] = (
    (16, Cut(Tile(16, 64, 128, 4, 4), 2)),
    (32, Cut(Tile(32, 64, 128, 4, 4), 4)),
    (64, Cut(Tile(64, 64, 128, 3, 4), 2)),
    (128, Cut(Tile(128, 64, 64, 4, 8), 2)),
    (256, Cut(Tile(64, 64, 128, 3, 8), 8)),
    (1024, Cut(Tile(128, 64, 128, 3, 8), 8)),
    (1 << 30, Cut(Tile(128, 256, 64, 3, 8), 1)),
)
ONE_CUT = Cut(ONE, 1)


def chunk_count(config: ModelConfig) -> int:
    """Chunks of K: one per KV head, halved while that comes out even and above MOST_CHUNKS."""
    count = config.num_key_value_heads
    while count > MOST_CHUNKS and count % 2 == 0:
        count //= 2
    return count


def chunk_width(columns: int, chunks: int) -> int:
    """Columns of a chunk of K; the last one may be short."""
    if columns % chunks == 0:
        return columns // chunks
    return -(-columns // (chunks * _WHOLE)) * _WHOLE


def choose_cut(rows: int) -> Cut:
    """The table's cut."""
    return next(cut for most, cut in CUTS if rows <= most)


def all_cuts() -> tuple[Cut, ...]:
    """Every cut that may be chosen, each once."""
    return tuple(dict.fromkeys(cut for _, cut in CUTS))


def held_of(chunks: int, most: int) -> int:
    """Chunks that one program adds: all of them, or a power of two that divides them."""
    if chunks <= most:
        return chunks
    held = 1
    while 2 * held <= most and chunks % (2 * held) == 0:
        held *= 2
    return held


def tree_product(x: Tensor, weight: Tensor, width: int, cut: Cut, dtype: torch.dtype) -> Tensor:
    """(T, N) = T over the chunk sums of x (T, K) times weight (N, K), transposed; rows of both may be strided."""
    (rows, columns), outputs = x.shape, len(weight)
    chunks = -(-columns // width)
    held = held_of(chunks, min(cut.held, MOST_HELD))
    blocks = chunks // held
    if blocks > MOST_SUMS:
        raise ValueError(f"{chunks} chunks of K: at most {MOST_SUMS} sums are added")
    tile = fit(cut.tile, shared_bytes(x.device))
    kind = dtype if blocks == 1 else torch.float32
    sums = torch.empty((blocks, rows, outputs), dtype=kind, device=x.device)
    if rows:
        tree_kernels.tree_linear_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs), blocks)](
            x, weight, sums, rows, outputs, columns, x.stride(0), weight.stride(0), width, CHUNKS=held,
            EVEN=columns == chunks * width and width % tile.inputs == 0, BM=tile.rows, BN=tile.outputs, BK=tile.inputs,
            GROUP=GROUP, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    if blocks == 1 or not rows:
        return sums[0]
    out = torch.empty((rows, outputs), dtype=dtype, device=x.device)
    tree_kernels.tree_sum_kernel[(triton.cdiv(out.numel(), _SUM_BLOCK),)](
        sums, out, out.numel(), COUNT=blocks, BLOCK=_SUM_BLOCK, num_warps=4
    )
    return out


class TreeLinear:
    """The product of one process, with the table's cut for the rows or with one cut for all."""

    def __init__(self, chunks: int, *, by_rows: bool) -> None:
        self.chunks, self._by_rows = chunks, by_rows
        self.name = "tree, cuts by rows" if by_rows else "tree, one cut"

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """(T, N), of x's dtype."""
        return tree_product(x, weight, chunk_width(x.shape[1], self.chunks), self._cut(len(x)), x.dtype)

    def over(self, chunks: int) -> TreeLinear:
        """The same for K of another number of chunks."""
        return TreeLinear(chunks, by_rows=self._by_rows)

    def sums(self, x: Tensor, weight: Tensor, width: int) -> Tensor:
        """(T, N) float32: T over the chunks of `width` columns that x and weight have, for a rank's sub-tree."""
        return tree_product(x, weight, width, self._cut(len(x)), torch.float32)

    def _cut(self, rows: int) -> Cut:
        return choose_cut(rows) if self._by_rows else ONE_CUT

    def padded(self, rows: int) -> int:
        """Any number will do."""
        return rows
