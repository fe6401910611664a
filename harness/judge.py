"""Judges one pair from its captures: the only place where a verdict comes from. Pure.

It does not know engines, files or time. The rules it keeps are its steps, in this order; the first that has something
to say decides:

1. a capture that is missing, incomplete, copied, self-contradictory or incomparable is ERROR; a refusal,
   or a rule that an engine says its evidence is too weak for (`harness.limits`), UNSUPPORTED;
2. a floor that differs is FAIL as run-to-run, and no axis is blamed;
3. a fingerprint field that differs and does not belong to the axis is INSUFFICIENT;
4. any differing position is FAIL, witnessed or not;
5. too few witnessed positions, or a control that stayed silent, is INSUFFICIENT;
6. else PASS, with what it is worth. A cell that declares FAIL, ERROR or RUN-TO-RUN as its point keeps that verdict,
   marked expected; any other verdict there is INSUFFICIENT, and so is one that came about without the axis
   (`harness.point`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.agreement import AXES as AGREEMENT_AXES
from harness.agreement import AgreementResult, measure_agreement
from harness.axis import Axis
from harness.baseline.environment import References, judge_environment
from harness.capture import CACHE_EMPTIED, CACHE_STATE, NOTHING_SERVED, Capture
from harness.claims import check_claims
from harness.compare import Comparison, compare, strongest_rule
from harness.diagnose import diagnose
from harness.engine import Replay, Rule
from harness.expected import Expected, missing_from
from harness.faults.captures import plant_least
from harness.fingerprint import fingerprint_of, undeclared
from harness.judged import ComparisonError, find_judged
from harness.lifetime import Failure
from harness.limits import COMPANY, refused_rule, stated_limits, unsolved_sampling
from harness.occupancy import occupancy
from harness.plan import Pair
from harness.point import hold_to_point
from harness.verdict import (
    MOST_WHERE,
    ComparisonResult,
    ControlResult,
    DiagnosisResult,
    FirstDivergence,
    FloorResult,
    RequestDivergence,
    Verdict,
    VerdictName,
)
from harness.witness import witnessed

Captures = Mapping[str, Capture | Failure]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Arms:
    """The three captures of a judgement: reference, the reference again, and the variant."""

    reference: Capture
    floor: Capture
    varied: Capture

    @property
    def all(self) -> tuple[Capture, Capture, Capture]:
        """In the order of the fields."""
        return self.reference, self.floor, self.varied


def judge(
    pair: Pair,
    captures: Captures,
    expected: Mapping[str, Sequence[Expected]],
    references: References | None = None,
) -> Verdict:
    """The verdict of a pair. `captures` holds what each of its cases came to, `expected` what each must hold,
    `references` the baselines of pairs on an environment axis."""
    whole = whole_captures(pair, captures, expected)
    if pair.cell.axis.kind == "environment":
        verdict = judge_environment(pair, whole, references or References(accepted={}))
    else:
        verdict = _judge(pair, whole)
    return hold_to_point(pair, whole, verdict)


def whole_captures(
    pair: Pair, captures: Captures, expected: Mapping[str, Sequence[Expected]]
) -> dict[str, Capture | Failure]:
    """The pair's captures; one that lacks a part of what was asked for becomes a Failure that says so."""
    result: dict[str, Capture | Failure] = {}
    for case in pair.cases:
        capture = captures.get(case)
        if isinstance(capture, Capture):
            missing = missing_from(capture.traces, expected[case])
            if missing:
                capture = Failure(kind="error", message="; ".join(missing), log_tail=())
        if capture is not None:
            result[case] = capture
    return result


def _judge(pair: Pair, captures: Captures) -> Verdict:
    start = Verdict(cell=pair.cell.name, label=pair.label, verdict=VerdictName.ERROR, reason="")
    if pair.unsupported is not None:
        return _end(start, VerdictName.UNSUPPORTED, pair.unsupported, foreseen=pair.foreseen)
    arms = _arms(captures, pair.reference, pair.floor, pair.varied)
    if isinstance(arms, Failure):
        name = VerdictName.UNSUPPORTED if arms.kind == "unsupported" else VerdictName.ERROR
        return _end(start, name, arms.message, failure=arms)
    start = dataclasses.replace(start, digests=_digests(arms))
    mistake = _nonce_mistake(arms, pair.cell.axis) or _claim_mistake(arms)
    if mistake:
        return _end(start, VerdictName.ERROR, mistake)
    refused = refused_rule(arms.all, pair.cell.rule)
    if refused:
        return _end(start, VerdictName.UNSUPPORTED, refused)
    try:
        return _compare_all(pair, captures, arms, start)
    except ComparisonError as error:
        return _end(start, VerdictName.ERROR, str(error))


