"""Drafts an approval from what a run shows: the difference, its size, its cause, and the fields that changed.

It does not sign or rule. Rules: there is nothing to approve in a cell that passes; what is approved is the difference
that is there, by its digests, never "whatever this cell does".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from harness.approval.record import Approval
from harness.approval.ruling import Difference
from harness.baseline.drift import Drift
from harness.errors import UsageError
from harness.finished import FinishedRun, JudgedPair
from harness.suggest import did_you_mean

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_DAYS = re.compile(r"(\d{1,4})d")


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What the person says. `cause` empty: the run's own diagnosis stands."""

    reason: str
    cause: str
    author: str
    change_author: str
    created: datetime
    expires: datetime


def find_pair(run: FinishedRun, name: str, open_labels: set[str]) -> JudgedPair:
    """The pair of a label, or the one open variant of a cell. Raises UsageError."""
    labels = [pair.label for pair in run.pairs]
    if name in labels:
        return next(pair for pair in run.pairs if pair.label == name)
    mine = [pair for pair in run.pairs if pair.cell == name]
    if not mine:
        cells = sorted({pair.cell for pair in run.pairs} | set(labels))
        raise UsageError(f"cell {name!r}: the run has no such cell; {did_you_mean(name, cells)}")
    open_ = [pair for pair in mine if pair.label in open_labels] or mine
    if len(open_) > 1:
        raise UsageError(
            f"cell {name!r}: several variants are open; name one of {', '.join(pair.label for pair in open_)}"
        )
    return open_[0]


def draft(run: FinishedRun, pair: JudgedPair, difference: Difference, drift: Drift | None, words: Words) -> Approval:
    """The approval of one difference."""
    if not words.reason.strip():
        raise UsageError("--reason: expected why the difference is accepted, got nothing")
    return Approval(
        cell=pair.cell, variant=pair.variant, engine=run.engine, model=run.model, kind=difference.kind,
        rule=difference.rule, corpus=difference.corpus, old=difference.old, new=difference.new,
        changed=_changed(pair, difference, drift), size=_size(pair, difference, drift),
        cause=words.cause or _cause(pair, difference, drift), reason=words.reason, author=words.author,
        change_author=words.change_author, created=words.created, expires=words.expires,
    )  # fmt: skip


def expiry(text: str, now: datetime) -> datetime:
    """`2026-12-31` (to the end of that day, UTC) or `30d` as a time after `now`. Raises UsageError."""
    moment = _moment(text, now)
    if moment is None:
        raise UsageError(f"--expires {text!r}: expected a date such as 2026-12-31, or days such as 30d")
    if moment <= now:
        raise UsageError(f"--expires {text!r}: expected a time in the future; now it is {now:%Y-%m-%d %H:%M} UTC")
    return moment


def _moment(text: str, now: datetime) -> datetime | None:
    days = _DAYS.fullmatch(text)
    try:
        if days:
            return now.replace(microsecond=0) + timedelta(days=int(days[1]))
        if _DATE.fullmatch(text):
            return datetime.fromisoformat(text).replace(hour=23, minute=59, second=59, tzinfo=UTC)
    except (ValueError, OverflowError):  # a day that no calendar has
        return None
    return None


def _changed(pair: JudgedPair, difference: Difference, drift: Drift | None) -> tuple[str, ...]:
    if difference.kind == "drift" and drift is not None:
        return drift.suspects
    axis = pair.raw["axis"]
    if not isinstance(axis, Mapping):
        return ()
    return (f"{axis.get('name')}: {axis.get('reference')} -> {axis.get('variant')}",)


def _size(pair: JudgedPair, difference: Difference, drift: Drift | None) -> str:
    if difference.kind == "drift" and drift is not None:
        return drift.size or f"{drift.differing_requests} of {drift.requests} requests differ"
    diagnosis = pair.raw.get("diagnosis")
    text = diagnosis.get("text") if isinstance(diagnosis, Mapping) else None
    return "; ".join(str(text).splitlines()) if text else pair.reason


def _cause(pair: JudgedPair, difference: Difference, drift: Drift | None) -> str:
    if difference.kind == "drift" and drift is not None:
        return drift.sentence
    diagnosis = pair.raw.get("diagnosis")
    if not isinstance(diagnosis, Mapping):
        return pair.reason
    return f"{diagnosis.get('layer')}: {diagnosis.get('reason')}"
