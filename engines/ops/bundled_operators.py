"""The operators of the bundled engine: its kernels, in the order of sums of one arithmetic.

Rules: `portable` takes the order from the model alone; `free` takes it from the call, as fast engines do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from engines.bundled.arithmetic.free import free_order, split_width
from engines.bundled.arithmetic.order import Order, portable_order
from engines.bundled.arithmetic.rope import rope_table
from engines.bundled.config import ModelConfig
from engines.bundled.kernels.interface import Pages, Rows
from engines.bundled.kernels.library import load
from engines.ops.interface import AttentionFunction, Bits, Float32, Heads, Piece, RowFunction

DTYPES = SURVEYED = ("float32",)
_PAGE = 16


class BundledOperators:
    """`portable` or `free` on the CPU."""

    def __init__(self, config: ModelConfig, arithmetic: str, threads: int) -> None:
        self._config, self._free, self._threads = config, arithmetic == "free", threads
        self._kernels = load("auto", "auto")

    def _order(self, rows: int, longest: int = 1) -> Order:
        if not self._free:
            return portable_order(self._config)
        return free_order(self._config, rows=rows, longest=longest, threads=self._threads, tuning=0)

    def _chunk(self, rows: int, columns: int) -> int:
        if self._free:
            return split_width(columns, rows=rows, threads=self._threads, tuning=0)
        return portable_order(self._config).qkv

    def linear(self, weight: Float32) -> RowFunction:
        packed = self._kernels.pack(weight, self._threads)

        def run(x: Float32) -> Bits:
            out = np.empty((len(x), packed.rows), np.float32)
            self._kernels.linear(x, packed, self._chunk(*x.shape), self._threads, out)
            return out.view(np.int32)

        return run

    def rms_norm(self, gain: Float32, eps: float) -> RowFunction:
        def run(x: Float32) -> Bits:
            out = np.empty_like(x)
            self._kernels.rms_norm(x, gain, eps, self._threads, out)
            return out.view(np.int32)

        return run

    def log_softmax(self) -> RowFunction:
        return lambda x: self._kernels.log_softmax(x, self._threads).view(np.int32)

    def swiglu(self) -> RowFunction:
        def run(x: Float32) -> Bits:
            out = np.empty((len(x), x.shape[1] // 2), np.float32)
            self._kernels.swiglu(x, self._threads, out)
            return out.view(np.int32)

        return run

    def rope(self, heads: Heads, position: int) -> RowFunction:
        table, rest = rope_table(position + 1, heads.dim, 10000.0), 2 * heads.kv_heads * heads.dim

        def run(x: Float32) -> Bits:
            qkv = np.concatenate([x, np.zeros((len(x), rest), np.float32)], axis=1)
            rows, pages = _one_page_each(len(x), position, heads)
            self._kernels.rope_store(qkv, table, rows, pages, self._threads)
            return np.ascontiguousarray(qkv[:, : x.shape[1]]).view(np.int32)

        return run

    def attention(self, heads: Heads, sequences: Sequence[Float32]) -> AttentionFunction:
        still = np.concatenate([np.ones(heads.dim // 2), np.zeros(heads.dim // 2)]).astype(np.float32)

        @lru_cache(maxsize=1)
        def prepare(pieces: tuple[Piece, ...]) -> tuple[Float32, Rows, Pages]:
            angles = np.tile(still, (max(piece.keys for piece in pieces), 1))  # cosine 1, sine 0: stored as they are
            rows, pages = _paged([Piece(piece.keys, piece.keys) for piece in pieces], heads)
            stored = np.concatenate([sequences[i][: piece.keys] for i, piece in enumerate(pieces)])
            self._kernels.rope_store(stored, angles, rows, pages, self._threads)
            asked = [sequences[i][piece.keys - piece.tokens : piece.keys] for i, piece in enumerate(pieces)]
            return np.concatenate(asked), _paged(pieces, heads)[0], pages

        def run(pieces: Sequence[Piece]) -> Bits:
            qkv, rows, pages = prepare(tuple(pieces))
            out: Float32 = np.empty((len(qkv), heads.heads * heads.dim), np.float32)
            chunk = self._order(len(qkv), max(piece.keys for piece in pieces)).key_chunk
            self._kernels.attend(qkv, rows, pages, heads.heads, chunk, 0, self._threads, out)
            last: Float32 = out[pieces[0].tokens - 1]
            return last.view(np.int32)

        return run

    def experts(self, router: Float32, experts: Sequence[tuple[Float32, Float32]], per_token: int) -> RowFunction:
        from engines.bundled.moe import Experts, route, run_experts

        pack, threads = self._kernels.pack, self._threads
        packed = Experts(
            router=pack(router, threads),
            first=0,
            gate_up=tuple(pack(gate_up, threads) for gate_up, _ in experts),
            down=tuple(pack(down, threads) for _, down in experts),
            per_token=per_token,
        )

        def run(x: Float32) -> Bits:
            order = self._order(len(x))
            routing = route(self._kernels, packed, x, order, threads)
            outputs = run_experts(self._kernels, packed, x, routing, order, threads)
            return self._kernels.combine(outputs, routing.weight, threads).view(np.int32)

        return run


def _one_page_each(count: int, position: int, heads: Heads) -> tuple[Rows, Pages]:
    """Rows at one position, each of a sequence of its own whose pages are all the same one."""
    own = np.arange(count, dtype=np.int32)
    table = np.repeat(own[:, None], position // _PAGE + 1, axis=1)
    rows = Rows(sequence=own, position=np.full(count, position, np.int32), page_table=table)
    return rows, _pages(count, heads)


def _pages(count: int, heads: Heads) -> Pages:
    shape = (count, heads.kv_heads)
    return Pages(
        keys=np.zeros((*shape, heads.dim, _PAGE), np.float32), values=np.zeros((*shape, _PAGE, heads.dim), np.float32)
    )


def _paged(pieces: Sequence[Piece], heads: Heads) -> tuple[Rows, Pages]:
    """Rows of the newest tokens of each piece, and pages for all of its keys, one sequence after the other."""
    each = [-(-piece.keys // _PAGE) for piece in pieces]
    ends = np.cumsum(each)
    table = np.zeros((len(pieces), max(each)), np.int32)
    for row, count, end in zip(table, each, ends, strict=True):
        row[:count] = np.arange(end - count, end)
    rows = Rows(
        sequence=np.repeat(np.arange(len(pieces)), [piece.tokens for piece in pieces]).astype(np.int32),
        position=np.concatenate([np.arange(p.keys - p.tokens, p.keys) for p in pieces]).astype(np.int32),
        page_table=table,
    )
    return rows, _pages(int(ends[-1]), heads)