def _compare_all(pair: Pair, captures: Captures, arms: _Arms, start: Verdict) -> Verdict:
    cell = pair.cell
    floor = compare(arms.reference.traces, arms.floor.traces, cell.rule, "natural")
    start = dataclasses.replace(start, floor=_floor(floor), caps=_stated(arms, cell.axis))
    if floor.outcome == "different":
        diagnosis = _diagnosis(floor, arms.reference, arms.floor, cell.axis)
        reason = f"run-to-run: the reference differs from itself, so no axis is blamed{_unsolved(arms)}"
        return _end(start, VerdictName.FAIL, reason, diagnosis=diagnosis)
    differences, caps = _undeclared(arms.reference, arms.varied, pair.owned)
    start = dataclasses.replace(start, undeclared=differences, caps=caps + start.caps)
    if differences:
        reason = f"more than the axis differs between the arms: {'; '.join(differences)}"
        return _end(start, VerdictName.INSUFFICIENT, reason)
    comparison = compare(arms.reference.traces, arms.varied.traces, cell.rule, cell.replay)
    counted, evidence = _witness(comparison, arms, cell.axis)
    control = _control(pair, captures, arms)
    start = dataclasses.replace(
        start, comparison=_counts(comparison, counted), control=control, agreement=_agreement(arms, cell.axis)
    )
    if comparison.outcome == "different":
        diagnosis = _diagnosis(comparison, arms.reference, arms.varied, cell.axis)
        return _end(start, VerdictName.FAIL, _failure_reason(comparison), diagnosis=diagnosis)
    if counted < cell.minimum:
        reason = f"no PASS without a witness: {counted} positions witnessed, {cell.minimum} needed ({evidence})"
        return _end(start, VerdictName.INSUFFICIENT, reason)
    if control.kind != "none" and not control.fired:
        return _end(start, VerdictName.INSUFFICIENT, f"the control stayed silent: {control.sentence}{_unsolved(arms)}")
    if control.kind == "none":
        return _end(start, VerdictName.INSUFFICIENT, "the cell has no control, so nothing shows that it can fail")
    reason = f"{comparison.positions} positions equal under rule {cell.rule}"
    return _end(start, VerdictName.PASS, reason, claims=_claims(comparison, counted, control, evidence))


def _stated(arms: _Arms, axis: Axis) -> tuple[str, ...]:
    return stated_limits(arms.all, company=axis.witness != "all")


def _unsolved(arms: _Arms) -> str:
    """What an engine that cannot repeat its draws adds to a reason."""
    why = unsolved_sampling(arms.all)
    return f"; the sampling layer is unsolved: {why}" if why else ""


def _end(start: Verdict, name: VerdictName, reason: str, **changes: object) -> Verdict:
    return dataclasses.replace(start, verdict=name, reason=reason, **changes)  # type: ignore[arg-type]


def _arms(captures: Captures, reference: str | None, floor: str | None, varied: str | None) -> _Arms | Failure:
    found: list[Capture] = []
    for role, case in (("reference", reference), ("floor", floor), ("variant", varied)):
        capture = captures.get(case) if case is not None else None
        if capture is None:
            return Failure(kind="error", message=f"the {role} was planned but not captured", log_tail=())
        if isinstance(capture, Failure):
            return dataclasses.replace(capture, message=f"{role}: {capture.message}")
        found.append(capture)
    return _Arms(reference=found[0], floor=found[1], varied=found[2])


def _digests(arms: _Arms) -> dict[str, str]:
    return {"reference": arms.reference.judged_digest, "floor": arms.floor.judged_digest,
            "variant": arms.varied.judged_digest}  # fmt: skip


def _nonce_mistake(arms: _Arms, axis: Axis) -> str | None:
    """Says which captures cannot be what the plan asked for, by their nonces."""
    pairs = (("floor", arms.floor), ("variant", arms.varied))
    for role, capture in pairs:
        if capture.repetition_nonce == arms.reference.repetition_nonce:
            return f"the {role} carries the reference's repetition nonce: it is a copy, not a capture"
    same_process = arms.reference.process_nonce == arms.floor.process_nonce
    if axis.floor == "same lifetime" and not same_process:
        return "the floor was captured in another process than the reference; both belong into one lifetime"
    if axis.floor == "fresh lifetimes" and same_process and not _emptied(arms, axis):
        return "the floor was captured in the reference's process; it needs a fresh lifetime"
    if axis.evidence == "process nonce" and arms.varied.process_nonce == arms.reference.process_nonce:
        return "both sides of the restart carry the same process nonce: the engine was not restarted"
    return None


