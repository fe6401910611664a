"""The gate: from a run's verdicts, its baselines, approvals and a policy to one decision. Pure; time is passed in.

It does not know files, ssh or how verdicts are reached. The rules it keeps, in order of exit code:

    4   an engine ERROR in a cell that blocks
    5   an approval that this run's plan calls upon is invalid, expired, wrongly scoped or wrongly signed
    1   a cell that blocks failed, or drifted from its baseline, and nobody has signed for it; a cost cell failed
    3   evidence that the policy refuses, no baseline yet, unforeseen UNSUPPORTED, pairs that were not judged, cells
        left out where the policy wants whole matrices, a cost above its limit or not measured
    0   everything else, with at least one cell that blocks PASS, APPROVED or as declared
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from harness.approval.ruling import Approved, Difference, Filed, Noted, Rulings, Scope, rule
from harness.baseline.drift import Drift
from harness.engine import RULES
from harness.finished import FinishedRun, JudgedPair
from harness.gate import ENGINE, FAILED, NOT_JUDGED, OK, left_out_words
from harness.release.cost import CostEvidence
from harness.release.policy import Policy, Stance, corpus_of, matches
from harness.verdict import VerdictName

APPROVAL = 5
Drifts = Mapping[str, Drift]  # label to what the pair came to against its baseline


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One pair after the gate. `outcome` is its verdict here; `reasons` say what made it so, worst first."""

    label: str
    cell: str
    verdict: VerdictName
    outcome: VerdictName
    stance: Stance
    kept: bool  # the verdict is the cell's declared point
    foreseen: bool
    reasons: tuple[str, ...]
    drift: Drift | None
    approvals: tuple[Approved, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the gate decided and why. `costs` are sentences about costs above their limits."""

    exit_code: int
    sentence: str
    rows: tuple[Row, ...]
    invalid: tuple[Noted, ...]
    obsolete: tuple[Noted, ...]
    costs: tuple[str, ...]
    warnings: tuple[str, ...]
    policy: str
    decided: datetime
    cost: CostEvidence | None = None


def decide_gate(
    run: FinishedRun, drifts: Drifts, filed: Sequence[Filed], policy: Policy, now: datetime,
    cost: CostEvidence | None = None,
) -> Decision:  # fmt: skip
    """Decides on a run. `drifts` holds every pair held against a baseline; `now` is aware; `cost` is measured apart."""
    scope = Scope(
        engine=run.engine, model=run.model, labels={pair.label for pair in run.pairs},
        cells={pair.cell for pair in run.pairs},
    )  # fmt: skip
    differences = tuple(item for pair in run.pairs for item in differences_of(pair, drifts.get(pair.label)))
    rulings = rule(filed, scope, differences, policy.terms, now)
    rows = tuple(_row(pair, drifts.get(pair.label), rulings, policy) for pair in run.pairs)
    measures = run.cost if cost is None else cost.measures
    costs = _costs(measures, policy, () if cost is None else cost.doubts)
    failures = () if cost is None else cost.failures
    code, sentence = _conclude(run, rows, rulings, failures, costs, () if policy.left_out_cells else run.left_out)
    if policy.left_out_cells:
        sentence += left_out_words(run.left_out, run.matrix)
    return Decision(
        exit_code=code, sentence=sentence, rows=rows, invalid=rulings.invalid, obsolete=rulings.obsolete,
        costs=failures + costs, warnings=_warnings(rows) + _idle(run, policy), policy=policy.source, decided=now,
        cost=cost,
    )  # fmt: skip


def differences_of(pair: JudgedPair, drift: Drift | None) -> tuple[Difference, ...]:
    """What of a pair needs an approval."""
    found: list[Difference] = []
    old, new = pair.digests.get("reference"), pair.digests.get("variant")
    if pair.verdict is VerdictName.FAIL and pair.expected is None and old and new:
        floor = pair.digests.get("floor")
        if floor is not None and floor != old and old == new:
            new = floor  # run-to-run: the reference differs from itself
        found.append(
            Difference(label=pair.label, kind="difference", rule=pair.rule, corpus=pair.corpus_digest, old=old, new=new)
        )
    if drift is not None and drift.outcome == "different" and drift.old and drift.new:
        found.append(Difference(label=pair.label, kind="drift", rule=pair.rule, corpus=pair.corpus_digest,
                                old=drift.old, new=drift.new))  # fmt: skip
    return tuple(found)


def _row(pair: JudgedPair, drift: Drift | None, rulings: Rulings, policy: Policy) -> Row:
    kept = pair.expected is not None
    approvals = tuple(item for item in rulings.approved if item.difference.label == pair.label)
    failed = _failed(pair, drift, approvals)
    short = () if kept else _short(pair, drift, policy)
    outcome = pair.verdict
    reasons: tuple[str, ...] = (pair.reason,)
    if pair.verdict in (VerdictName.ERROR, VerdictName.UNSUPPORTED):
        pass
    elif failed:
        outcome, reasons = VerdictName.FAIL, failed
    elif pair.verdict is VerdictName.INSUFFICIENT:
        outcome = VerdictName.INSUFFICIENT
    elif short:
        outcome, reasons = VerdictName.INSUFFICIENT, short
    elif approvals:
        outcome, reasons = VerdictName.APPROVED, tuple(_signed(item) for item in approvals)
    return Row(
        label=pair.label, cell=pair.cell, verdict=pair.verdict, outcome=outcome,
        stance=policy.stance(pair.cell, pair.label), kept=kept and not failed, foreseen=pair.foreseen,
        reasons=reasons, drift=drift, approvals=approvals,
    )  # fmt: skip


def _failed(pair: JudgedPair, drift: Drift | None, approvals: Sequence[Approved]) -> tuple[str, ...]:
    """Sentences of what failed and is not approved."""
    covered = {item.difference.kind for item in approvals}
    failed: tuple[str, ...] = ()
    if pair.verdict is VerdictName.FAIL and pair.expected is None and "difference" not in covered:
        failed += (pair.reason,)
    if drift is not None and drift.outcome == "different" and "drift" not in covered:
        failed += (f"drift: {drift.sentence}",)
    return failed


def _signed(item: Approved) -> str:
    approval = item.approval
    by = f"signed by {', '.join(item.signers)}" if item.signers else f"NOT SIGNED, in the name of {approval.author}"
    return f"approved until {approval.expires:%Y-%m-%d}, {by}: {approval.reason}"


def _short(pair: JudgedPair, drift: Drift | None, policy: Policy) -> tuple[str, ...]:
    """What the policy demands and this pair does not show."""
    found: list[str] = []
    demanded = policy.demanded(pair.corpus)
    if demanded is not None and RULES.index(pair.rule) < RULES.index(demanded):
        found.append(f"judged under rule {pair.rule}, and the policy demands {demanded} on corpus {pair.corpus}")
    if pair.elements < policy.comparisons:
        found.append(f"{pair.elements} elements compared, and the policy demands {policy.comparisons}")
    if pair.witnessed < policy.witnessed:
        found.append(f"{pair.witnessed} positions witnessed, and the policy demands {policy.witnessed}")
    if pair.weak and not policy.weak_corpora:
        found.append(f"the policy does not count this corpus: {pair.weak}")
    if pair.control == "planted" and not policy.comparator_only_controls:
        found.append("the policy does not count a control of the comparator only")
    if drift is not None and drift.outcome == "no baseline" and not policy.missing_baselines:
        found.append("no baseline yet; accept one with `samebits baseline accept`")
    if drift is not None and drift.outcome == "incomparable":
        found.append(drift.sentence)
    return tuple(found)


def _costs(measures: Mapping[str, float], policy: Policy, doubts: Sequence[str]) -> tuple[str, ...]:
    found = list(doubts) if policy.cost else []
    for name, limit in sorted(policy.cost.items()):
        value = measures.get(name)
        if value is None:
            found.append(f"cost {name} is limited to {limit:g} and the run did not measure it")
        elif not value <= limit:  # NaN is above every limit
            found.append(f"cost {name} is {value:g}, above the {limit:g} the policy allows")
    return tuple(found)


def _conclude(
    run: FinishedRun, rows: Sequence[Row], rulings: Rulings, failures: Sequence[str], costs: Sequence[str],
    left_out: Sequence[str],
) -> tuple[int, str]:  # fmt: skip
    block = [row for row in rows if row.stance == "block"]
    errors = _labels(block, VerdictName.ERROR)
    if errors:
        return ENGINE, f"{_count(errors, 'cell')} ended in an engine ERROR: {', '.join(errors)}"
    if rulings.invalid:
        names = [note.name for note in rulings.invalid]
        return APPROVAL, f"{_count(names, 'approval')} that this run calls upon cannot be honoured: {', '.join(names)}"
    failed = _labels(block, VerdictName.FAIL)
    if failed:
        return FAILED, f"{_count(failed, 'cell')} FAILED and nobody has signed for it: {', '.join(failed)}"
    if failures:
        return FAILED, "; ".join(failures)
    insufficient = _labels(block, VerdictName.INSUFFICIENT)
    if insufficient:
        return NOT_JUDGED, f"{_count(insufficient, 'cell')} INSUFFICIENT: {', '.join(insufficient)}"
    if left_out:
        return NOT_JUDGED, f"the policy wants whole matrices, and these cells were left out: {', '.join(left_out)}"
    if len(rows) < run.planned:
        return NOT_JUDGED, f"{run.planned - len(rows)} of {run.planned} planned pairs were not judged"
    unforeseen = [row.label for row in block if row.verdict is VerdictName.UNSUPPORTED and not row.foreseen]
    if unforeseen:
        return NOT_JUDGED, f"UNSUPPORTED, and neither [requires] nor the matrix foresees it: {', '.join(unforeseen)}"
    if costs:
        return NOT_JUDGED, "; ".join(costs)
    good = [row for row in block if row.kept or row.outcome in (VerdictName.PASS, VerdictName.APPROVED)]
    if not good:
        return NOT_JUDGED, "nothing that blocks passed"
    return OK, _all_well(rows)


def _labels(rows: Sequence[Row], outcome: VerdictName) -> list[str]:
    return [row.label for row in rows if row.outcome is outcome and not row.kept]


def _all_well(rows: Sequence[Row]) -> str:
    counts = {
        "PASS": sum(row.outcome is VerdictName.PASS for row in rows),
        "APPROVED": sum(row.outcome is VerdictName.APPROVED for row in rows),
        "as declared": sum(row.kept for row in rows),
        "UNSUPPORTED": sum(row.outcome is VerdictName.UNSUPPORTED for row in rows),
    }
    parts = [f"{number} {name}" for name, number in counts.items() if number]
    unsigned = sum(not item.signers for row in rows for item in row.approvals)
    parts += [f"{_count([''] * unsigned, 'approval')} NOT SIGNED"] if unsigned else []
    warned = sum(_is_open(row) for row in rows)
    return ", ".join(parts + ([f"{warned} only warned about"] if warned else []))


def _warnings(rows: Sequence[Row]) -> tuple[str, ...]:
    """What does not block and a reader must know."""
    found = [f"{row.label} is {row.outcome} and only warns: {row.reasons[0]}"
             for row in rows if row.stance == "warn" and _is_open(row)]  # fmt: skip
    for row in rows:
        found += [f"{row.label} rests on an approval that is NOT SIGNED ({item.name})"
                  for item in row.approvals if not item.signers]  # fmt: skip
    return tuple(found)


def _idle(run: FinishedRun, policy: Policy) -> tuple[str, ...]:
    """Demands of the policy that met nothing here: foreseen in a policy for many matrices, or a typing mistake."""
    corpora = {name for pair in run.pairs for name in (pair.corpus, corpus_of(pair.corpus))}
    rules = [f"the policy's rule for corpus {name!r} met no cell of this run"
             for name in sorted(policy.rules) if name not in corpora]  # fmt: skip
    block = [f"the policy's block = {pattern!r} met no cell of this run" for pattern in policy.block
             if not any(matches((pattern,), pair.cell, pair.label) for pair in run.pairs)]  # fmt: skip
    return (*rules, *block)


def _is_open(row: Row) -> bool:
    bad = (VerdictName.ERROR, VerdictName.FAIL, VerdictName.INSUFFICIENT)
    return not row.kept and (row.outcome in bad or (row.outcome is VerdictName.UNSUPPORTED and not row.foreseen))


def _count(items: Sequence[str], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"


def with_change_author(policy: Policy, author: str | None) -> Policy:
    """The policy, told who made this change."""
    return (
        policy
        if author is None
        else dataclasses.replace(policy, terms=dataclasses.replace(policy.terms, change_author=author))
    )
