"""Compares two captures under a rule, bit for bit, column by column.

It does not know axes, witnesses or verdicts. Rules: requests pair by (id, sample) and companions are left out; every
position that both sides generated in the same context is compared, the rest is counted; ids and float bits decide,
never float values; evidence that the rule needs and a capture lacks is an error, and so is comparing nothing.

What each field compares, and when:

    token           natural replay, always; in golden replay forced ids only prove that the path was followed
    pick            the sampler's own pick; in natural replay it repeats the token and counts no element
    logprob         from rule `logprobs` on: the chosen token's, where both sides chose the same token
    topk_ids, topk_logprobs     from rule `topk` on: ids, float bits and number of candidates
    tensors         rule `tensors`: digests of the position's logits
    finish_reason, length       every rule, counted in requests

In natural replay the first position whose tokens differ is compared and the rest of that request is not: from there
on the two sides continue different texts. Those positions count as incomparable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from harness.compare.columns import Run
from harness.compare.divergence import Divergence, Evidence, Magnitude, describe, measure
from harness.compare.fields import FieldName
from harness.compare.scan import Found, Scan, count_elements, find_comparable, find_differing
from harness.engine import Replay, Rule
from harness.judged import ComparisonError, Judged, RequestKey, align
from harness.traces import Bool, Int64, Traces

__all__ = ["Comparison", "ComparisonError", "FieldCount", "RequestDifference", "compare", "strongest_rule"]

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldCount:
    """One field: how much of it was compared and how much differs, in `unit`."""

    field: FieldName
    unit: Literal["positions", "requests"]
    compared: int
    differing: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDifference:
    """One differing request. `position` is its first difference, counted from its first output token.

    A request of which only the finish reason differs has it at its last position, and `positions` 0.
    """

    key: RequestKey
    position: int
    positions: int
    fields: tuple[FieldName, ...]  # of the whole request


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison:
    """The result of one comparison. Masks run over the reference's judged layout (`harness.judged`), N positions.

    `elements` counts the ids, float bit patterns and digests compared. `incomparable` counts the reference's positions
    without a partner in the same context. `note` says what stood in for what under rule `text`, else it is empty.
    Differences of length and finish reason have no position in the masks: `outcome` decides, not the mask.
    """

    rule: Rule
    replay: Replay
    outcome: Literal["same", "different"]
    requests: int
    positions: int
    elements: int
    incomparable: int
    fields: tuple[FieldCount, ...]
    differing_requests: tuple[RequestDifference, ...]
    different_mask: Bool  # (N,)
    compared_mask: Bool  # (N,)
    first: Divergence | None
    magnitude: Magnitude
    note: str

    @property
    def choice(self) -> Literal["token", "pick"]:
        """The column that holds what a side chose: its pick in golden replay, else its token."""
        return "pick" if self.replay == "golden" else "token"

    @property
    def differing_positions(self) -> int:
        """Positions at which any field differs."""
        return int(self.different_mask.sum())

    def differing(self, field: FieldName) -> int:
        """How many positions or requests differ in a field; 0 for a field the rule leaves out."""
        return next((count.differing for count in self.fields if count.field == field), 0)


def compare(reference: Traces, variant: Traces, rule: Rule, replay: Replay, decode: Decode | None = None) -> Comparison:
    """Compares the judged requests of two captures.

    `decode` turns ids into text for rule `text`; without it the ids stand in for the text, and `note` says so.

    Raises:
        ComparisonError: requests missing, extra or duplicated; evidence the rule needs is missing; a golden variant
            that left the forced path; nothing to compare. The message names the requests.
    """
    scan = Scan(reference, variant, align(reference, variant), rule, replay)
    limits = find_comparable(scan)
    runs = scan.runs(limits)
    found = find_differing(scan, runs)
    note = ""
    if rule == "text":
        found, note = _settle_text(scan, found, decode)
    return _report(scan, limits, found, runs, note)


def strongest_rule(reference: Traces, variant: Traces) -> Rule:
    """The strongest rule for which both captures carry the columns."""
    rule: Rule = "tokens"
    levels: tuple[tuple[Rule, tuple[object, object]], ...] = (
        ("logprobs", (reference.positions.logprob, variant.positions.logprob)),
        ("topk", (reference.positions.topk_ids, variant.positions.topk_ids)),
        ("tensors", (reference.positions.logits_digest, variant.positions.logits_digest)),
    )
    for level, columns in levels:
        if any(column is None for column in columns):
            return rule
        rule = level
    return rule


def _settle_text(scan: Scan, found: Found, decode: Decode | None) -> tuple[Found, str]:
    """Under rule `text`, drops the differences of requests whose ids decode to the same text."""
    if decode is None:
        return found, "token ids stand in for the text, which no capture holds"
    ref, var = scan.alignment.reference, scan.alignment.variant
    dropped: list[int] = []
    for j in np.unique(_requests(found[scan.choice], ref.offsets)).tolist():
        texts = [
            decode(_ids(side, judged, scan.choice, j)) for side, judged in ((scan.reference, ref), (scan.variant, var))
        ]
        if texts[0] == texts[1]:
            dropped.append(j)
    kept = {field: rows[~np.isin(_requests(rows, ref.offsets), dropped)] for field, rows in found.items()}
    return kept, "texts decoded from the ids were compared"


def _ids(traces: Traces, judged: Judged, choice: Literal["token", "pick"], j: int) -> list[int]:
    column = traces.positions.token if choice == "token" else traces.positions.pick
    start = int(judged.starts[j])
    ids: list[int] = column[start : start + int(judged.lengths[j])].tolist()
    return ids


def _report(scan: Scan, limits: Int64, found: Found, runs: tuple[Run, ...], note: str) -> Comparison:
    offsets = scan.alignment.reference.offsets
    positions = int(limits.sum())
    compared = dict.fromkeys(found, positions)
    if "logprob" in found and "token" in found:
        compared["logprob"] -= len(found["token"])
    elements = count_elements(scan, found, compared, runs)
    if not elements:
        raise ComparisonError("nothing was compared: no position of any judged request has a partner")
    different = np.zeros(int(offsets[-1]), dtype=np.bool_)
    for rows in found.values():
        different[rows] = True
    unequal = _unequal_requests(scan)
    numbers = np.flatnonzero(different)
    requests = _differing_requests(scan, found, unequal, numbers)
    evidence = Evidence(
        reference=scan.reference,
        variant=scan.variant,
        alignment=scan.alignment,
        choice=scan.choice,
        different=numbers,
        flips=found[scan.choice],
        kl_positions=compared.get("logprob", 0),
    )
    return Comparison(
        rule=scan.rule,
        replay=scan.replay,
        outcome="different" if requests else "same",
        requests=len(scan.alignment.keys),
        positions=positions,
        elements=elements,
        incomparable=int(offsets[-1]) - positions,
        fields=_field_counts(scan, found, compared, unequal),
        differing_requests=requests,
        different_mask=different,
        compared_mask=_compared_mask(offsets, limits),
        first=_describe_first(evidence, found, requests),
        magnitude=measure(evidence),
        note=note,
    )


def _compared_mask(offsets: Int64, limits: Int64) -> Bool:
    """The first limits[j] positions of each request."""
    mask = np.ones(int(offsets[-1]), dtype=np.bool_)
    for j in np.flatnonzero(limits < np.diff(offsets)):
        mask[offsets[j] + limits[j] : offsets[j + 1]] = False
    return mask


def _unequal_requests(scan: Scan) -> dict[FieldName, list[int]]:
    """Requests that differ in finish reason or length, by their place in the alignment."""
    ref, var = scan.alignment.reference, scan.alignment.variant
    reasons, others = scan.reference.requests.finish_reason, scan.variant.requests.finish_reason
    pairs = zip(ref.rows.tolist(), var.rows.tolist(), strict=True)
    return {
        "finish_reason": [j for j, (a, b) in enumerate(pairs) if reasons[a] != others[b]],
        "length": np.flatnonzero(ref.lengths != var.lengths).tolist(),
    }


def _field_counts(
    scan: Scan, found: Found, compared: dict[FieldName, int], unequal: dict[FieldName, list[int]]
) -> tuple[FieldCount, ...]:
    by_position = [
        FieldCount(field=field, unit="positions", compared=compared[field], differing=len(rows))
        for field, rows in found.items()
    ]
    by_request = [
        FieldCount(field=field, unit="requests", compared=len(scan.alignment.keys), differing=len(requests))
        for field, requests in unequal.items()
    ]
    return (*by_position, *by_request)


def _differing_requests(
    scan: Scan, found: Found, unequal: dict[FieldName, list[int]], numbers: Int64
) -> tuple[RequestDifference, ...]:
    offsets, keys = scan.alignment.reference.offsets, scan.alignment.keys
    every = _by_request(numbers, offsets)
    fields = _fields_of_requests(found, unequal, offsets)
    ends = np.minimum(scan.alignment.reference.lengths, scan.alignment.variant.lengths)
    ends[scan.alignment.reference.lengths == scan.alignment.variant.lengths] -= 1  # else: past the shorter end
    return tuple(
        RequestDifference(key=keys[j], position=position, positions=count, fields=fields[j])
        for j in sorted(fields)
        for position, count in (every.get(j, (int(ends[j]), 0)),)
    )


def _fields_of_requests(
    found: Found, unequal: dict[FieldName, list[int]], offsets: Int64
) -> dict[int, tuple[FieldName, ...]]:
    """The differing fields of each differing request."""
    names = (*found, *unequal)
    codes = np.zeros(len(offsets) - 1, dtype=np.int64)  # bit i: names[i] differs
    for bit, field in enumerate(names):
        codes[_requests(found[field], offsets) if field in found else unequal[field]] |= 1 << bit
    named = {
        code: tuple(name for bit, name in enumerate(names) if code >> bit & 1) for code in np.unique(codes).tolist()
    }
    return {j: named[code] for j, code in enumerate(codes.tolist()) if code}


def _requests(numbers: Int64, offsets: Int64) -> Int64:
    """The request each number of the judged layout belongs to."""
    return np.searchsorted(offsets, numbers, side="right") - 1


def _by_request(numbers: Int64, offsets: Int64) -> dict[int, tuple[int, int]]:
    """(first position, number of positions) of each request that holds any of the sorted numbers."""
    requests = _requests(numbers, offsets)
    which, where, counts = np.unique(requests, return_index=True, return_counts=True)
    firsts = numbers[where] - offsets[which]
    return dict(zip(which.tolist(), zip(firsts.tolist(), counts.tolist(), strict=True), strict=True))


def _describe_first(evidence: Evidence, found: Found, requests: tuple[RequestDifference, ...]) -> Divergence | None:
    if not requests:
        return None
    first = requests[0]
    j = evidence.alignment.keys.index(first.key)
    number = evidence.alignment.reference.offsets[j] + first.position
    here = tuple(field for field, rows in found.items() if first.positions and number in rows)
    return describe(evidence, j, first.position, here or first.fields)
