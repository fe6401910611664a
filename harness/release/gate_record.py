"""The record of a gate decision, `gate.json`, and a run's record as the gate leaves it.

It does not decide or read baselines. Rules: a schema number comes first; it names the run it is about by digest; what
an approval turned into APPROVED says so, and says when it is not signed; run.json itself is never changed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from harness.baseline.drift import Drift
from harness.errors import StoreError
from harness.finished import FinishedRun
from harness.matrix import schema_mistake
from harness.release.decision import Decision, Row
from harness.seal import check_seal, sealed, unsealed

SCHEMA = 1
GATE = "gate.json"


def gate_record(run: FinishedRun, decision: Decision) -> dict[str, object]:
    """The decision as JSON-able data."""
    record = {
        "schema": SCHEMA,
        "run": run.digest,
        "matrix": run.matrix,
        "engine": run.engine,
        "model": run.model,
        "decided": f"{decision.decided:%Y-%m-%dT%H:%M:%SZ}",
        "exit_code": decision.exit_code,
        "outcome": decision.sentence,
        "policy": decision.policy,
        "rows": [_row(row) for row in decision.rows],
        "invalid": [asdict(note) for note in decision.invalid],
        "obsolete": [asdict(note) for note in decision.obsolete],
        "costs": list(decision.costs),
        "cost": None if decision.cost is None else {"sha256": decision.cost.digest,
                                                    "measures": dict(decision.cost.measures)},
        "warnings": list(decision.warnings),
    }  # fmt: skip
    return sealed(record)


def gated_run(run: FinishedRun, decision: Decision) -> dict[str, object]:
    """The run's record with the gate's outcomes in it, for reports."""
    record: dict[str, Any] = copy.deepcopy(dict(run.raw))
    rows = {row.label: row for row in decision.rows}
    for verdict in cast("list[dict[str, Any]]", record["verdicts"]):
        row = rows[str(verdict["label"])]
        if row.outcome is not row.verdict:
            verdict["verdict"] = str(row.outcome)
            verdict["reason"] = "; ".join(row.reasons)
        verdict["caps"] = [*verdict["caps"], *_caps(row)]
    record["exit_code"] = decision.exit_code
    record["outcome"] = decision.sentence
    return unsealed(record)


def read_gate(folder: Path, run: FinishedRun) -> Mapping[str, object]:
    """The decision that lies beside a run. Raises StoreError when it is missing or about another run."""
    file = folder / GATE
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"{file}: expected a gate decision: {error}; run `samebits gate`") from error
    message = schema_mistake(record.get("schema") if isinstance(record, dict) else None, SCHEMA)
    if message:
        raise StoreError(f"{file}: $.schema: {message}")
    if record.get("run") != run.digest:
        raise StoreError(f"{file}: it is about another run (record {str(record.get('run'))[:12]}, this one is "
                         f"{run.digest[:12]}); run `samebits gate` again")  # fmt: skip
    check_seal(record, file, "run `samebits gate` again")
    return cast("Mapping[str, object]", record)


def drift_of(record: Mapping[str, object], label: str) -> Drift | None:
    """The drift a decision recorded for a pair; None when there was none to record."""
    for row in cast("list[dict[str, Any]]", record["rows"]):
        if row["label"] == label and row["drift"] is not None:
            value = dict(row["drift"])
            first = value.pop("first")
            value.pop("environment")
            for name in ("suspects", "unknown"):
                value[name] = tuple(value[name])
            return Drift(**value, first=None if first is None else (first[0], first[1]))
    return None


def _row(row: Row) -> dict[str, object]:
    return {
        "label": row.label,
        "cell": row.cell,
        "verdict": str(row.verdict),
        "outcome": str(row.outcome),
        "stance": row.stance,
        "as_declared": row.kept,
        "foreseen": row.foreseen,
        "reasons": list(row.reasons),
        "drift": None if row.drift is None else {**asdict(row.drift), "environment": row.drift.environment},
        "approvals": [
            {
                "name": item.name,
                "kind": item.difference.kind,
                "signers": list(item.signers),
                "author": item.approval.author,
                "reason": item.approval.reason,
                "cause": item.approval.cause,
                "expires": f"{item.approval.expires:%Y-%m-%dT%H:%M:%SZ}",
            }
            for item in row.approvals
        ],
    }


def _caps(row: Row) -> list[str]:
    caps = [f"approval {item.name} is NOT SIGNED" for item in row.approvals if not item.signers]
    if row.drift is not None and row.drift.outcome == "same":
        caps.append(f"against the baseline: {row.drift.sentence}")
    return caps
