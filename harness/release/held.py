"""Holds every pair of a finished run against its baseline. Opens captures only where digests differ.

It does not decide. Rules: the record's digest of a case must be the stored capture's; an environment cell was held
against its baseline when it was judged, so it is not held twice; a pair that was not captured has no drift.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from harness.axis import AXES
from harness.baseline.accept import key_of
from harness.baseline.drift import Drift, Now, find_drift
from harness.baseline.shelf import Shelf
from harness.errors import StoreError
from harness.fingerprint import Fingerprint, fingerprint_of
from harness.finished import FinishedRun, JudgedPair
from harness.verdict import VerdictName

if TYPE_CHECKING:
    from harness.traces import Traces


def hold(run: FinishedRun, shelf: Shelf) -> dict[str, Drift]:
    """Label to what the pair came to against its baseline. Raises StoreError for damaged baselines or captures."""
    return {pair.label: _drift(run, pair, shelf) for pair in run.pairs if _is_held(pair)}


def _is_held(pair: JudgedPair) -> bool:
    if pair.judged_digest is None or pair.verdict in (VerdictName.ERROR, VerdictName.UNSUPPORTED):
        return False
    axis = AXES.get(pair.axis)
    return axis is None or axis.kind != "environment"


def _drift(run: FinishedRun, pair: JudgedPair, shelf: Shelf) -> Drift:
    from harness.judged import ComparisonError

    accepted = shelf.accepted(key_of(run, pair))
    case, digest = pair.case or "", pair.judged_digest or ""
    now = Now(judged_digest=digest, fingerprint=_fingerprint(run, case, digest), traces=_traces(run, case))
    try:
        return find_drift(accepted, now, pair.rule)
    except ComparisonError as error:
        old = accepted.baseline.judged_digest if accepted else None
        return Drift(
            outcome="incomparable", sentence=f"cannot be compared with the baseline: {error}", old=old, new=digest
        )


def _fingerprint(run: FinishedRun, case: str, digest: str) -> Fingerprint:
    """The case's own fingerprint out of its capture's header. Raises StoreError when it is not the record's case."""
    from harness.store import Store, subject_fields

    header = Store((run.folder or Path()) / "captures").header(case)
    meta = header["capture"]
    found = meta.get("judged_digest") if isinstance(meta, dict) else None
    if found != digest:
        raise StoreError(f"{run.folder}: the record names judged digest {digest} for case {case}, its capture has "
                         f"{found}: they are not of one run; run again")  # fmt: skip
    return fingerprint_of(subject_fields(header))


def _traces(run: FinishedRun, case: str) -> Callable[[], Traces]:
    def read() -> Traces:
        from harness.store import Store

        return Store((run.folder or Path()) / "captures").read(case).traces

    return read
