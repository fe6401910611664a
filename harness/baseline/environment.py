"""Judges a pair whose reference is a baseline: the environment changed, or did not, and the bits stayed, or did not.

It does not know files or engines. Pure. The rules it keeps are its steps, in this order; the first that has
something to say decides:

1. a capture that is missing, copied or self-contradictory is ERROR; an engine's refusal UNSUPPORTED;
2. the variant captured twice now must be the same, or it is FAIL as run-to-run;
3. no baseline yet is INSUFFICIENT, and so is one of another corpus, schedule or sampling;
4. any difference is FAIL, whatever changed; the changed identity fields are the suspects;
5. the control, captured now, must differ from the baseline, and from itself it must not;
6. a field that the axis owns must have changed: without one nothing was put to the test (INSUFFICIENT), except in a
   nightly, where an unchanged environment with the same bits is a plain PASS.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.baseline.drift import NO_SUSPECT, Accepted, Drift, Now, find_drift
from harness.baseline.prefix import chained_rule, chains
from harness.baseline.table import ends
from harness.capture import Capture
from harness.claims import check_claims
from harness.compare import Comparison, compare
from harness.fingerprint import fingerprint_of, owns
from harness.judged import ComparisonError
from harness.lifetime import Failure
from harness.verdict import (
    ComparisonResult,
    ControlResult,
    DiagnosisResult,
    FirstDivergence,
    FloorResult,
    Verdict,
    VerdictName,
)

if TYPE_CHECKING:
    from harness.plan import Pair

UNCHANGED = "unchanged environment, same bits"


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """Baselines by label, for the pairs that have one. `nightly`: an unchanged environment is a plain PASS."""

    accepted: Mapping[str, Accepted]
    nightly: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Twice:
    """A case captured twice in one process."""

    first: Capture
    second: Capture


def judge_environment(pair: Pair, captures: Mapping[str, Capture | Failure], references: References) -> Verdict:
    """The verdict of a pair on an environment axis."""
    start = Verdict(cell=pair.cell.name, label=pair.label, verdict=VerdictName.ERROR, reason="")
    if pair.unsupported is not None:
        return _end(start, VerdictName.UNSUPPORTED, pair.unsupported, foreseen=pair.foreseen)
    now = _twice(captures, pair.varied, pair.floor)
    if isinstance(now, Failure):
        name = VerdictName.UNSUPPORTED if now.kind == "unsupported" else VerdictName.ERROR
        return _end(start, name, now.message, failure=now)
    start = dataclasses.replace(start, digests={"variant": now.first.judged_digest, "floor": now.second.judged_digest})
    mistake = _mistake(now)
    if mistake:
        return _end(start, VerdictName.ERROR, mistake)
    try:
        return _hold(pair, captures, now, references, start)
    except ComparisonError as error:
        return _end(start, VerdictName.ERROR, str(error))


def _hold(
    pair: Pair, captures: Mapping[str, Capture | Failure], now: _Twice, references: References, start: Verdict
) -> Verdict:
    rule = pair.cell.rule
    floor = compare(now.first.traces, now.second.traces, rule, "natural")
    start = dataclasses.replace(start, floor=_floor(floor))
    if floor.outcome == "different":
        return _end(start, VerdictName.FAIL, "run-to-run: the variant differs from itself, so no axis is blamed")
    accepted = references.accepted.get(pair.label)
    control = _control(pair, captures, now, accepted)
    start = dataclasses.replace(start, control=control)
    if accepted is None:
        reason = (f"no baseline yet; accept one with `samebits baseline accept RUN --cell {pair.cell.name} --reason …` "
                  "and name it with --baselines")  # fmt: skip
        return _end(start, VerdictName.INSUFFICIENT, reason)
    drift = find_drift(accepted, _now(now.first), rule)
    start = dataclasses.replace(
        start, digests={"reference": accepted.baseline.judged_digest, **(start.digests or {})},
        comparison=_counts(drift, floor), caps=tuple(f"unknown on one side: {field}" for field in drift.unknown),
    )  # fmt: skip
    return _conclude(pair, drift, control, accepted, references, start)


def _conclude(
    pair: Pair, drift: Drift, control: ControlResult, accepted: Accepted, references: References, start: Verdict
) -> Verdict:
    if drift.outcome == "incomparable":
        return _end(start, VerdictName.INSUFFICIENT, drift.sentence)
    if drift.outcome == "different":
        return _end(start, VerdictName.FAIL, drift.sentence, diagnosis=_diagnosis(pair, drift))
    if not control.fired:
        return _end(start, VerdictName.INSUFFICIENT, f"the control stayed silent: {control.sentence}")
    if drift.positions < pair.cell.minimum:
        reason = f"no PASS without a witness: {drift.positions} positions, {pair.cell.minimum} needed"
        return _end(start, VerdictName.INSUFFICIENT, reason)
    changed = tuple(item for item in drift.suspects if owns(pair.owned, item.partition(":")[0]))
    if changed or references.nightly:
        return _end(start, VerdictName.PASS, _worth(changed, drift), claims=_claims(changed, drift, control, accepted))
    reason = (f"{UNCHANGED}: nothing that the axis {pair.cell.axis.name!r} owns changed since the baseline of "
              f"{accepted.baseline.accepted}, so nothing was put to the test")  # fmt: skip
    return _end(start, VerdictName.INSUFFICIENT, reason)


def _worth(changed: tuple[str, ...], drift: Drift) -> str:
    if not drift.suspects:
        return UNCHANGED
    what = f"changed: {'; '.join(changed)}" if changed else "what changed is not this axis's"
    return f"same bits as the baseline at {drift.positions} positions; {what}"


def _claims(changed: tuple[str, ...], drift: Drift, control: ControlResult, accepted: Accepted) -> tuple[str, ...]:
    baseline = accepted.baseline
    return (
        f"{drift.positions} positions of {drift.requests} requests hold the baseline's digests",
        f"baseline accepted {baseline.accepted} by {baseline.author}; its floor: {baseline.floor}",
        f"{len(changed)} owned fields changed" if changed else "no owned field changed",
        f"control {control.value} fired: {control.sentence}",
    )


def _twice(captures: Mapping[str, Capture | Failure], first: str | None, second: str | None) -> _Twice | Failure:
    found: list[Capture] = []
    for role, case in (("variant", first), ("floor", second)):
        capture = captures.get(case) if case is not None else None
        if capture is None:
            return Failure(kind="error", message=f"the {role} was planned but not captured", log_tail=())
        if isinstance(capture, Failure):
            return dataclasses.replace(capture, message=f"{role}: {capture.message}")
        found.append(capture)
    return _Twice(first=found[0], second=found[1])


def _mistake(now: _Twice) -> str | None:
    if now.first.repetition_nonce == now.second.repetition_nonce:
        return "the floor carries the variant's repetition nonce: it is a copy, not a capture"
    if now.first.process_nonce != now.second.process_nonce:
        return "the floor was captured in another process than the variant; both belong into one lifetime"
    for role, capture in (("variant", now.first), ("floor", now.second)):
        contradictions = check_claims(capture.traces)
        if contradictions:
            return f"{role}: the engine contradicts itself: {'; '.join(contradictions)}"
    return None


def _now(capture: Capture) -> Now:
    return Now(judged_digest=capture.judged_digest, fingerprint=fingerprint_of(capture.subject),
               traces=lambda: capture.traces)  # fmt: skip


def _control(
    pair: Pair, captures: Mapping[str, Capture | Failure], now: _Twice, accepted: Accepted | None
) -> ControlResult:
    """What the control showed against the baseline, or, while there is none, against the variant."""
    if pair.control_varied is None:
        return _control_result(pair, "no control is declared", fired=False)
    ran = _twice(captures, pair.control_varied, pair.control_floor)
    if isinstance(ran, Failure):
        return _control_result(pair, f"could not run: {ran.message}", fired=False)
    mistake = _mistake(ran)
    if mistake:
        return _control_result(pair, mistake, fired=False)
    if compare(ran.first.traces, ran.second.traces, pair.cell.rule, "natural").outcome == "different":
        return _control_result(pair, "its own floor differs: noise is not a control", fired=False)
    rule = chained_rule(pair.cell.rule)
    known = (
        {key: chain.end for key, chain in chains(now.first.traces, rule).items()}
        if accepted is None
        else ends(accepted.table(), rule)
    )
    moved = [known.get(key) != chain.end for key, chain in chains(ran.first.traces, rule).items()]
    against = "the variant, for want of a baseline" if accepted is None else "the baseline"
    sentence = f"{sum(moved)} of {len(moved)} requests differ from {against}" if any(moved) else "nothing differs"
    return _control_result(pair, sentence, fired=any(moved), requests=len(moved), differing=sum(moved))


def _control_result(pair: Pair, sentence: str, *, fired: bool, requests: int = 0, differing: int = 0) -> ControlResult:
    control = pair.cell.control
    parts = [control.mode or "", *(f"{key}={value}" for key, value in control.variant)]
    return ControlResult(
        kind=control.kind, value=" ".join(part for part in parts if part), fired=fired, sentence=sentence,
        positions=requests, differing_positions=differing,
    )  # fmt: skip


def _floor(comparison: Comparison) -> FloorResult:
    sentence = f"the variant twice: {comparison.positions} positions {comparison.outcome}"
    return FloorResult(verdict=comparison.outcome, positions=comparison.positions, sentence=sentence)


def _counts(drift: Drift, floor: Comparison) -> ComparisonResult:
    """Elements are those of the same case under the same rule: digests cover every one of them."""
    return ComparisonResult(
        requests=drift.requests, positions=drift.positions, elements=floor.elements, witnessed=drift.positions,
        differing_positions=0, differing_requests=drift.differing_requests, fields={},
    )  # fmt: skip


def _diagnosis(pair: Pair, drift: Drift) -> DiagnosisResult:
    reason = f"changed since the baseline: {'; '.join(drift.suspects)}" if drift.suspects else NO_SUSPECT
    first = None
    if drift.first is not None:
        first = FirstDivergence(
            request=drift.first[0], sample=0, position=drift.first[1], field=pair.cell.rule,
            reference=f"digest {(drift.old or '')[:12]}", variant=f"digest {(drift.new or '')[:12]}", ulp=None,
            delta_logprob=None, tie="none", gap=None,
        )  # fmt: skip
    return DiagnosisResult(
        layer=pair.cell.axis.home, reason=reason, text="\n".join([drift.sentence, drift.size]), first=first,
        max_abs_delta_logprob=None, max_ulp=None, kl_k1=None, kl_k3=None, per_request=(),
    )  # fmt: skip


def _end(start: Verdict, name: VerdictName, reason: str, **changes: object) -> Verdict:
    return dataclasses.replace(start, verdict=name, reason=reason, **changes)  # type: ignore[arg-type]
