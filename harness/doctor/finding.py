"""What the doctor says: a finding, its place, and the rule behind it.

It knows no file format and no engine. A rule is data (id, severity, why, mend, facts) beside the pure functions that
look for it; a finding repeats the rule's words so that it can be read alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.doctor.launch import Launch, Scan


class Severity(StrEnum):
    """How loud a finding is; `off` silences the rule."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"
    OFF = "off"


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A line of a file; `path` as the user would type it, lines count from 1."""

    path: str
    line: int


@dataclass(frozen=True, slots=True)
class Hit:
    """What a rule's check yields: where, and what was found there. `subject` names the variable or option."""

    place: Place
    message: str
    subject: str = ""


LaunchCheck = Callable[["Launch"], Iterable[Hit]]
ScanCheck = Callable[["Scan"], Iterable[Hit]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule. `launch` is asked once per launch, `scan` once over everything read; either may be absent."""

    id: str
    engine: str  # the engine it is about, or "any"
    severity: Severity
    title: str
    why: str
    mend: str
    facts: str = ""  # versions and sources the rule rests on
    launch: LaunchCheck | None = None
    scan: ScanCheck | None = None


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One finding, sorted by place, then rule."""

    place: Place
    rule: str
    severity: Severity
    message: str
    why: str
    mend: str


def make_finding(rule: Rule, hit: Hit, severity: Severity | None = None) -> Finding:
    """A finding of `rule` at `hit`, at the rule's own severity unless another is given."""
    return Finding(
        place=hit.place,
        rule=rule.id,
        severity=severity or rule.severity,
        message=hit.message,
        why=rule.why,
        mend=rule.mend,
    )
