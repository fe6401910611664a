"""The scores of a run as text for terminals and as Markdown. It reads the record (`eval.json`) alone.

Rules: the verdict stands beside every score; every moved item is told; what was not scored is told with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.errors import StoreError
from reports.reader import clean
from reports.words import one_line

SCHEMA = 1


def write_evaluation(record: Mapping[str, object], folder: Path) -> None:
    """Writes eval.md, whole or not at all. Raises StoreError for another schema, OutputError."""
    from reports.writing import write_whole

    write_whole(folder / "eval.md", render_evaluation(record))


def render_evaluation(record: Mapping[str, object]) -> str:
    """The page as Markdown."""
    scores = _scores(record)
    lines = [
        f"# Scores of {_cell(record['model'])} on {_cell(record['engine'])}",
        "",
        str(record["sentence"]) + ".",
        "",
    ]
    lines += ["| arms | verdict | reference | variant | of | moved |", "|---|---|---:|---:|---:|---:|"]
    for one in scores:
        name = _cell(one["label"]) + (" (control)" if one["arms"] == "control" else "")
        counts = f"{one['reference']} | {one['variant']} | {one['total']} | {len(_list(one['moved']))}"
        lines.append(f"| {name} | {_cell(one['verdict'])} | {counts} |")
    for one in scores:
        moved = [item for item in _list(one["moved"]) if isinstance(item, Mapping)]
        if moved:
            lines += ["", f"## What moved: {_cell(one['label'])} ({one['arms']})", ""]
            lines += ["| item | points | reference | variant |", "|---|---:|---|---|"]
            lines += [
                f"| {_cell(item['request'])} | {int(str(item['points'])):+d} | {_cell(item['reference'])} "
                f"| {_cell(item['variant'])} |"
                for item in moved
            ]
    if _list(record["unscored"]):
        lines += ["", "## Not scored", "", *(f"- {_cell(reason)}" for reason in _list(record["unscored"]))]
    return "\n".join(lines) + "\n"


def evaluation_table(record: Mapping[str, object]) -> str:
    """One line per pair and moved item, then what was not scored, then the sentence."""
    lines: list[str] = []
    for one in _scores(record):
        lines.append(one_line(str(one["sentence"])))
        for item in _list(one["moved"]):
            if isinstance(item, Mapping):
                change = f"{item['reference']} -> {item['variant']}"
                lines.append(f"  {int(str(item['points'])):+d} {one_line(str(item['request']))}: {one_line(change)}")
    lines += [f"not scored: {one_line(str(reason))}" for reason in _list(record["unscored"])]
    return "\n".join([*lines, str(record["sentence"])])


def _scores(record: Mapping[str, object]) -> list[Mapping[str, object]]:
    if record.get("schema") != SCHEMA:
        raise StoreError(f"eval.json: $.schema: expected {SCHEMA}, found {record.get('schema')!r}; score the run again")
    return [one for one in _list(record["scores"]) if isinstance(one, Mapping)]


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, Sequence) else ()


def _cell(value: object) -> str:
    """Text that cannot leave its cell."""
    text = clean(str(value)).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
    return " ".join(text.split())
