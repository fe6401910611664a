"""The report of a run as one self-contained HTML page for release review.

It does not know files. Rules: every value goes through the template engine's escaping; nothing is loaded from
anywhere, no script runs; a verdict is told by word and mark, never by colour alone; times are UTC.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from reports import words
from reports.agreement import agreement_words, draw_agreement
from reports.decision import Status, by_severity, decide, status, tally, unjudged
from reports.environment import sections
from reports.reader import read_run
from reports.record import Run, Verdict
from reports.strip import draw_strips
from reports.writing import write_whole

TEMPLATES = Path(__file__).parent / "templates"
OPEN_AT_MOST = 12  # details of open verdicts that start unfolded
STRIPS_SHOWN = 20  # requests of a picture that are shown unfolded
LAST_LINES = 15  # of an engine's log that are shown unfolded

_MARKS = {"good": "✓", "bad": "✗", "open": "?", "idle": "–"}
_VERDICT_MARKS = {"ERROR": "!", "APPROVED": "✓"}


def write_report(run: Mapping[str, object], path: Path) -> None:
    """Writes the page, whole or not at all. Raises StoreError for another schema, OutputError."""
    write_whole(path, render_report(run))


def render_report(run: Mapping[str, object]) -> str:
    """The page as text. Raises StoreError for another schema."""
    record = read_run(run)
    return template("report.html.j2").render(
        run=record,
        decision=decide(record),
        tally=_tally(record),
        unjudged=unjudged(record),
        warnings=_warnings(record),
        verdicts=by_severity(record.verdicts),
        sections=sections(record.fingerprint),
    )


def template(name: str) -> Template:
    """A template of the reports, with their filters. Raises jinja2's TemplateNotFound."""
    return _environment().get_template(name)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(short=_short_digest, utc=_utc, number=words.number, small=words.small, seconds=_seconds)
    environment.globals.update(
        words=words,
        status_of=status,
        mark=_mark,
        marks=_MARKS,
        agreement_words=agreement_words,
        draw_agreement=draw_agreement,
        draw_strips=draw_strips,
        open_at_most=OPEN_AT_MOST,
        last_lines=LAST_LINES,
        strips_shown=STRIPS_SHOWN,
    )
    return environment


def _mark(verdict: Verdict) -> str:
    """One character for a verdict, beside its word."""
    return _VERDICT_MARKS.get(verdict.verdict, _MARKS[status(verdict)])


def _tally(record: Run) -> list[tuple[Status, str, int]]:
    """(status, verdict in words, how many), worst first."""
    statuses = {words.verdict_words(verdict): status(verdict) for verdict in record.verdicts}
    return [(statuses[name], name, amount) for name, amount in tally(record)]


def _warnings(record: Run) -> list[str]:
    """What a reader must know before any PASS is believed."""
    weak = sum(words.is_weak(verdict) for verdict in record.verdicts)
    planted = sum(verdict.control is not None and verdict.control.kind == "planted" for verdict in record.verdicts)
    capped = sum(bool(verdict.caps) for verdict in record.verdicts)
    found = [
        (weak, "on a weak corpus: short prompts pass where longer ones diverge"),
        (planted, "on a control of the comparator only: no run of the engine was seen to differ"),
        (capped, "on environments that are not wholly known"),
    ]
    return [
        f"{words.count(amount, 'verdict')} {'rests' if amount == 1 else 'rest'} {what}."
        for amount, what in found
        if amount
    ]


def _short_digest(digest: str) -> str:
    """The first twelve digits of a SHA-256, or the text itself when it is no digest."""
    digits = digest.removeprefix("sha256:")
    return digits[:12] if len(digits) == 64 else digest


def _utc(time: str) -> str:
    """`2026-03-01T12:00:00Z` as `2026-03-01 12:00:00 UTC`; anything else as it is."""
    return time.replace("T", " ", 1).removesuffix("Z") + " UTC" if time.endswith("Z") else time or "not recorded"


def _seconds(amount: float | None) -> str:
    if amount is None:
        return "not recorded"
    minutes, rest = divmod(amount, 60)
    return f"{int(minutes)} min {rest:.0f} s" if minutes else f"{amount:.1f} s"
