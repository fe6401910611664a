"""A finished run as frozen values: what baselines, approvals and the gate need of `run.json`.

It does not know captures or reports. Rules: read from the record alone; a record of another shape is an error that
names the place; nothing is defaulted that a decision rests on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import cast

from harness.engine import Field, Rule
from harness.errors import StoreError
from harness.fingerprint import fields_from_records
from harness.record import RECORD, read_record
from harness.verdict import VerdictName

JsonObject = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedPair:
    """One verdict of the record. `raw` is the record's own object, for what is only shown."""

    cell: str
    variant: str
    label: str
    axis: str
    rule: Rule
    replay: str
    corpus: str
    corpus_digest: str
    weak: str  # why a PASS over the corpus says little; empty when it does not
    verdict: VerdictName
    expected: VerdictName | None
    foreseen: bool
    reason: str
    elements: int
    witnessed: int
    control: str  # kind of the control, "none" without one
    cases: Mapping[str, str]  # role to case id
    digests: Mapping[str, str]  # role to judged digest
    raw: JsonObject

    @property
    def reference_role(self) -> str:
        """The arm that is held against a baseline: what runs now, where the reference is the baseline itself."""
        return "reference" if "reference" in self.cases else "variant"

    @property
    def case(self) -> str | None:
        """The case that is held against a baseline."""
        return self.cases.get(self.reference_role)

    @property
    def judged_digest(self) -> str | None:
        """The judged digest of that case; None when it was not captured."""
        return self.digests.get(self.reference_role)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """A run that ended. `digest` is the SHA-256 of run.json as it was read."""

    folder: Path | None
    digest: str
    engine: str
    model: str
    matrix: str
    matrix_digest: str
    left_out: tuple[str, ...]  # cells of the matrix that the run was not asked to judge
    started: str
    exit_code: int
    planned: int
    pairs: tuple[JudgedPair, ...]
    subject: tuple[Field, ...]
    observer: tuple[Field, ...]
    cost: Mapping[str, float]
    raw: JsonObject

    def pair(self, label: str) -> JudgedPair | None:
        """The pair of that label, or None."""
        return next((pair for pair in self.pairs if pair.label == label), None)


def read_finished(folder: Path) -> FinishedRun:
    """The run in a folder. Raises StoreError."""
    record = read_record(folder)
    content = (folder / RECORD).read_bytes()
    return finished_run(record, folder=folder, digest=hashlib.sha256(content).hexdigest())


def finished_run(record: JsonObject, *, folder: Path | None, digest: str) -> FinishedRun:
    """The record as values. Raises StoreError for a record that lacks something."""
    where = str(folder / RECORD) if folder else RECORD
    try:
        return _run(record, folder, digest)
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{where}: expected the record of a finished run, but {_what(error)}; run again") from error


def model_key(model: str) -> str:
    """A model's name as keys and files show it: the last part of a path, and no path."""
    return PurePath(model).name or model


def _what(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else f"it cannot be read: {error}"


def _run(record: JsonObject, folder: Path | None, digest: str) -> FinishedRun:
    matrix, plan = _object(record["matrix"]), _object(record["plan"])
    fingerprint = _object(record["fingerprint"])
    return FinishedRun(
        folder=folder, digest=digest, engine=str(record["engine"]), model=model_key(str(record["model"])),
        matrix=str(matrix["name"]), matrix_digest=str(matrix["digest"]),
        left_out=tuple(str(name) for name in cast("list[object]", matrix["left_out"])), started=str(record["started"]),
        exit_code=int(str(record["exit_code"])), planned=int(str(plan["pairs"])),
        pairs=tuple(_pair(_object(item)) for item in cast("list[object]", record["verdicts"])),
        subject=fields_from_records(fingerprint["subject"]), observer=fields_from_records(fingerprint["observer"]),
        cost=_cost(record.get("cost")), raw=record,
    )  # fmt: skip


def _pair(item: JsonObject) -> JudgedPair:
    corpus, comparison = _object(item["corpus"]), _object(item["comparison"] or {})
    control, axis = _object(item["control"] or {"kind": "none"}), _object(item["axis"])
    expected = item["expected"]
    return JudgedPair(
        cell=str(item["cell"]), variant=str(item["variant"]), label=str(item["label"]), axis=str(axis["name"]),
        rule=cast("Rule", item["rule"]), replay=str(item["replay"]), corpus=str(corpus["name"]),
        corpus_digest=str(corpus["digest"] or ""), weak=str(corpus["weak"] or ""),
        verdict=VerdictName(str(item["verdict"])), expected=None if expected is None else VerdictName(str(expected)),
        foreseen=item["foreseen"] is True, reason=str(item["reason"]),
        elements=int(str(comparison.get("elements", 0))), witnessed=int(str(comparison.get("witnessed", 0))),
        control=str(control["kind"]), cases=_strings(item["cases"]), digests=_strings(item["digests"]), raw=item,
    )  # fmt: skip


def _cost(value: object) -> dict[str, float]:
    """The cost record's numbers by name, nested names joined with a dot."""
    found: dict[str, float] = {}
    if isinstance(value, Mapping):
        for name, item in sorted(value.items()):
            if isinstance(item, int | float) and not isinstance(item, bool):
                found[str(name)] = float(item)
            else:
                found.update({f"{name}.{inner}": number for inner, number in _cost(item).items()})
    return found


def _strings(value: object) -> dict[str, str]:
    return {key: str(item) for key, item in _object(value).items() if item is not None}


def _object(value: object) -> JsonObject:
    if not isinstance(value, Mapping):
        raise TypeError(f"expected an object, found {json.dumps(value)[:60]}")
    return value
