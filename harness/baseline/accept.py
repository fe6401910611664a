"""Accepts captures of a finished run as baselines, and says why others cannot be.

It does not judge. Rules: a cell without a floor that held is refused, and so is one whose control did not fire; all
refusals are said at once and then nothing is written; equal captures are stored once; what names a host is left out.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from harness.baseline.entry import Baseline, Key, work_of
from harness.baseline.shelf import JSON, Shelf
from harness.baseline.table import SUFFIX, Kept, write_table
from harness.errors import UsageError
from harness.fingerprint import Fingerprint, fingerprint_of
from harness.finished import FinishedRun, JudgedPair
from harness.suggest import did_you_mean
from harness.verdict import VerdictName

if TYPE_CHECKING:
    from harness.capture import Capture
    from harness.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Who accepts, why, and what is kept. `moment` is the time of acceptance, aware."""

    author: str
    reason: str
    moment: datetime
    keep: tuple[Kept, ...]


def accept(run: FinishedRun, shelf: Shelf, cells: Sequence[str], terms: Acceptance) -> tuple[Baseline, ...]:
    """Puts the named cells' captures in force (all acceptable ones when none is named); returns the baselines.

    Raises:
        UsageError: an unknown cell, a named cell that cannot be accepted, or nothing to accept.
        StoreError: captures that are missing or damaged.
        OutputError: the folder cannot be written.
    """
    from harness.store import Store

    if not terms.reason.strip():
        raise UsageError("--reason: expected why these captures are accepted, got nothing")
    chosen = _chosen(run, cells)
    store = Store((run.folder or Path()) / "captures")
    prepared = [_prepare(run, pair, store, shelf, terms) for pair in chosen]
    for baseline in prepared:
        shelf.replace(baseline)
    return tuple(prepared)


def refusal(pair: JudgedPair) -> str | None:
    """Why a pair cannot become a baseline; None when it can."""
    if pair.verdict in (VerdictName.ERROR, VerdictName.UNSUPPORTED) or pair.case is None:
        return f"its verdict is {pair.verdict}: {pair.reason}"
    floor = pair.raw.get("floor")
    if not isinstance(floor, Mapping):
        return "it has no floor: the reference was not captured twice"
    if floor.get("verdict") != "same":
        return f"its floor did not hold: {floor.get('sentence')}"
    control = pair.raw.get("control")
    if not isinstance(control, Mapping) or control.get("kind") == "none":
        return "it has no control, so nothing shows that it can fail"
    if control.get("fired") is not True:
        return f"its control stayed silent: {control.get('verdict')}"
    if pair.judged_digest is None:
        return "its reference has no judged digest"
    return None


def stored_fingerprint(capture: Capture) -> Fingerprint:
    """A capture's fingerprint as it may be published: context (host name, time, load, memory) is left out."""
    return publishable(fingerprint_of(capture.subject))


def publishable(fingerprint: Fingerprint) -> Fingerprint:
    """The fields that are compared."""
    return Fingerprint(fields=tuple(field for field in fingerprint.fields if field.field_class != "context"))


def key_of(run: FinishedRun, pair: JudgedPair) -> Key:
    """The key of a pair of a run."""
    return Key(engine=run.engine, model=run.model, cell=pair.cell, variant=pair.variant)


def _chosen(run: FinishedRun, cells: Sequence[str]) -> list[JudgedPair]:
    known = sorted({pair.cell for pair in run.pairs} | {pair.label for pair in run.pairs})
    for name in cells:
        if name not in known:
            raise UsageError(f"--cell {name!r}: the run has no such cell; {did_you_mean(name, known)}")
    named = [pair for pair in run.pairs if not cells or pair.cell in cells or pair.label in cells]
    refused = [f"{pair.label}: {why}" for pair in named if (why := refusal(pair))]
    if refused and cells:
        raise UsageError("cannot be accepted as a baseline:\n  " + "\n  ".join(refused))
    chosen = [pair for pair in named if refusal(pair) is None]
    if not chosen:
        raise UsageError("the run holds nothing that can be accepted as a baseline:\n  " + "\n  ".join(refused))
    return chosen


def _prepare(run: FinishedRun, pair: JudgedPair, store: Store, shelf: Shelf, terms: Acceptance) -> Baseline:
    """Stores a pair's objects and makes its entry; nothing is in force yet."""
    capture = store.read(pair.case or "")
    if capture.judged_digest != pair.judged_digest:
        raise UsageError(f"{pair.label}: the record names judged digest {pair.judged_digest}, the stored capture has "
                         f"{capture.judged_digest}: they are not of one run; run again")  # fmt: skip
    fingerprint = stored_fingerprint(capture)
    key = key_of(run, pair)
    previous = shelf.newest(key)
    table = _reused(previous, capture, terms) or shelf.folder.put(write_table(capture.traces, terms.keep), SUFFIX)
    entry = Baseline(
        key=key, rule=pair.rule, judged_digest=capture.judged_digest, requests=_count(capture),
        positions=int(capture.traces.requests.length[~capture.traces.requests.companion].sum()),
        kept=tuple(terms.keep), work=work_of(fingerprint), verdict=str(pair.verdict),
        floor=_sentence(pair, "floor", "sentence"), control=_sentence(pair, "control", "verdict"),
        author=terms.author, reason=terms.reason, accepted=f"{terms.moment:%Y-%m-%dT%H:%M:%SZ}",
        run_started=run.started, run_digest=run.digest, table=table,
        fingerprint=shelf.folder.put(_json(fingerprint), JSON), previous=None,
    )  # fmt: skip
    if previous is None:
        return entry
    return dataclasses.replace(entry, previous=_digest_of(previous, shelf))


def _reused(previous: Baseline | None, capture: Capture, terms: Acceptance) -> str | None:
    """The table that is already stored for the same judged bits and columns, whatever wrote it."""
    if previous is None or previous.judged_digest != capture.judged_digest or previous.kept != terms.keep:
        return None
    return previous.table


def _digest_of(baseline: Baseline, shelf: Shelf) -> str:
    return shelf.folder.put(baseline.to_bytes(), JSON)


def _count(capture: Capture) -> int:
    return int((~capture.traces.requests.companion).sum())


def _sentence(pair: JudgedPair, part: str, key: str) -> str:
    value = pair.raw.get(part)
    return str(value.get(key)) if isinstance(value, Mapping) else ""


def _json(fingerprint: Fingerprint) -> bytes:
    return (json.dumps(fingerprint.to_json(), indent=1) + "\n").encode()
