"""Holds a captured case against its baseline: the same bits, or a drift with where it begins and what changed.

It does not know axes, approvals or files. Rules: the rule stays exact, whatever changed; judged digests decide first,
then 32 bytes a request, and traces are opened only where those differ; equal corpus, schedule and sampling are
required and nothing else; changed identity fields are suspects, and if none changed the drift says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from harness.baseline.entry import Baseline, work_of
from harness.engine import Rule
from harness.fingerprint import FieldDifference, Fingerprint, diff

if TYPE_CHECKING:
    import pyarrow as pa

    from harness.compare import Comparison
    from harness.judged import RequestKey
    from harness.traces import Traces

Outcome = Literal["same", "different", "incomparable", "no baseline"]
NO_SUSPECT = "nothing that decides changed: a fault of the engine, or of a fingerprint that does not see what moved it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """What a case came to against its baseline. `suspects` are changed identity fields, in words.

    `first` is (request, position) of the first difference; `size` says how large it is, as far as what was kept shows.
    """

    outcome: Outcome
    sentence: str
    old: str | None = None  # judged digest of the baseline
    new: str | None = None  # judged digest of now
    suspects: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()  # identity fields that could not be read on one side
    requests: int = 0
    positions: int = 0
    differing_requests: int = 0
    first: tuple[str, int] | None = None
    size: str = ""

    @property
    def environment(self) -> Literal["changed", "unchanged"]:
        """Whether an identity field changed since the baseline."""
        return "changed" if self.suspects else "unchanged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """The case as it is now. `traces` opens its capture; called only where digests differ."""

    judged_digest: str
    fingerprint: Fingerprint
    traces: Callable[[], Traces]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A baseline with what opens it: `fingerprint` where it was made, `table` its capture."""

    baseline: Baseline
    fingerprint: Callable[[], Fingerprint]
    table: Callable[[], pa.Table]


def find_drift(accepted: Accepted | None, now: Now, rule: Rule) -> Drift:
    """Compares now with the baseline under a rule.

    Raises ComparisonError for captures that cannot be compared, StoreError for damaged baselines.
    """
    if accepted is None:
        return Drift(outcome="no baseline", sentence="no baseline yet", new=now.judged_digest)
    baseline, before = accepted.baseline, accepted.fingerprint()
    suspects, unknown = suspected(before, now.fingerprint)
    start = Drift(
        outcome="same", sentence="", old=baseline.judged_digest, new=now.judged_digest, suspects=suspects,
        unknown=unknown, requests=baseline.requests, positions=baseline.positions,
    )  # fmt: skip
    moved = work_changes(baseline, now.fingerprint)
    if moved:
        return _end(
            start, "incomparable", f"the baseline was made with another {', another '.join(moved)}; accept a new one"
        )
    if baseline.judged_digest == now.judged_digest:
        return _end(start, "same", _same(start))
    return _located(start, accepted.table(), now.traces(), rule)


def suspected(before: Fingerprint, now: Fingerprint) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(identity fields that changed, identity fields unknown on a side), the work itself left out."""
    found = [item for item in diff(before, now) if item.field_class == "identity" and not item.name.startswith("work.")]
    return (
        tuple(item.describe() for item in found if item.change != "unknown"),
        tuple(item.describe() for item in found if item.change == "unknown" and not _both_unknown(item)),
    )


def work_changes(baseline: Baseline, now: Fingerprint) -> tuple[str, ...]:
    """What the case was given that the baseline's was not."""
    current = work_of(now)
    return tuple(name for name in sorted(baseline.work) if baseline.work[name] != current.get(name))


def _both_unknown(item: FieldDifference) -> bool:
    return item.a is not None and item.b is not None and item.a.value is None and item.b.value is None


def _located(start: Drift, table: pa.Table, traces: Traces, rule: Rule) -> Drift:
    from harness.baseline.prefix import Chain, chained_rule, chains, first_difference
    from harness.baseline.table import ends, stored_chains

    chained = chained_rule(rule)
    current, stored = chains(traces, chained), ends(table, chained)
    if set(current) != set(stored):
        return _end(
            start,
            "different",
            "another set of requests was answered",
            differing_requests=len(set(current) ^ set(stored)),
        )
    moved = [key for key in sorted(stored) if stored[key] != current[key].end]
    if not moved:
        return _end(start, "same", f"{_same(start)} (under rule {rule}; evidence beyond it differs)")
    before: dict[RequestKey, Chain] = stored_chains(table, chained)
    places = {key: first_difference(before[key], current[key]) or 0 for key in moved}
    first = min(moved, key=lambda key: (places[key], key))
    sentence = (f"{len(moved)} of {len(stored)} requests differ from the baseline, first in request {first} "
                f"at position {places[first]}; {_blame(start)}")  # fmt: skip
    return _end(
        start, "different", sentence, differing_requests=len(moved), first=(str(first).strip("'"), places[first]),
        size=_size(table, traces, rule),
    )  # fmt: skip


def _size(table: pa.Table, traces: Traces, rule: Rule) -> str:
    """How large the difference is, under the strongest rule that what was kept allows."""
    from harness.baseline.table import traces_of
    from harness.compare import compare, strongest_rule

    kept = traces_of(table)
    comparison = compare(kept, traces, strongest_rule(kept, traces), "natural")
    return describe_size(comparison, rule)


def describe_size(comparison: Comparison, rule: Rule) -> str:
    """The size of a difference in words."""
    size = comparison.magnitude
    counted = (f"{comparison.differing_positions} of {comparison.positions} compared positions differ "
               f"under rule {comparison.rule}")  # fmt: skip
    if size.max_ulp is None or size.max_delta is None:
        kept = (
            ""
            if comparison.rule != "tokens" or rule in ("text", "tokens")
            else "; no logprobs were kept with the baseline"
        )
        return counted + kept
    return f"{counted}, at most {size.max_ulp} ulp, |Δlogprob| at most {size.max_delta:.3g}"


def _blame(drift: Drift) -> str:
    return f"changed: {'; '.join(drift.suspects)}" if drift.suspects else NO_SUSPECT


def _same(drift: Drift) -> str:
    if not drift.suspects:
        return "unchanged environment, same bits"
    return f"changed environment, same bits (changed: {'; '.join(drift.suspects)})"


def _end(start: Drift, outcome: Outcome, sentence: str, **changes: object) -> Drift:

    return dataclasses.replace(start, outcome=outcome, sentence=sentence, **changes)  # type: ignore[arg-type]
