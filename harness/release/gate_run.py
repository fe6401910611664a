"""Runs the gate over a finished run: loads what the decision is a function of, decides, and writes what it decided.

It does not decide itself. Rules: every input is optional but the run; what is named and cannot be read is an error,
never an empty input; run.json stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from harness.approval.cabinet import read_cabinet
from harness.cost.record import RECORD as COST
from harness.errors import OutputError
from harness.finished import FinishedRun
from harness.record import write_json
from harness.release.decision import Decision, decide_gate, with_change_author
from harness.release.gate_record import GATE, gate_record, gated_run
from harness.release.policy import Policy, read_policy

COMMENT = "gate.md"
REPORTS = "gate"  # folder of the reports with the gate's outcomes

Comment = Callable[[Mapping[str, object]], str]
Reporter = Callable[[Mapping[str, object], Path], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateInputs:
    """What a release manager hands the gate. None: not given."""

    baselines: str | None = None
    approvals: Path | None = None
    signers: Path | None = None
    policy: Path | None = None
    change_author: str | None = None
    cost: Path | None = None


def gate(run: FinishedRun, inputs: GateInputs, now: datetime) -> Decision:
    """Decides on a run. Raises UsageError, StoreError."""
    from harness.baseline.shelf import Shelf
    from harness.release.cost import read_evidence
    from harness.release.held import hold

    policy = Policy() if inputs.policy is None else read_policy(inputs.policy)
    filed = () if inputs.approvals is None else read_cabinet(inputs.approvals, inputs.signers, now)
    drifts = {} if inputs.baselines is None else hold(run, Shelf(inputs.baselines))
    cost = None if inputs.cost is None else read_evidence(inputs.cost, run)
    return decide_gate(run, drifts, filed, with_change_author(policy, inputs.change_author), now, cost)


def write_gate(
    run: FinishedRun, decision: Decision, folder: Path, comment: Comment, report: Reporter
) -> dict[str, object]:
    """Writes gate.json, gate.md, the cost report it was given, and the reports as the gate leaves them.

    Raises:
        OutputError: the folder cannot be written.
    """
    record = gate_record(run, decision)
    place = folder / REPORTS
    try:
        place.mkdir(parents=True, exist_ok=True)
        (folder / COMMENT).write_text(comment(record), encoding="utf-8")
        if decision.cost is not None:
            (folder / COST).write_bytes(decision.cost.content)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written: {error.strerror}; choose another --out") from error
    report(gated_run(run, decision), place)
    write_json(folder / GATE, record)
    return record
