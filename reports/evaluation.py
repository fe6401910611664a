"""The scores of a run as text for terminals, as Markdown and as one HTML page. It reads the record (`eval.json`) alone.

Rules: the verdict stands beside every score; every moved item is told; what was not scored is told with its reason; a
model judge that is not shown to be reproducible is marked wherever its score stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.errors import StoreError
from reports.reader import clean
from reports.words import one_line

SCHEMA = 2
RULES = "rules"
UNSHOWN = "judge not shown reproducible"
SENTENCE = 2000  # characters of a sentence that carries a mark


def write_evaluation(record: Mapping[str, object], folder: Path) -> None:
    """Writes eval.md and eval.html, whole or not at all. Raises StoreError for another schema, OutputError."""
    from reports.writing import write_whole

    write_whole(folder / "eval.md", render_evaluation(record))
    write_whole(folder / "eval.html", render_evaluation_page(record))


def render_evaluation(record: Mapping[str, object]) -> str:
    """The page as Markdown."""
    scores = _scores(record)
    lines = [f"# Scores of {_cell(record['model'])} on {_cell(record['engine'])}", "", f"{record['sentence']}.", ""]
    lines += [f"{_cell(line)}.\n" for line in judge_lines(record)]
    lines += ["| arms | judged by | verdict | reference | variant | of | moved |", "|---|---|---|---:|---:|---:|---:|"]
    for one in scores:
        counts = f"{one['reference']} | {one['variant']} | {one['total']} | {len(_list(one['moved']))}"
        lines.append(f"| {_cell(_name(one))} | {_cell(_judged_by(one))} | {_cell(one['verdict'])} | {counts} |")
    for one in scores:
        if moved := _moved(one):
            lines += ["", f"## What moved: {_cell(_name(one))}, by {_cell(_judged_by(one))}", ""]
            lines += ["| item | points | reference | variant |", "|---|---:|---|---|"]
            lines += [
                f"| {_cell(item['request'])} | {int(str(item['points'])):+d} | {_cell(item['reference'])} "
                f"| {_cell(item['variant'])} |"
                for item in moved
            ]
    if _list(record["unscored"]):
        lines += ["", "## Not scored", "", *(f"- {_cell(reason)}" for reason in _list(record["unscored"]))]
    return "\n".join(lines) + "\n"


def render_evaluation_page(record: Mapping[str, object]) -> str:
    """The page as HTML."""
    from reports.html import template

    scores = [
        dict(one, name=_name(one), unshown=bool(one["mark"]), moved=_moved(one), answers_moved=len(_moved(one)))
        for one in _scores(record)
    ]
    judge = record["judge"] if isinstance(record["judge"], Mapping) else None
    return template("eval.html.j2").render(
        record=record, scores=scores, judge=judge, judge_lines=judge_lines(record), unshown=UNSHOWN, rules=RULES,
        status="bad" if record["exit_code"] else "open" if judge and not judge["shown"] else "good",
    )  # fmt: skip


def evaluation_table(record: Mapping[str, object]) -> str:
    """One line per pair and moved item, then what was not scored, then the sentence."""
    lines: list[str] = []
    for one in _scores(record):
        lines.append(one_line(str(one["sentence"]), SENTENCE))
        for item in _moved(one):
            change = f"{item['reference']} -> {item['variant']}"
            lines.append(f"  {int(str(item['points'])):+d} {one_line(str(item['request']))}: {one_line(change)}")
    lines += [f"not scored: {one_line(str(reason))}" for reason in _list(record["unscored"])]
    lines += [one_line(line, SENTENCE) for line in judge_lines(record)]
    return "\n".join([*lines, str(record["sentence"])])


def judge_lines(record: Mapping[str, object]) -> list[str]:
    """What must be known of the model judge before its score is believed; none without one."""
    judge = record["judge"]
    if not isinstance(judge, Mapping):
        return []
    who = f"judge {judge['name']}: {judge['model']} on {judge['engine']} at temperature 0"
    fingerprint = _mapping(judge["fingerprint"])["digest"]
    lines = [f"{who}, fingerprint {fingerprint}, {judge['questions']} different questions"]
    if judge["unread"]:
        lines.append(f"{judge['unread']} of its {judge['questions']} outputs could not be read and earn nothing")
    if judge["shown"]:
        lines.append(f"its own cells all PASS (matrix {judge['matrix']}, run {judge['run']})")
    else:
        lines.append(str(judge["mark"]))
    return [*lines, *(f"limit: {cap}" for cap in _list(judge["caps"]))]


def _name(one: Mapping[str, object]) -> str:
    return f"{one['label']} (control)" if one["arms"] == "control" else str(one["label"])


def _judged_by(one: Mapping[str, object]) -> str:
    return f"{one['judged_by']} ({UNSHOWN})" if one["mark"] else str(one["judged_by"])


def _moved(one: Mapping[str, object]) -> list[Mapping[str, object]]:
    return [item for item in _list(one["moved"]) if isinstance(item, Mapping)]


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


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
