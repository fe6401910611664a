"""Findings as text, JSON and SARIF 2.1.0. Pure functions from findings to text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from harness.doctor.finding import Finding, Rule, Severity

SCHEMA = 1
_COLOURS = {Severity.ERROR: "31", Severity.WARNING: "33", Severity.NOTE: "36"}
_ORDER = (Severity.ERROR, Severity.WARNING, Severity.NOTE)

Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]


def render_text(findings: Iterable[Finding], *, files: int, launches: int, colour: bool = False) -> str:
    """One block per finding: place, severity, rule and message; then why, then the mend."""
    blocks = [_render_finding(finding, colour=colour) for finding in findings]
    listed = tuple(findings)
    return "\n".join([*blocks, _summary(listed, files, launches)]) + "\n"


def _render_finding(finding: Finding, *, colour: bool) -> str:
    word = finding.severity.value
    if colour:
        word = f"\033[{_COLOURS.get(finding.severity, '0')}m{word}\033[0m"
    place = f"{_clean(finding.place.path)}:{finding.place.line}"
    return (
        f"{place}: {word}[{finding.rule}]: {_clean(finding.message)}\n"
        f"    why:  {finding.why}\n"
        f"    mend: {finding.mend}\n"
    )


def _clean(text: str) -> str:
    """Control characters from the files never reach the terminal."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def _summary(findings: tuple[Finding, ...], files: int, launches: int) -> str:
    read = f"{_count(files, 'file')} read, {_count(launches, 'launch', 'launches')} found"
    if not findings:
        return f"no findings; {read}"
    counts = [(level, sum(finding.severity is level for finding in findings)) for level in _ORDER]
    parts = ", ".join(_count(number, level.value) for level, number in counts if number)
    return f"{_count(len(findings), 'finding')} ({parts}); {read}"


def _count(number: int, word: str, plural: str = "") -> str:
    return f"{number} {word if number == 1 else plural or word + 's'}"


def render_json(findings: Iterable[Finding], *, files: int, launches: int) -> str:
    """`{"schema": 1, "findings": […], "files": …, "launches": …}`."""
    listed: list[Json] = [
        {
            "path": finding.place.path,
            "line": finding.place.line,
            "rule": finding.rule,
            "severity": finding.severity.value,
            "message": finding.message,
            "why": finding.why,
            "mend": finding.mend,
        }
        for finding in findings
    ]
    table: dict[str, Json] = {"schema": SCHEMA, "findings": listed, "files": files, "launches": launches}
    return json.dumps(table, indent=2) + "\n"


def render_sarif(findings: Iterable[Finding], rules: tuple[Rule, ...], severities: Mapping[str, Severity]) -> str:
    """A SARIF 2.1.0 log with one run; every rule is described, silenced ones as disabled."""
    index = {rule.id: number for number, rule in enumerate(rules)}
    driver: dict[str, Json] = {
        "name": "samebits doctor",
        "rules": [_sarif_rule(rule, severities.get(rule.id, rule.severity)) for rule in rules],
    }
    run: dict[str, Json] = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_sarif_result(finding, index[finding.rule]) for finding in findings],
    }
    log: dict[str, Json] = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [run],
    }
    return json.dumps(log, indent=2) + "\n"


def _sarif_rule(rule: Rule, severity: Severity) -> Json:
    enabled = severity is not Severity.OFF
    level = severity.value if enabled else "none"
    return {
        "id": rule.id,
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.why},
        "help": {"text": f"{rule.mend}\n{rule.facts}".strip()},
        "defaultConfiguration": {"enabled": enabled, "level": level},
        "properties": {"engine": rule.engine},
    }


def _sarif_result(finding: Finding, index: int) -> Json:
    return {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": finding.severity.value,
        "message": {"text": f"{finding.message}. {finding.why} {finding.mend}"},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": _uri(finding.place.path)},
                    "region": {"startLine": finding.place.line},
                }
            }
        ],
    }


def _uri(path: str) -> str:
    from urllib.parse import quote

    if path.startswith("live:"):
        return quote(path.replace("live:", "live/"))
    return ("file://" if path.startswith("/") else "") + quote(path)
