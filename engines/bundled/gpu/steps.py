"""One engine step laid out for the GPU: its integers in one array, its attention tiles, its workspaces.

It launches nothing. Rules: a tile holds consecutive tokens of one sequence; workspaces bound the tokens that attend at
the same time, never what they compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from engines.bundled.batch import StepBatch
from engines.bundled.config import Int32
from engines.bundled.gpu.interface import Shape
from engines.bundled.gpu.operators import QUERIES

ATTENTION_FLOATS = 1 << 27  # of scores and outputs at a time: 512 MiB


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """What the launches of one step depend on. `words` is uploaded as it is; offsets count words."""

    words: Int32  # token, sequence, position (T each), wanted (W), tile rows and counts, page table (S x pitch)
    tokens: int
    wanted: int
    tiles: tuple[tuple[int, int], ...]  # (first token, tokens)
    pitch: int  # pages per row of the table
    chunks: int  # of keys of the longest sequence, or more
    single: bool  # every token is the newest of a sequence of its own

    @property
    def tile_offset(self) -> int:
        """Where the tiles start."""
        return 3 * self.tokens + self.wanted

    @property
    def table_offset(self) -> int:
        """Where the page table starts."""
        return self.tile_offset + 2 * len(self.tiles)


def lay_out(batch: StepBatch, shape: Shape, pitch: int, key_chunk: int) -> Step:
    """The step of a batch; `pitch` is the most pages a sequence can have."""
    tokens, counts = len(batch.token), np.bincount(batch.sequence)
    single = bool(np.all(counts == 1))
    tiles = tuple(cut_tiles(batch.sequence, 1 if single else QUERIES // (shape.heads // shape.kv_heads)))
    table = np.zeros((len(batch.page_table), pitch), np.int32)
    table[:, : batch.page_table.shape[1]] = batch.page_table
    parts = (batch.token, batch.sequence, batch.position, batch.wanted)
    flat = np.array(tiles, np.int32).reshape(-1, 2)
    chunks = int(batch.position.max()) // key_chunk + 1
    return Step(
        words=np.concatenate([*parts, flat[:, 0], flat[:, 1], table.reshape(-1)]).astype(np.int32),
        tokens=tokens,
        wanted=len(batch.wanted),
        tiles=tiles,
        pitch=pitch,
        chunks=1 << (chunks - 1).bit_length(),
        single=single,
    )


def execution(steps: int, recorded: int) -> str:
    """How steps have run so far, in words."""
    if not steps:
        return "no step yet"
    return "recorded graphs" if recorded else "launches"


def cut_tiles(sequence: Int32, most: int) -> list[tuple[int, int]]:
    """(first token, tokens) of runs of one sequence, at most `most` tokens each."""
    starts = [0, *(np.flatnonzero(np.diff(sequence)) + 1).tolist(), len(sequence)]
    return [(first, min(most, end - first)) for start, end in pairwise(starts) for first in range(start, end, most)]


def attention_blocks(step: Step, shape: Shape, key_chunk: int) -> list[tuple[int, int]]:
    """Ranges of tiles that attend together, so that scores and outputs stay within ATTENTION_FLOATS."""
    per_token = shape.heads * step.chunks * (key_chunk + shape.dim)
    most = max(ATTENTION_FLOATS // per_token, QUERIES)
    blocks, begin = [], 0
    for i, (first, count) in enumerate(step.tiles):
        if first + count - step.tiles[begin][0] > most:
            blocks.append((begin, i))
            begin = i
    return [*blocks, (begin, len(step.tiles))]


def attention_words(tokens: int, shape: Shape, chunks: int, key_chunk: int) -> int:
    """Tokens that one attention block may hold, in the workspace of `tokens` tokens."""
    per_token = shape.heads * chunks * (key_chunk + shape.dim)
    return min(tokens, max(ATTENTION_FLOATS // per_token, QUERIES))
