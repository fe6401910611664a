"""Where each request of a comparison diverges, as bars for an inline picture.

It does not know SVG. Rules: bars lie on the request's own positions, in their order; a record that carries only the
first differing position and a count gives that position and, behind it, one bar as high as the share that differs;
requests without a difference are counted, not drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from reports.record import RequestRow
from reports.words import number

BINS = 240  # columns of a strip; more positions share columns
ROWS = 200  # requests drawn


class Bar(NamedTuple):
    """A run of columns at which something differs; `share` in (0, 1] of its positions do."""

    start: int
    width: int
    share: float


class Strip(NamedTuple):
    """One request: `width` columns of the widest one's, and the bars among them."""

    request: str
    width: int
    bars: tuple[Bar, ...]
    exact: bool  # False: the record does not say which positions behind the first one differ
    words: str


class Strips(NamedTuple):
    """The requests drawn, and how many are equal or were left out."""

    drawn: tuple[Strip, ...]
    columns: int
    equal: int
    hidden: int


def draw_strips(rows: Sequence[RequestRow]) -> Strips:
    """Strips of the requests that differ, in the record's order."""
    differing = [row for row in rows if row.differing or row.first is not None]
    longest = max((row.positions or 0 for row in rows), default=0)
    columns = max(1, min(longest, BINS))
    drawn = tuple(_strip(row, longest, columns) for row in differing[:ROWS])
    return Strips(drawn=drawn, columns=columns, equal=len(rows) - len(differing), hidden=len(differing) - len(drawn))


def _strip(row: RequestRow, longest: int, columns: int) -> Strip:
    positions, first = row.positions or 0, row.first or 0
    exact = bool(row.where) or row.differing == positions - first
    where = set(row.where) or range(first, positions)
    width = max(1, _column(positions, longest, columns))
    inside = (position for position in where if 0 <= position < positions)
    bars = _runs(sorted({min(_column(position, longest, columns), width - 1) for position in inside}))
    shown = "not recorded" if row.first is None else str(row.first)
    words = f"first at {shown}, {number(row.differing)} of {number(row.positions)} positions differ"
    return Strip(row.request, width, bars if exact else _estimate(bars, row), exact, words)


def _column(position: int, longest: int, columns: int) -> int:
    return position * columns // longest if longest else 0


def _runs(marked: Sequence[int]) -> tuple[Bar, ...]:
    bars: list[Bar] = []
    for column in marked:
        if bars and column == bars[-1].start + bars[-1].width:
            bars[-1] = bars[-1]._replace(width=bars[-1].width + 1)
        else:
            bars.append(Bar(column, 1, 1.0))
    return tuple(bars)


def _estimate(bars: tuple[Bar, ...], row: RequestRow) -> tuple[Bar, ...]:
    """The first position, and behind it the share of the others that differ."""
    behind = (row.positions or 0) - (row.first or 0) - 1
    share = min(1.0, max(0, (row.differing or 0) - 1) / behind) if behind > 0 else 0.0
    rest = [Bar(bar.start + 1, bar.width - 1, share) for bar in bars if bar.width > 1 and share > 0]
    return (*(bar._replace(width=1) for bar in bars[:1]), *rest)
