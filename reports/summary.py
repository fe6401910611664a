"""The summary of a run as Markdown for a pull-request comment.

It does not know HTML or files. Rules: failures first, in five lines each, then the verdict table, worst first; never
longer than `LIMIT` bytes, and what does not fit is counted in words; nothing an engine or a cell wrote can end its
place in the text, notify a person or link to anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from reports.decision import by_severity, decide, status, tally, unjudged
from reports.reader import read_run
from reports.record import Run, Verdict
from reports.words import (
    axis_words,
    control_words,
    failure_lines,
    floor_words,
    number,
    one_line,
    verdict_words,
    weak_words,
)

LIMIT = 60_000  # bytes of UTF-8; GitHub refuses comments above 65,536 characters
_DETAILS = 36_000  # bytes that failures may take, so that the table always has room
_RESERVE = 600  # bytes for the lines that say what did not fit
_MARKS = {"good": "✅", "bad": "❌", "open": "⚠️", "idle": "➖"}
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&$])")
_LINK = re.compile(r"(?<=:)(?=//)|(?<=www)(?=\.)|(?<=@)", re.IGNORECASE)


def summary(run: Mapping[str, object]) -> str:
    """The Markdown, under `LIMIT` bytes. Raises StoreError for another schema."""
    record = read_run(run)
    ranked = by_severity(record.verdicts)
    parts = [_head(record), _failures(ranked)]
    room = LIMIT - _RESERVE - sum(_bytes(part) for part in parts) - _bytes(_tail(record))
    return "\n".join([*parts, _table(ranked, room), _tail(record)])


def _head(record: Run) -> str:
    decision = decide(record)
    counts = ", ".join(f"{amount:,} {name}" for name, amount in tally(record)) or "no verdicts"
    lines = [
        f"## {_MARKS[decision.status]} samebits: {decision.title.lower()}",
        "",
        f"{plain(_short(record.outcome or decision.meaning))} (exit code {number(record.exit_code)})",
        "",
        (
            f"matrix {code(record.matrix.name)}, engine {code(record.engine)}, model {code(record.model)}: "
            f"{plain(_short(counts))}"
        ),
    ]
    missing = unjudged(record)
    return "\n".join([*lines, "", f"**{plain(missing)}**", ""] if missing else [*lines, ""])


def _failures(ranked: Sequence[Verdict]) -> str:
    """Five lines for each verdict that is open, as far as there is room."""
    open_ = [verdict for verdict in ranked if status(verdict) in ("bad", "open")]
    blocks, left = _fitting(open_, _DETAILS, _block)
    if left:
        blocks.append(f"…and {left:,} more open verdicts; `report.html` shows each of them.\n")
    return "\n".join(blocks)


def _block(verdict: Verdict) -> str:
    text = "\n".join(failure_lines(verdict))
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}\n"


def _table(ranked: Sequence[Verdict], room: int) -> str:
    head = (
        "| verdict | cell | axis | rule | positions | witnessed | floor | control |\n"
        "|---|---|---|---|---:|---:|---|---|"
    )
    rows, left = _fitting(ranked, room - _bytes(head), _row)
    if left:
        hidden = ranked[len(rows) :]
        names = sorted({verdict_words(verdict) for verdict in hidden})
        rows.append(f"\n{left:,} more verdicts ({plain(_short(', '.join(names)))}) are in `report.html`.")
    return "\n".join([head, *rows, ""])


def _row(verdict: Verdict) -> str:
    comparison = verdict.comparison
    weak = " ⚠️ weak corpus" if weak_words(verdict) else ""
    entries = (
        f"{_MARKS[status(verdict)]} {plain(_short(verdict_words(verdict)))}{weak}",
        code(verdict.label),
        code(axis_words(verdict)),
        plain(_short(verdict.rule)),
        number(comparison.positions) if comparison else "none",
        number(comparison.witnessed) if comparison else "none",
        plain(_short(floor_words(verdict.floor))),
        plain(_short(control_words(verdict.control))),
    )
    return f"| {' | '.join(entries)} |"


def _tail(record: Run) -> str:
    """Warnings that bound the PASS verdicts, and where the run came from."""
    weak = sorted({weak_words(verdict) for verdict in record.verdicts} - {""})
    lines = [f"- {plain(_short(reason))}" for reason in weak[:5]]
    lines += [f"- {len(weak) - 5} more weak corpora"] if len(weak) > 5 else []
    comparator = sum(verdict.control is not None and verdict.control.kind == "planted" for verdict in record.verdicts)
    lines += [f"- {comparator:,} with control: comparator only"] if comparator else []
    lines += [f"- {plain(_short(f'{name}: {value}'))}" for name, value in record.cost[:5]]
    where = f"samebits {record.samebits}, finished {record.finished}, matrix digest {record.matrix.digest}"
    return "\n".join([*lines, "", f"<sub>{plain(_short(where))}</sub>", ""])


def _fitting(items: Sequence[Verdict], room: int, render: Callable[[Verdict], str]) -> tuple[list[str], int]:
    """(texts that fit into `room` bytes, how many items are left)."""
    texts: list[str] = []
    for item in items:
        text = render(item)
        room -= _bytes(text)
        if room < 0:
            break
        texts.append(text)
    return texts, len(items) - len(texts)


def plain(text: str) -> str:
    """Text that Markdown shows as it is: no markup, no HTML, no mention, no reference."""
    escaped = _SPECIAL.sub(r"\\\1", " ".join(text.split()))
    return _LINK.sub("\u200b", escaped).replace("\\#", "\\#\u200b")


def code(text: str) -> str:
    """A code span that backticks and table bars inside cannot end."""
    shown = _short(text).replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in re.findall(r"`+", shown)), default=0))
    space = " " if shown.startswith("`") or shown.endswith("`") or not shown else ""
    return f"{fence}{space}{shown}{space}{fence}"


def _short(text: str) -> str:
    return one_line(text, 160)


def _bytes(text: str) -> int:
    return len(text.encode("utf-8")) + 1  # and the line feed that joins it
