"""The verdict table for terminals and for plain text, and the five lines of a failure.

It does not know files. Rules: one row per pair that has a verdict, in the plan's order; a weak corpus and an
expected verdict stand in the row itself, reasons and unknowns below the table; what was not judged is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from reports.decision import Status, status, tally, unjudged
from reports.reader import read_run, read_verdict
from reports.record import Run, Verdict
from reports.words import control_words, failure_lines, floor_words, is_weak, notes, number, one_line, verdict_words

COLUMNS = ("verdict", "cell", "rule", "positions", "witnessed", "floor", "control")
_NUMBERS = ("positions", "witnessed")
_STYLES: dict[Status, str] = {"good": "green", "bad": "bold red", "open": "yellow", "idle": "dim"}
_ENTRY = 60  # characters of one entry of the plain table


def verdict_table(run: Mapping[str, object]) -> RenderableType:
    """The table for a terminal. Raises StoreError for another schema."""
    record = read_run(run)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        table.add_column(column, overflow="fold", justify="right" if column in _NUMBERS else "left")
    for verdict in record.verdicts:
        entry, label, *rest = _row(verdict)
        table.add_row(
            Text(entry, style=_STYLES[status(verdict)]),
            _Label(one_line(label)),
            *(Text(one_line(item)) for item in rest),
        )
    return Group(table, *(Text(line, style="yellow") for line in _below(record)), Text(_closing(record)))


class _Label:
    """`cell[variant]`; where a terminal is too narrow, the variant on a line of its own."""

    def __init__(self, label: str) -> None:
        name, bracket, variant = label.partition("[")
        self.whole, self.parts = label, [name, bracket + variant] if bracket else [name]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(max(cell_len(part) for part in self.parts), cell_len(self.whole))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        fits = cell_len(self.whole) <= options.max_width
        yield Text(self.whole if fits else "\n".join(self.parts), overflow="fold")


def plain_table(run: Mapping[str, object]) -> str:
    """The same as text without styles, one line per row, however wide. Raises StoreError for another schema."""
    record = read_run(run)
    rows = [COLUMNS, *(_row(verdict) for verdict in record.verdicts)]
    cut = [[one_line(entry, _ENTRY) for entry in row] for row in rows]
    widths = [max(len(row[column]) for row in cut) for column in range(len(COLUMNS))]
    return "\n".join([*(_padded(row, widths) for row in cut), *_below(record), _closing(record)])


def five_lines(verdict: Mapping[str, object]) -> str:
    """A verdict of `run.json` in at most five lines: what differs, where first, how many, what size, which layer."""
    return "\n".join(failure_lines(read_verdict(verdict)))


def _row(verdict: Verdict) -> tuple[str, ...]:
    comparison = verdict.comparison
    return (
        verdict_words(verdict) + (", weak corpus" if is_weak(verdict) else ""),
        verdict.label,
        verdict.rule,
        number(comparison.positions) if comparison else "none",
        number(comparison.witnessed) if comparison else "none",
        floor_words(verdict.floor),
        control_words(verdict.control),
    )


def _below(record: Run) -> list[str]:
    """Notes, each with the cells that it belongs to, and what was planned but not judged."""
    cells: dict[str, list[str]] = {}
    for verdict in record.verdicts:
        for note in notes(verdict):
            cells.setdefault(note, []).append(verdict.label)
    lines = [f"! {one_line(note)} ({_some(labels)})" for note, labels in cells.items()]
    missing = unjudged(record)
    return [*lines, f"! {missing}"] if missing else lines


def _some(labels: Sequence[str], most: int = 3) -> str:
    more = f" and {len(labels) - most} more" if len(labels) > most else ""
    return ", ".join(one_line(label, _ENTRY) for label in labels[:most]) + more


def _closing(record: Run) -> str:
    counts = ", ".join(f"{amount:,} {name}" for name, amount in tally(record)) or "no verdicts"
    return one_line(f"{counts}. {record.outcome}")


def _padded(row: Sequence[str], widths: Sequence[int]) -> str:
    entries = (
        f"{entry:>{width}}" if column in _NUMBERS else f"{entry:<{width}}"
        for column, entry, width in zip(COLUMNS, row, widths, strict=True)
    )
    return "  ".join(entries).rstrip()
