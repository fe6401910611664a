"""A baseline: one accepted capture of a cell and variant, with who accepted it, why, and where it was made.

It does not know where baselines are kept. Rules: a baseline names the judged digest it stands for; it carries the
verdicts of the floor and the control it was accepted with; it knows the baseline it replaced.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import cast

from harness.engine import Rule
from harness.errors import StoreError
from harness.fingerprint import Fingerprint
from harness.matrix import schema_mistake

SCHEMA = 1
WORK = "work."  # fields of what a case was given to do: a variant must share them with its baseline


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Key:
    """What a baseline is a baseline of. Settings are no part of it: their change is what it finds."""

    engine: str
    model: str
    cell: str
    variant: str

    @property
    def label(self) -> str:
        """`cell[variant]`."""
        return f"{self.cell}[{self.variant}]"

    def __str__(self) -> str:
        return f"{self.label} on {self.engine} with {self.model}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """One acceptance. `table` and `fingerprint` are digests of objects; `previous` that of the entry it replaced."""

    key: Key
    rule: Rule
    judged_digest: str
    requests: int
    positions: int
    kept: tuple[str, ...]  # columns kept by choice
    work: Mapping[str, str]  # digests of corpus, schedule, sampling, requests, companions
    verdict: str
    floor: str  # what the reference captured twice showed, in words
    control: str
    author: str
    reason: str
    accepted: str  # UTC
    run_started: str
    run_digest: str  # SHA-256 of the run's record
    table: str
    fingerprint: str
    previous: str | None

    def to_bytes(self) -> bytes:
        """Canonical JSON; its SHA-256 is the entry's identity."""
        return (json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, sort_keys=True) + "\n").encode()


def read_baseline(content: bytes, where: str) -> Baseline:
    """What `to_bytes` wrote. Raises StoreError."""
    try:
        value = json.loads(content)
    except ValueError as error:
        raise StoreError(f"{where}: expected a baseline in JSON: {error}; restore it") from error
    message = schema_mistake(value.get("schema") if isinstance(value, dict) else None, SCHEMA)
    if message:
        raise StoreError(f"{where}: $.schema: {message}")
    fields = {name: item for name, item in value.items() if name != "schema"}
    try:
        key, kept = Key(**fields.pop("key")), tuple(cast("list[str]", fields.pop("kept")))
        return Baseline(key=key, kept=kept, **fields)
    except (KeyError, TypeError) as error:
        raise StoreError(f"{where}: is no whole baseline: {error}; restore it") from error


def work_of(fingerprint: Fingerprint) -> dict[str, str]:
    """Digests of what the case was given to do."""
    given = (field for field in fingerprint.fields if field.name.startswith(WORK))
    return {field.name.removeprefix(WORK): str(field.value) for field in given}
