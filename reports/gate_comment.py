"""A gate decision as a pull-request comment, and as GitHub Actions annotations.

It does not decide and knows no files. Rules: the decision first, then what blocks, what was approved and by whom, what
is invalid or obsolete; an approval that is not signed says so; nothing that people or engines wrote can end its place
in the text, notify anybody or forge an annotation; the comment stays under the size GitHub accepts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from reports.summary import code, plain

LIMIT = 60_000  # bytes of UTF-8; GitHub refuses comments above 65,536 characters
_SHOWN = 40  # lines of one list
_TITLES = {
    0: "✅ samebits gate: accepted",
    1: "❌ samebits gate: rejected",
    3: "⚠️ samebits gate: not shown",
    4: "❌ samebits gate: engine error",
    5: "❌ samebits gate: an approval cannot be honoured",
}
_OPEN = ("ERROR", "FAIL", "INSUFFICIENT", "UNSUPPORTED")

Record = Mapping[str, object]


def gate_comment(gate: Record) -> str:
    """The comment in Markdown."""
    rows = _rows(gate)
    parts = [
        _head(gate),
        _list("Blocks", (f"{code(row['label'])} {row['outcome']}: {_reasons(row)}" for row in _blocking(rows))),
        _list("Approvals that cannot be honoured", (_note(note) for note in _notes(gate, "invalid"))),
        _list("Approved", (_approved(row, item) for row in rows for item in row["approvals"])),
        _list("Obsolete approvals", (_note(note) for note in _notes(gate, "obsolete"))),
        _list("Costs", (plain(text) for text in cast("list[str]", gate["costs"]))),
        _list("Warnings", (plain(text) for text in cast("list[str]", gate["warnings"]))),
        _table(rows),
        f"<sub>{plain(str(gate['policy']))}; decided {gate['decided']}; run {str(gate['run'])[:12]}</sub>\n",
    ]
    text = "\n".join(part for part in parts if part)
    if len(text.encode()) <= LIMIT:
        return text
    cut = text.encode()[: LIMIT - 200].decode(errors="ignore").rpartition("\n")[0]
    return f"{cut}\n\n…cut to the size of a comment; `gate.json` holds all of it.\n"


def gate_annotations(gate: Record) -> str:
    """Workflow commands, one per line: what blocks as errors, what warns as warnings, the decision as a notice."""
    lines = [_command("notice" if gate["exit_code"] == 0 else "error", "samebits gate", str(gate["outcome"]))]
    lines += [
        _command("error", row["label"], f"{row['outcome']}: {'; '.join(row['reasons'])}")
        for row in _blocking(_rows(gate))
    ]
    lines += [_command("error", f"approval {note['name']}", note["sentence"]) for note in _notes(gate, "invalid")]
    lines += [
        _command("warning", f"approval {note['name']}", f"obsolete: {note['sentence']}")
        for note in _notes(gate, "obsolete")
    ]
    lines += [_command("warning", "samebits gate", text) for text in cast("list[str]", gate["warnings"])]
    return "\n".join(lines) + "\n"


def _head(gate: Record) -> str:
    title = _TITLES.get(cast("int", gate["exit_code"]), "❌ samebits gate: no decision")
    about = f"matrix {code(str(gate['matrix']))}, engine {code(str(gate['engine']))}, model {code(str(gate['model']))}"
    return f"## {title}\n\n{plain(str(gate['outcome']))} (exit code {gate['exit_code']})\n\n{about}\n"


def _rows(gate: Record) -> list[dict[str, Any]]:
    return cast("list[dict[str, Any]]", gate["rows"])


def _notes(gate: Record, name: str) -> list[dict[str, str]]:
    return cast("list[dict[str, str]]", gate[name])


def _blocking(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["stance"] == "block" and not row["as_declared"] and row["outcome"] in _OPEN
            and not (row["outcome"] == "UNSUPPORTED" and row["foreseen"])]  # fmt: skip


def _reasons(row: Mapping[str, Any]) -> str:
    return plain("; ".join(row["reasons"]))


def _note(note: Mapping[str, str]) -> str:
    return f"{code(note['name'])}: {plain(note['sentence'])}"


def _approved(row: Mapping[str, Any], item: Mapping[str, Any]) -> str:
    who = (
        f"signed by {', '.join(item['signers'])}"
        if item["signers"]
        else f"**NOT SIGNED**, in the name of {item['author']}"
    )
    who = plain(who).replace("\\*\\*NOT SIGNED\\*\\*", "**NOT SIGNED**")
    return f"{code(row['label'])} ({item['kind']}), {who}, until {plain(item['expires'][:10])}: {plain(item['reason'])}"


def _list(title: str, lines: Iterable[str]) -> str:
    shown = list(lines)
    if not shown:
        return ""
    rest = [f"- …and {len(shown) - _SHOWN} more"] if len(shown) > _SHOWN else []
    return "\n".join([f"**{title}**", "", *(f"- {line}" for line in shown[:_SHOWN]), *rest, ""])


def _table(rows: Iterable[dict[str, Any]]) -> str:
    head = "| outcome | cell | run | against the baseline |\n|---|---|---|---|"
    body = [
        f"| {row['outcome']}{' (as declared)' if row['as_declared'] else ''}"
        f"{' (warns)' if row['stance'] == 'warn' else ''} "
        f"| {code(row['label'])} | {row['verdict']} | {_drift(row)} |"
        for row in rows
    ]
    return "\n".join([head, *body, ""])


def _drift(row: Mapping[str, Any]) -> str:
    drift = row["drift"]
    if drift is None:
        return "not held"
    words = {"same": "same bits", "different": "DRIFT", "no baseline": "no baseline yet"}
    state = words.get(drift["outcome"], drift["outcome"])
    return f"{state}, environment {drift['environment']}" if drift["outcome"] != "no baseline" else state


def _command(level: str, title: str, message: str) -> str:
    return f"::{level} title={_property(title)}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
