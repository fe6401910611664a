"""The history of nightly runs: one row per cell, variant, engine and run, in Parquet that only ever grows.

It does not run or decide. Rules: a run is one file of its own, named by its content and written whole, so that runs
that end at the same time lose nothing and a crash in the middle leaves what was there; appending a run twice is
appending it once; fingerprints lie beside, once each; a file that cannot be read is said, never passed over in silence.

    parts/<UTC start>-<run digest>.parquet      rows of one run
    objects/<aa>/<SHA-256>.json                 fingerprints
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_type_hints

from harness.baseline.accept import publishable
from harness.baseline.folder import Folder
from harness.engine import Field
from harness.errors import StoreError
from harness.fingerprint import Fingerprint, fingerprint_of
from harness.finished import FinishedRun, JudgedPair
from harness.release.decision import Decision, Row

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA = 1
PARTS = "parts"
SUFFIX = ".parquet"
JSON = ".json"
_MARK = b"samebits history schema"


@dataclass(frozen=True, slots=True, kw_only=True)
class Night:
    """One pair of one run. Digests are empty where nothing was captured or nothing accepted; times are UTC."""

    run: str  # SHA-256 of run.json
    started: str
    matrix: str
    engine: str
    model: str
    cell: str
    variant: str
    rule: str
    verdict: str  # of the run
    outcome: str  # of the gate
    state: str  # what the gate found against the baseline, in words
    exit_code: int  # of the gate over the run
    judged_digest: str
    baseline_digest: str
    fingerprint: str  # digest of the object
    suspects: str  # JSON list of changed identity fields
    positions: int
    witnessed: int
    seconds: float

    @property
    def label(self) -> str:
        """`cell[variant]`."""
        return f"{self.cell}[{self.variant}]"

    @property
    def drifted(self) -> bool:
        """Whether the night's bits were others than the baseline's of that night."""
        return self.judged_digest != "" and self.baseline_digest != "" and self.judged_digest != self.baseline_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What a history holds: nights in order of time, and the files that cannot be read."""

    nights: tuple[Night, ...]
    damaged: tuple[str, ...]

    def of(self, engine: str, model: str, label: str) -> tuple[Night, ...]:
        """The nights of one pair, oldest first."""
        return tuple(n for n in self.nights if (n.engine, n.model, n.label) == (engine, model, label))


class History:
    """A history under a path or fsspec URL."""

    def __init__(self, url: str) -> None:
        """Raises UsageError for an unusable URL."""
        self.folder = Folder(url)

    def append(self, run: FinishedRun, decision: Decision) -> str:
        """Adds a run; returns the name of its file. Raises OutputError."""
        rows = {row.label: row for row in decision.rows}
        nights = [self._night(run, pair, rows[pair.label], decision) for pair in run.pairs]
        stamp = run.started.replace("-", "").replace(":", "")
        name = f"{PARTS}/{stamp}-{run.digest[:16]}{SUFFIX}"
        self.folder.write(name, _bytes(nights))
        return name

    def read(self) -> Past:
        """Everything that can be read. Raises StoreError when the folder cannot be."""
        nights: list[Night] = []
        damaged: list[str] = []
        for name in self.folder.names(PARTS, SUFFIX):
            try:
                nights += _nights(self.folder.read(name) or b"")
            except StoreError as error:
                damaged.append(f"{name}: {error}")
        ordered = sorted(nights, key=lambda night: (night.started, night.run, night.label))
        return Past(nights=tuple(ordered), damaged=tuple(damaged))

    def fingerprint(self, digest: str) -> Fingerprint:
        """A night's fingerprint. Raises StoreError."""
        return Fingerprint.from_json(json.loads(self.folder.get(digest, JSON)))

    def _night(self, run: FinishedRun, pair: JudgedPair, row: Row, decision: Decision) -> Night:
        comparison = pair.raw.get("comparison")
        counts = comparison if isinstance(comparison, Mapping) else {}
        drift = row.drift
        return Night(
            run=run.digest, started=run.started, matrix=run.matrix, engine=run.engine, model=run.model, cell=pair.cell,
            variant=pair.variant, rule=pair.rule, verdict=str(row.verdict), outcome=str(row.outcome),
            state=state_of(row), exit_code=decision.exit_code, judged_digest=pair.judged_digest or "",
            baseline_digest=_baseline(pair, row),
            fingerprint=self._keep(run, pair), suspects=json.dumps(list(drift.suspects) if drift else []),
            positions=int(str(counts.get("positions", 0))), witnessed=int(str(counts.get("witnessed", 0))),
            seconds=_seconds(run, pair),
        )  # fmt: skip

    def _keep(self, run: FinishedRun, pair: JudgedPair) -> str:
        fields = case_fields(run, pair) or run.subject
        record = publishable(fingerprint_of(fields)).to_json()
        return self.folder.put((json.dumps(record, indent=1) + "\n").encode(), JSON)


def _baseline(pair: JudgedPair, row: Row) -> str:
    """Judged digest of the baseline the pair was held against, by gate or by its own axis; empty without one."""
    if row.drift is not None:
        return row.drift.old or ""
    return pair.digests.get("reference", "") if pair.reference_role == "variant" else ""


def case_fields(run: FinishedRun, pair: JudgedPair) -> tuple[Field, ...]:
    """The fingerprint fields of a pair's own case; empty when it has no capture."""
    from harness.store import Store, subject_fields

    if run.folder is None or pair.case is None:
        return ()
    store = Store(run.folder / "captures")
    return subject_fields(store.header(pair.case)) if store.has(pair.case) else ()


def state_of(row: Row) -> str:
    """What a pair came to against its baseline: DESIGN's words for a nightly."""
    drift = row.drift
    if drift is None:
        return row.reasons[0] if row.reasons else "not held against a baseline"
    words = {"different": "drift", "no baseline": "no baseline yet", "incomparable": "not comparable"}
    return words.get(drift.outcome) or f"{drift.environment} environment, same bits"


def _seconds(run: FinishedRun, pair: JudgedPair) -> float:
    cases = run.raw.get("cases")
    mine = set(pair.cases.values())
    total = 0.0
    for case in cases if isinstance(cases, Sequence) else ():
        if isinstance(case, Mapping) and case.get("id") in mine and isinstance(case.get("seconds"), int | float):
            total += float(case["seconds"])
    return round(total, 3)


def _schema() -> pa.Schema:
    import pyarrow as pa

    kinds = {str: pa.string(), int: pa.int64(), float: pa.float64()}
    hints = get_type_hints(Night)
    fields = [pa.field(item.name, kinds[hints[item.name]], nullable=False) for item in dataclasses.fields(Night)]
    return pa.schema(fields, metadata={_MARK: str(SCHEMA).encode()})


def _bytes(nights: Sequence[Night]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema()
    columns = [[getattr(night, name) for night in nights] for name in schema.names]
    table = pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def _nights(content: bytes) -> list[Night]:
    """The nights of a file. Raises StoreError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(pa.BufferReader(content), pre_buffer=False).read(use_threads=False)
    except (pa.ArrowInvalid, OSError) as error:
        raise StoreError(f"no Parquet file ({error}); delete it, or restore it") from error
    found = (table.schema.metadata or {}).get(_MARK)
    if found != str(SCHEMA).encode():
        shown = "none" if found is None else found.decode(errors="replace")
        raise StoreError(f"history schema {SCHEMA} expected, found {shown}; use the version of samebits that wrote it")
    return [Night(**row) for row in table.select(_schema().names).to_pylist()]
