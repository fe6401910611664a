"""Decode steps as recorded CUDA graphs over fixed buffers: one per number of seats and bound on the longest sequence.

It does not know requests. Rules: a row is a seat; rows without a sequence stand at position -1 and write nothing;
a graph ends by writing each row's argmax where the next step reads its token and by moving positions on, so that it can
be replayed without the host; how many seats and keys a graph was recorded for moves no bit of `tensorcore`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from engines.bundled.batch import StepBatch
from engines.bundled.config import Int32
from engines.bundled.gpu.tensorcore.layout import host, padded_chunks, to_device
from engines.bundled.gpu.tensorcore.linear import SMALL
from engines.bundled.gpu.tensorcore.operators import KEYS, Rows, pick

# Rows, which rows' logits are wanted (None: all) and a bound on the longest sequence, to logits.
Pass = Callable[[Rows, torch.Tensor | None, int], torch.Tensor]
MOST_GRAPHS = 64


class DecodeGraphs:
    """The seats' buffers and the graphs over them."""

    def __init__(self, run: Pass, keys_of: Callable[[int], int], seats: int, pitch: int, device: str) -> None:
        """`seats` is the most sequences of a step, `pitch` the most pages of a sequence."""
        self._run, self._keys_of, self._device = run, keys_of, device
        self.seats = next((size for size in SMALL if size >= seats), SMALL[-1])
        self._sizes = tuple(size for size in SMALL if size <= self.seats)
        self.token, self.sequence = (torch.zeros(self.seats, dtype=torch.int32, device=device) for _ in range(2))
        self.sequence += torch.arange(self.seats, dtype=torch.int32, device=device)
        self.position = torch.full((self.seats,), -1, dtype=torch.int32, device=device)
        self.pages = torch.zeros((self.seats, pitch), dtype=torch.int32, device=device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def takes(self, batch: StepBatch) -> bool:
        """True for a step in which every token is alone in its sequence and all logits are wanted."""
        count = len(batch.token)
        return (
            count <= self.seats
            and len(batch.wanted) == count
            and len(batch.page_table) == count
            and bool((batch.sequence == np.arange(count)).all())
        )

    def run(self, batch: StepBatch) -> torch.Tensor:
        """Logits of such a step."""
        count = len(batch.token)
        graph, logits = self.graph(count, int(batch.position.max()) + 1)
        self.position.fill_(-1)
        self._write(self.token, batch.token)
        self._write(self.position, batch.position)
        table = to_device(np.maximum(batch.page_table, 0), self._device)
        self.pages[:count, : table.shape[1]] = table
        graph.replay()
        return logits[:count]

    def _write(self, to: torch.Tensor, values: Int32) -> None:
        to[: len(values)].copy_(host(values, self._device), non_blocking=True)

    def graph(self, count: int, longest: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """The graph for at least `count` seats and `longest` keys, and where it leaves the logits."""
        size = next(size for size in self._sizes if size >= count)
        bound = padded_chunks(longest, KEYS) * KEYS
        found = self._graphs.get((size, bound))
        if found is None:
            if len(self._graphs) >= MOST_GRAPHS:
                torch.cuda.synchronize()
                self._graphs.clear()
            found = self._graphs[size, bound] = self._record(size, bound)
        return found

    def _record(self, size: int, bound: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        kept = self.token.clone(), self.position.clone()
        self.position.fill_(-1)
        graph, logits = record(lambda: self._step(size, bound), self._pool)
        self.token.copy_(kept[0])
        self.position.copy_(kept[1])
        return graph, logits

    def _step(self, size: int, bound: int) -> torch.Tensor:
        none = self.token[:0]
        rows = Rows(
            token=self.token[:size], sequence=self.sequence[:size], position=self.position[:size],
            pages=self.pages[:size], alone=self.sequence[:size], tile_token=none, tile_count=none, tile_sequence=none,
            pieces=(), chunks=padded_chunks(bound, self._keys_of(bound)),
        )  # fmt: skip
        logits = self._run(rows, None, bound)
        pick(logits, self.token[:size], self.position[:size])
        return logits


def record(step: Callable[[], torch.Tensor], pool: Any) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:  # noqa: ANN401 - torch's handle
    """A graph of `step`, which runs once before, so that kernels are compiled and handles made outside the graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = step()
    return graph, result