def _emptied(arms: _Arms, axis: Axis) -> bool:
    """Whether the axis is the prefix cache alone, and the engine emptied it before each arm."""
    states = [
        field.value
        for capture in (arms.reference, arms.floor, arms.varied)
        for field in capture.subject
        if field.name == CACHE_STATE
    ]
    return axis.witness == "cached" and states == [CACHE_EMPTIED] * 3


def _agreement(arms: _Arms, axis: Axis) -> AgreementResult | None:
    if axis.name not in AGREEMENT_AXES:
        return None
    return measure_agreement(arms.reference.traces, arms.varied.traces)


def _claim_mistake(arms: _Arms) -> str | None:
    for role, capture in (("reference", arms.reference), ("floor", arms.floor), ("variant", arms.varied)):
        contradictions = check_claims(capture.traces)
        if contradictions:
            return f"{role}: the engine contradicts itself: {'; '.join(contradictions)}"
    return None


def _undeclared(a: Capture, b: Capture, owned: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    same_lifetime = a.process_nonce == b.process_nonce
    found, caps = undeclared(fingerprint_of(a.subject), fingerprint_of(b.subject), owned, same_lifetime=same_lifetime)
    return tuple(difference.describe() for difference in found), caps


def _witness(comparison: Comparison, arms: _Arms, axis: Axis) -> tuple[int, str]:
    """(compared positions that the axis reached, the evidence in words)."""
    if axis.witness == "all":
        reason = _process_evidence(arms, axis)
        if not reason:
            return 0, f"{_unmoved(arms, axis)} did not change between the arms"
        return comparison.positions, reason
    witness = witnessed(arms.reference.traces, arms.varied.traces, axis.witness)
    shows_steps = axis.name == "load" and COMPANY not in arms.varied.observed
    seen = occupancy([arms.varied.traces]) if shows_steps else None
    sentence = f"{witness.sentence}; {seen.text}" if seen else witness.sentence
    return int((witness.mask & comparison.compared_mask).sum()), sentence


def _process_evidence(arms: _Arms, axis: Axis) -> str | None:
    if axis.evidence == "process nonce":
        return "two processes, by their nonces"
    if axis.evidence == "lineage":
        before, after = _served(arms.reference), _served(arms.varied)
        return f"served before: {before}; {after}" if before == NOTHING_SERVED != after else None
    if _unmoved(arms, axis):
        return None
    seen = ((key, arms.reference.observed[key], arms.varied.observed[key]) for key in _keys(axis))
    return "observed " + ", ".join(f"{key}: {before} and {after}" for key, before, after in seen)


def _unmoved(arms: _Arms, axis: Axis) -> str:
    """The observed fields that should differ between the arms, and do not, or that an arm does not show."""
    pairs = ((key, arms.reference.observed.get(key), arms.varied.observed.get(key)) for key in _keys(axis))
    return " and ".join(key for key, before, after in pairs if before is None or after is None or before == after)


def _keys(axis: Axis) -> tuple[str, ...]:
    return (axis.evidence or "", *axis.also)


def _served(capture: Capture) -> object:
    return next((field.value for field in capture.subject if field.name == "lineage.served"), None)


def _floor(comparison: Comparison) -> FloorResult:
    sentence = f"the reference twice: {comparison.positions} positions {comparison.outcome}"
    return FloorResult(verdict=comparison.outcome, positions=comparison.positions, sentence=sentence)


def _diagnosis(comparison: Comparison, reference: Capture, variant: Capture, axis: Axis) -> DiagnosisResult:
    deeper = compare(
        reference.traces, variant.traces, strongest_rule(reference.traces, variant.traces), comparison.replay
    )
    found = diagnose(comparison, axis.home, deeper)
    first, size = comparison.first, comparison.magnitude
    return DiagnosisResult(
        layer=found.layer, reason=found.reason, text=found.text,
        first=None if first is None else FirstDivergence(
            request=first.request, sample=first.sample, position=first.position, field=first.field,
            reference=first.reference, variant=first.variant, ulp=first.max_ulp, delta_logprob=first.max_delta,
            tie=first.tie, gap=first.gap,
        ),
        max_abs_delta_logprob=size.max_delta, max_ulp=size.max_ulp, kl_k1=size.kl_k1, kl_k3=size.kl_k3,
        per_request=_per_request(comparison, reference),
    )  # fmt: skip


def _per_request(comparison: Comparison, reference: Capture) -> tuple[RequestDivergence, ...]:
    differing = {item.key: item for item in comparison.differing_requests}
    judged = find_judged(reference.traces)
    rows = []
    for key, begin, end in zip(judged.keys, judged.offsets[:-1], judged.offsets[1:], strict=True):
        item = differing.get(key)
        where = comparison.different_mask[begin:end].nonzero()[0][:MOST_WHERE]
        rows.append(
            RequestDivergence(
                request=key.id if key.sample == 0 else f"{key.id} sample {key.sample}",
                positions=int(end - begin),
                differing=item.positions if item else 0,
                first=item.position if item else None,
                where=tuple(int(position) for position in where),
            )
        )
    return tuple(rows)


def _control(pair: Pair, captures: Captures, arms: _Arms) -> ControlResult:
    control = pair.cell.control
    if control.kind == "none":
        return _control_result(pair, "no control is declared", fired=False)
    if control.kind == "planted":
        return _planted(pair, arms)
    ran = _arms(captures, pair.control_reference, pair.control_floor, pair.control_varied)
    if isinstance(ran, Failure):
        return _control_result(pair, f"could not run: {ran.message}", fired=False)
    try:
        return _control_outcome(pair, ran, pair.cell.rule, pair.cell.replay)
    except ComparisonError as error:
        return _control_result(pair, f"could not be compared: {error}", fired=False)


def _control_outcome(pair: Pair, ran: _Arms, rule: Rule, replay: Replay) -> ControlResult:
    mistake = _nonce_mistake(ran, pair.cell.axis) or _claim_mistake(ran)
    if mistake:
        return _control_result(pair, mistake, fired=False)
    if compare(ran.reference.traces, ran.floor.traces, rule, "natural").outcome == "different":
        return _control_result(pair, "its own floor differs: noise is not a control", fired=False)
    differences, _ = _undeclared(ran.reference, ran.varied, pair.control_owned)
    if differences:
        return _control_result(pair, f"more than it sets differs: {'; '.join(differences)}", fired=False)
    result = compare(ran.reference.traces, ran.varied.traces, rule, replay)
    fired = result.outcome == "different"
    sentence = f"{result.differing_positions} of {result.positions} positions differ" if fired else "nothing differs"
    return _control_result(
        pair, sentence, fired=fired, positions=result.positions, differing=result.differing_positions
    )


def _planted(pair: Pair, arms: _Arms) -> ControlResult:
    planted = plant_least(arms.varied.traces, pair.cell.rule, pair.cell.replay)
    result = compare(arms.reference.traces, planted, pair.cell.rule, pair.cell.replay)
    sentence = "comparator only: the least fault of this rule planted in a stored capture"
    return _control_result(
        pair, sentence, fired=result.outcome == "different",
        positions=result.positions, differing=result.differing_positions,
    )  # fmt: skip


def _control_result(pair: Pair, sentence: str, *, fired: bool, positions: int = 0, differing: int = 0) -> ControlResult:
    control = pair.cell.control
    parts = [control.mode or "", *(f"{key}={value}" for key, value in control.variant), control.fault or "",
             control.planted or ""]  # fmt: skip
    return ControlResult(
        kind=control.kind, value=" ".join(part for part in parts if part), fired=fired, sentence=sentence,
        positions=positions, differing_positions=differing,
    )  # fmt: skip


def _counts(comparison: Comparison, counted: int) -> ComparisonResult:
    return ComparisonResult(
        requests=comparison.requests, positions=comparison.positions, elements=comparison.elements,
        witnessed=counted, differing_positions=comparison.differing_positions,
        differing_requests=len(comparison.differing_requests),
        fields={entry.field: entry.differing for entry in comparison.fields},
    )  # fmt: skip


def _failure_reason(comparison: Comparison) -> str:
    where = ""
    if comparison.first is not None:
        where = f", first in request {comparison.first.key} at position {comparison.first.position}"
    if comparison.differing_positions == 0:
        return f"{len(comparison.differing_requests)} of {comparison.requests} requests differ{where}"
    return f"{comparison.differing_positions} of {comparison.positions} positions differ{where}"


def _claims(comparison: Comparison, counted: int, control: ControlResult, evidence: str) -> tuple[str, ...]:
    label = "control: comparator only" if control.kind == "planted" else f"control {control.value} fired"
    compared = f"{comparison.elements} elements over {comparison.positions} positions"
    claims = (
        f"{compared} of {comparison.requests} requests compared",
        f"{counted} positions witnessed ({evidence})",
        f"{label}: {control.sentence}",
    )
    return claims + ((comparison.note,) if comparison.note else ())
