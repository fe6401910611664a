"""From paths to findings: read, join into launches, ask every rule, take off what is allowed.

It executes nothing and writes nothing. Findings come sorted by place; one rule says one thing once per place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.doctor.facts import Document
from harness.doctor.finding import Finding, Hit, Rule, Severity, make_finding
from harness.doctor.launch import Launch, Scan
from harness.doctor.reach import find_launches
from harness.doctor.readers import read_document
from harness.doctor.rules import RULES
from harness.doctor.settings import DoctorSettings
from harness.doctor.source import find_sources
from harness.doctor.suppressions import apply_suppressions


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The findings, and what was looked at: silence about nothing is no health."""

    findings: tuple[Finding, ...]
    files: int
    launches: tuple[Launch, ...]


def diagnose(paths: Iterable[Path], settings: DoctorSettings, *, exclude: tuple[str, ...] = ()) -> Diagnosis:
    """Reads everything at or below `paths` and judges it.

    Raises:
        UsageError: a path that does not exist.
    """
    documents = [read_document(source) for source in find_sources(paths, exclude)]
    return judge_documents(documents, settings)


def judge_documents(documents: Iterable[Document], settings: DoctorSettings) -> Diagnosis:
    """Judges files that are already read."""
    scan = find_launches(documents)
    findings = ask_rules(scan, settings)
    remaining = apply_suppressions(findings, scan.documents, settings)
    return Diagnosis(findings=tuple(remaining), files=len(scan.documents), launches=scan.launches)


def ask_rules(scan: Scan, settings: DoctorSettings) -> list[Finding]:
    """Every rule's findings, each once, before suppressions."""
    found: dict[tuple[str, Hit], Finding] = {}
    for rule in RULES:
        severity = settings.severity(rule)
        if severity is Severity.OFF:
            continue
        for hit in rule_hits(rule, scan):
            key = (rule.id, Hit(hit.place, "", hit.subject))
            found.setdefault(key, make_finding(rule, hit, severity))
    return sorted(found.values())


def rule_hits(rule: Rule, scan: Scan) -> Iterator[Hit]:
    """What one rule finds in a scan."""
    if rule.scan is not None:
        yield from rule.scan(scan)
    if rule.launch is not None:
        for launch in scan.launches:
            yield from rule.launch(launch)
