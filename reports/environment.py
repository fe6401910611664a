"""The environment of a run as rows for a table: the engine's process beside our own, by class.

It does not know HTML. Rules: a field of both sides is one row; variables that are not set on either side are
counted, not listed; what is unknown shows its reason.
"""

from __future__ import annotations

from typing import NamedTuple

from reports.record import EnvironmentField, Fingerprint

MEANINGS = (
    ("identity", "must match for equal bits to be expected at all"),
    ("lineage", "history: recorded and compared, never voids a verdict"),
    ("context", "recorded, never compared"),
)
_NOT_SET = "not set"


class Row(NamedTuple):
    """One field on both sides; a side that has no such field is empty."""

    name: str
    subject: str
    observer: str
    source: str
    differs: bool  # both sides have it, with different values


class Section(NamedTuple):
    """The fields of one class."""

    name: str
    meaning: str
    rows: tuple[Row, ...]
    unset: tuple[str, ...]  # names of variables that are not set on either side


def sections(fingerprint: Fingerprint) -> tuple[Section, ...]:
    """Sections in order of weight; a class that the design does not know comes last, under its own name."""
    present = {field.field_class for field in (*fingerprint.subject, *fingerprint.observer)}
    known = [name for name, _ in MEANINGS]
    named = [*MEANINGS, *((name or "no class", "") for name in sorted(present - set(known)))]
    found = (_section(name, meaning, fingerprint) for name, meaning in named)
    return tuple(section for section in found if section.rows or section.unset)


def _section(name: str, meaning: str, fingerprint: Fingerprint) -> Section:
    subject = {item.name: item for item in fingerprint.subject if (item.field_class or "no class") == name}
    observer = {item.name: item for item in fingerprint.observer if (item.field_class or "no class") == name}
    rows = [_row(key, subject.get(key), observer.get(key)) for key in sorted(subject | observer)]
    unset = [row for row in rows if {row.subject, row.observer} <= {_NOT_SET, ""}]
    return Section(name, meaning, tuple(row for row in rows if row not in unset), tuple(row.name for row in unset))


def _row(name: str, subject: EnvironmentField | None, observer: EnvironmentField | None) -> Row:
    a, b = _shown(subject), _shown(observer)
    known = subject or observer
    source = known.source if known is not None and known.value is not None else ""
    return Row(name, a, b, source, differs=subject is not None and observer is not None and a != b)


def _shown(field: EnvironmentField | None) -> str:
    if field is None:
        return ""
    return field.source or "unknown" if field.value is None else field.value
