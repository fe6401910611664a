"""The run as JUnit XML, for CI systems that show test results.

It does not know files. Rules: FAIL and INSUFFICIENT are failures, ERROR is an error, UNSUPPORTED is skipped with its
reason, APPROVED and expected verdicts pass and say so in a property; a verdict of an unknown name is an error; a run
that is not green never makes a file without a failure.
"""

from __future__ import annotations

from collections.abc import Mapping
from xml.etree import ElementTree as ET

from reports.decision import decide, unjudged
from reports.reader import read_run
from reports.record import Run, Verdict
from reports.words import axis_words, failure_lines, notes

Outcome = tuple[str, str]  # (element, type): ("failure", "FAIL"); ("", "") passes

_OUTCOMES: dict[str, Outcome] = {
    "PASS": ("", ""),
    "APPROVED": ("", ""),
    "FAIL": ("failure", "FAIL"),
    "INSUFFICIENT": ("failure", "INSUFFICIENT"),
    "ERROR": ("error", "ERROR"),
    "UNSUPPORTED": ("skipped", "UNSUPPORTED"),
}


def render_junit(run: Mapping[str, object]) -> str:
    """The XML document. Raises StoreError for another schema."""
    record = read_run(run)
    suite = ET.Element("testsuite", name=record.matrix.name or "samebits")
    _set_properties(suite, _origin(record))
    for verdict in record.verdicts:
        suite.append(_case(record, verdict))
    _add_decision(suite, record)
    suites = ET.Element("testsuites", name="samebits")
    suites.append(suite)
    for element in (suites, suite):
        _set_counts(element, suite, record)
    ET.indent(suites)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ET.tostring(suites, encoding="unicode")}\n'


def _case(record: Run, verdict: Verdict) -> ET.Element:
    case = ET.Element("testcase", classname=record.matrix.name or "samebits", name=verdict.label)
    seconds = _seconds(record, verdict)
    if seconds is not None:
        case.set("time", f"{seconds:.3f}")
    _set_properties(case, _facts(verdict))
    element, kind = ("", "") if verdict.is_expected else _outcome(verdict)
    if element == "skipped":
        ET.SubElement(case, element, message=_reason(verdict))
    elif element:
        ET.SubElement(case, element, type=kind, message=_reason(verdict)).text = "\n".join(failure_lines(verdict))
    if verdict.error is not None and verdict.error.log_tail:
        ET.SubElement(case, "system-err").text = "\n".join(verdict.error.log_tail)
    return case


def _outcome(verdict: Verdict) -> Outcome:
    return _OUTCOMES.get(verdict.verdict, ("error", "UNKNOWN VERDICT"))


def _reason(verdict: Verdict) -> str:
    return verdict.reason or verdict.verdict or "no verdict and no reason on record"


def _facts(verdict: Verdict) -> list[tuple[str, str]]:
    facts = [
        ("verdict", verdict.verdict),
        ("expected", verdict.expected),
        ("axis", axis_words(verdict)),
        ("rule", verdict.rule),
        ("corpus", verdict.corpus.name),
    ]
    return [
        *facts,
        *(("claim", claim) for claim in verdict.claims),
        *(("note", note) for note in notes(verdict)),
    ]


def _origin(record: Run) -> list[tuple[str, str]]:
    return [
        ("samebits", record.samebits),
        ("engine", record.engine),
        ("model", record.model),
        ("matrix.digest", record.matrix.digest),
        ("outcome", record.outcome),
        *((f"setting.{name}", value) for name, value in record.settings),
    ]


def _set_properties(element: ET.Element, facts: list[tuple[str, str]]) -> None:
    properties = ET.SubElement(element, "properties")
    for name, value in facts:
        if value:
            ET.SubElement(properties, "property", name=name, value=value)


def _seconds(record: Run, verdict: Verdict) -> float | None:
    """Seconds of the variant's case; shared cases are counted for each verdict that rests on them."""
    case = dict(verdict.cases).get("variant")
    return next((found.seconds for found in record.cases if found.id == case), None)


def _add_decision(suite: ET.Element, record: Run) -> None:
    """A case of its own for what no verdict shows: unjudged pairs, or an exit code without a failed cell."""
    missing = unjudged(record)
    failing = suite.find(".//failure") is not None or suite.find(".//error") is not None
    if not missing and (failing or record.exit_code == 0):
        return
    case = ET.SubElement(suite, "testcase", classname=record.matrix.name or "samebits", name="the run's decision")
    message = missing or record.outcome or decide(record).meaning
    ET.SubElement(case, "failure", type="DECISION", message=message).text = f"exit code {record.exit_code}"


def _set_counts(element: ET.Element, suite: ET.Element, record: Run) -> None:
    for name, tag in (
        ("tests", "testcase"),
        ("failures", "failure"),
        ("errors", "error"),
        ("skipped", "skipped"),
    ):
        element.set(name, str(len(list(suite.iter(tag)))))
    if record.seconds.total is not None:
        element.set("time", f"{record.seconds.total:.3f}")
    if record.started and element is suite:
        element.set("timestamp", record.started.removesuffix("Z"))
