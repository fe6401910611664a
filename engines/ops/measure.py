"""Calls an operator under many conditions and compares the bits of one row with what it gives alone.

It does not know libraries. Rules: bits are compared, never floats; a condition is judged over every count listed, and
the counts are part of the finding; nothing that was not called is called invariant.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from engines.ops.interface import AttentionFunction, Bits, Float32, Piece, RowFunction

COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 100, 128, 192, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """What one condition does to a row. `classes` are the counts in groups of equal bits, the first holds the first."""

    condition: str  # "rows" | "place" | "padding" | "chunking" | "threads"
    classes: tuple[tuple[int, ...], ...]
    ulp: int  # the largest distance from the first class, in units in the last place of the dtype

    @property
    def varies_from(self) -> int | None:
        """The smallest count whose bits differ from the first's; None: invariant."""
        return min(self.classes[1]) if len(self.classes) > 1 else None


def classify(condition: str, results: Mapping[int, Bits]) -> Variation:
    """Groups counts by the bits of their results, in the order given. Raises ValueError for fewer than two."""
    if len(results) < 2:
        raise ValueError(f"{condition}: expected at least two results to compare, got {len(results)}")
    groups: dict[bytes, list[int]] = {}
    for count, bits in results.items():
        groups.setdefault(bits.tobytes(), []).append(count)
    first = next(iter(results.values()))
    ulp = max(ulp_distance(first, bits) for bits in results.values())
    return Variation(condition=condition, classes=tuple(map(tuple, groups.values())), ulp=ulp)


def ulp_distance(a: Bits, b: Bits) -> int:
    """The largest distance of two arrays of bit patterns, counted in floats between them. -0.0 and 0.0 are 1 apart."""
    return int(np.abs(_ordered(a) - _ordered(b)).max())


def _ordered(bits: Bits) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Integers in the order of the floats they stand for."""
    lowest = int(np.iinfo(bits.dtype).min)
    wide = bits.astype(np.int64)
    return np.where(wide < 0, lowest - wide - 1, wide)


def vary_rows(run: RowFunction, x: Float32, most: int) -> tuple[Variation, Variation, dict[int, Bits]]:
    """The first row beside others, and at the end of them. x (most or more, K). Also: its bits at each count."""
    counts = [count for count in COUNTS if count <= most]
    alone = run(x[:1])[0]
    beside, last = {1: alone}, {1: alone}
    for count in counts[1:]:
        beside[count] = run(x[:count])[0].copy()
        moved = x[:count].copy()
        moved[-1] = x[0]
        last[count] = run(moved)[-1].copy()
    return classify("rows", beside), classify("place", last), beside


def vary_attention(run: AttentionFunction, keys: int, most: int) -> tuple[Variation, ...]:
    """A token with `keys` keys: beside others like it, padded to longer ones, and at the end of a piece of a prompt."""
    token = Piece(1, keys)
    counts = [count for count in COUNTS if count <= most]
    rows = {count: run([token] * count) for count in counts}
    longer = (0, 1, 2, 7, 16, 40, keys // 2, keys)
    padding = {extra: run([token, Piece(1, keys + extra)] if extra else [token]) for extra in longer}
    pieces = sorted({count for count in (1, 2, 3, 8, 17, 64, keys // 2, keys) if count <= keys})
    chunking = {count: run([Piece(count, keys)]) for count in pieces}
    return classify("rows", rows), classify("padding", padding), classify("chunking", chunking)


def seconds(call: Callable[[], object], repeat: int) -> float:
    """Median seconds of a call, after one that is not counted."""
    call()
    taken = []
    for _ in range(repeat):
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def across_threads(results: Sequence[Mapping[int, Bits]], threads: Sequence[int]) -> Variation:
    """The same calls with other numbers of threads: all counts of rows side by side."""
    joined = {
        number: np.concatenate([bits.reshape(-1) for bits in result.values()])
        for number, result in zip(threads, results, strict=True)
    }
    return classify("threads", joined)
