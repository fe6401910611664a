"""A cost report as the gate takes it: measures that a policy can limit, and what speaks against believing them.

It does not measure or decide. Rules: measures are the upper ends of intervals; a report of another engine or model is
refused; one of another environment or configuration, of two identical arms or with a planted slowdown counts as not
measured, with the reason; a failed cost cell is a failure whatever the policy limits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from harness.cost.record import is_failure, read_cost
from harness.engine import Field
from harness.errors import UsageError
from harness.fingerprint import fields_from_records
from harness.finished import FinishedRun, model_key

MOST_NAMED = 4
_NOT_THE_ENVIRONMENT = ("config.", "resolved.", "observed.", "work.", "lineage.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostEvidence:
    """What a cost report says about a run. `content` are the file's bytes."""

    measures: Mapping[str, float]
    failures: tuple[str, ...]
    doubts: tuple[str, ...]  # why the measures do not count; empty when they do
    content: bytes

    @property
    def digest(self) -> str:
        """SHA-256 of the file."""
        return hashlib.sha256(self.content).hexdigest()


def read_evidence(file: Path, run: FinishedRun) -> CostEvidence:
    """The evidence in a cost record. Raises StoreError; UsageError for another engine or model."""
    record = read_cost(file)
    engine, model = str(record["engine"]), model_key(str(record["model"]))
    if (engine, model) != (run.engine, run.model):
        raise UsageError(f"--cost {file}: measured on engine {engine!r} with model {model!r}, the run is about "
                         f"{run.engine!r} with {run.model!r}; measure that one")  # fmt: skip
    doubts = tuple(_doubts(cast("Mapping[str, Any]", record), run))
    failures = (f"cost cell failed, {record['state']}: {record['outcome']}",) if is_failure(record) else ()
    measures = {} if doubts else {str(k): float(v) for k, v in cast("dict[str, float]", record["gate"]).items()}
    return CostEvidence(measures=measures, failures=failures, doubts=doubts, content=file.read_bytes())


def _doubts(record: Mapping[str, Any], run: FinishedRun) -> list[str]:
    found = []
    if record["identical_arms"]:
        found.append("the cost report compares a configuration with itself")
    found += [str(sentence) for sentence in record["drifted"][:MOST_NAMED]]
    on = record["arms"]["on"]
    if on["slowed"] != 1:
        found.append("the cost report has a planted slowdown")
    settings = cast("Mapping[str, object]", run.raw["settings"])
    moved = sorted(key for key, value in settings.items() if on["settings"].get(key, value) != value)
    if moved:
        found.append(f"the cost report's on arm is configured otherwise than the run: {_named(moved)}")
    other = _other_fields(fields_from_records(record["fingerprint"]["subject"]), run.subject)
    if other:
        found.append(f"the cost report is of another environment than the run: {_named(other)}")
    return found


def _other_fields(on: tuple[Field, ...], subject: tuple[Field, ...]) -> list[str]:
    """Identity fields of the environment that both know and that differ."""
    known = {field.name: field.value for field in on}
    return [
        field.name
        for field in subject
        if field.field_class == "identity"
        and not field.name.startswith(_NOT_THE_ENVIRONMENT)
        and field.name in known
        and known[field.name] != field.value
    ]


def _named(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
