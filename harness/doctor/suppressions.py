"""`# samebits: allow RULE reason`: takes one finding off its own line or the next.

A comment without a reason, with an unknown rule, or with nothing to suppress becomes a finding itself.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass

from harness.doctor.facts import Document
from harness.doctor.finding import Finding, Hit, Place, Severity, make_finding
from harness.doctor.rules import RULES, RULES_BY_ID
from harness.doctor.settings import DoctorSettings, suggest

_MARK = "samebits: allow"
_COMMENT = re.compile(r"(?:#|//|/\*|;)\s*samebits: allow\b[ \t]*(\S*)[ \t]*([^\n]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Suppression:
    """One comment: the rule it names, its reason, and its line."""

    place: Place
    rule: str
    reason: str


def read_suppressions(document: Document) -> list[Suppression]:
    """The comments of one file. In Python only real comments count, not strings that look like one."""
    if _MARK not in document.text:
        return []
    comment_lines = _python_comments(document.text) if document.kind == "python" else None
    found = []
    for number, line in enumerate(document.text.splitlines(), 1):
        if len(line) > 5000:
            continue
        text = line if comment_lines is None else comment_lines.get(number, "")
        match = _COMMENT.search(text)
        if match:
            reason = re.sub(r"(\*/|-->|\}\})+\s*$", "", match[2]).strip()
            found.append(Suppression(place=Place(document.path, number), rule=match[1], reason=reason))
    return found


def _python_comments(text: str) -> dict[int, str]:
    comments = {}
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                comments[token.start[0]] = token.string
    except (tokenize.TokenError, SyntaxError):
        return comments
    return comments


def apply_suppressions(
    findings: Iterable[Finding], documents: Iterable[Document], settings: DoctorSettings
) -> list[Finding]:
    """The findings that remain, and those that the comments themselves earn."""
    remaining = sorted(findings)
    added: list[Finding] = []
    for document in documents:
        for comment in read_suppressions(document):
            problem = _judge(comment, remaining)
            if problem is not None:
                rule, message = problem
                severity = settings.severity(RULES_BY_ID[rule])
                if severity is not Severity.OFF and not _is_off(comment, settings):
                    added.append(make_finding(RULES_BY_ID[rule], Hit(comment.place, message), severity))
    return sorted([*remaining, *added])


def _is_off(comment: Suppression, settings: DoctorSettings) -> bool:
    rule = RULES_BY_ID.get(comment.rule)
    return rule is not None and settings.severity(rule) is Severity.OFF


def _judge(comment: Suppression, remaining: list[Finding]) -> tuple[str, str] | None:
    """Takes its finding out of `remaining`; else says what is wrong with the comment."""
    if not comment.rule:
        return "suppression-no-reason", "the comment names no rule"
    if comment.rule not in RULES_BY_ID:
        hint = suggest(comment.rule, tuple(rule.id for rule in RULES))
        return "suppression-unused", f"there is no rule `{comment.rule}`{hint}"
    if not comment.reason:
        return "suppression-no-reason", f"`allow {comment.rule}` gives no reason and is not applied"
    for line in (comment.place.line, comment.place.line + 1):
        for finding in remaining:
            if finding.rule == comment.rule and finding.place == Place(comment.place.path, line):
                remaining.remove(finding)
                return None
    return "suppression-unused", f"no {comment.rule} on this line or the next"
