"""Where each request of a comparison diverges, as bars for an inline picture.

It does not know SVG. Rules: bars lie on the request's own positions, in their order; a record that carries only the
first differing position and a count gives one bar from there on, said to be an estimate; requests without a
difference are counted, not drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from reports.record import RequestRow
from reports.words import number

BINS = 240  # columns of a strip; more positions share columns
ROWS = 60  # requests drawn


class Bar(NamedTuple):
    """A run of columns at which something differs."""

    start: int
    width: int


class Strip(NamedTuple):
    """One request: `width` columns of the widest one's `BINS`, and the bars among them."""

    request: str
    width: int
    bars: tuple[Bar, ...]
    exact: bool  # False: only the first differing position is known
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
    positions = row.positions or 0
    width = _column(positions, longest, columns)
    where = sorted({position for position in row.where if 0 <= position < positions})
    marked = where or range(min(row.first or 0, positions), positions)
    bars = _bars({min(_column(position, longest, columns), width - 1) for position in marked})
    first = "not recorded" if row.first is None else str(row.first)
    words = f"first at {first}, {number(row.differing)} of {number(row.positions)} positions differ"
    return Strip(request=row.request, width=width, bars=bars, exact=bool(where), words=words)


def _column(position: int, longest: int, columns: int) -> int:
    return position * columns // longest if longest else 0


def _bars(marked: Iterable[int]) -> tuple[Bar, ...]:
    bars: list[Bar] = []
    for column in sorted(marked):
        if bars and column == bars[-1].start + bars[-1].width:
            bars[-1] = Bar(bars[-1].start, bars[-1].width + 1)
        elif column >= 0:
            bars.append(Bar(column, 1))
    return tuple(bars)
