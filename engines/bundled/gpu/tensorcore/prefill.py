"""Steps that are not decoding alone as recorded CUDA graphs: one per number of tokens and of pieces, padded.

It does not know requests. Rules: every piece is cut into tiles, also one of a single token; rows and tiles of padding
write nothing; which graph a step runs in moves no bit of `tensorcore`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from engines.bundled.batch import StepBatch
from engines.bundled.gpu.tensorcore.decode import MOST_GRAPHS, Pass, record
from engines.bundled.gpu.tensorcore.layout import cut, host, join, lay_out_tiles, to_device
from engines.bundled.gpu.tensorcore.operators import Heads, Rows

TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048)
PIECES = (1, 8, 64, 256)
MOST_TOKENS = TOKENS[-1]


def padded_tokens(count: int) -> int:
    """Rows of a step of `count` tokens; steps too large for a graph keep theirs."""
    return next((size for size in TOKENS if size >= count), count)


class _Recorded(NamedTuple):
    """A graph, the tensor it reads its integers from and the one it leaves its logits in."""

    graph: torch.cuda.CUDAGraph
    words: torch.Tensor
    logits: torch.Tensor


class PrefillGraphs:
    """Graphs by (tokens, pieces, keys of a chunk)."""

    def __init__(self, run: Pass, heads_of: Callable[[int], Heads], pitch: int, device: str) -> None:
        """`pitch` is the most pages of a sequence."""
        self._run, self._heads_of, self._pitch, self._device = run, heads_of, pitch, device
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[tuple[int, int, int], _Recorded] = {}

    def takes(self, batch: StepBatch) -> bool:
        """True for a step of so few tokens and sequences that there is a graph for it."""
        return len(batch.token) <= MOST_TOKENS and self._pieces(batch) <= PIECES[-1]

    def run(self, batch: StepBatch) -> torch.Tensor:
        """Logits (W, vocab); they hold until the next step."""
        longest = int(batch.position.max()) + 1
        heads = self._heads_of(longest)
        tokens = padded_tokens(len(batch.token))
        pieces = next(size for size in PIECES if size >= self._pieces(batch))
        parts = lay_out_tiles(batch, heads, tokens, pieces, self._pitch)
        found = self._graphs.get((tokens, pieces, heads.keys))
        if found is None:
            if len(self._graphs) >= MOST_GRAPHS:
                torch.cuda.synchronize()
                self._graphs.clear()
            words = to_device(join(parts), self._device)
            found = self._record(words, [part.size for part in parts], longest)
            self._graphs[tokens, pieces, heads.keys] = found
        found.words.copy_(host(join(parts), self._device), non_blocking=True)
        found.graph.replay()
        return found.logits[: len(batch.wanted)]

    def _pieces(self, batch: StepBatch) -> int:
        return max(len(batch.page_table), len(batch.wanted))

    def _record(self, words: torch.Tensor, sizes: list[int], longest: int) -> _Recorded:
        token, sequence, position, first, count, owner, wanted, pages = cut(sizes, words)
        rows = Rows(
            token=token, sequence=sequence, position=position, pages=pages.view(-1, self._pitch), alone=token[:0],
            tile_token=first, tile_count=count, tile_sequence=owner, pieces=(), chunks=1,
        )  # fmt: skip
        graph, logits = record(lambda: self._run(rows, wanted, longest), self._pool)
        return _Recorded(graph, words, logits)
