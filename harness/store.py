"""Keeps captures on disk as Parquet, one folder per case; the only module that reads and writes them.

It does not know engines or verdicts. Rules: a capture appears whole or not at all (written aside, then renamed); every
file's SHA-256 is kept in the header and checked on reading, the header's own too, and that it is of the case its folder
is named for; a schema number comes first; a full disk or read-only folder is one clear error and leaves nothing behind.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from harness.capture import Capture
from harness.engine import Field, FieldClass, Scalar
from harness.errors import OutputError, StoreError
from harness.matrix import schema_mistake
from harness.seal import check_seal, sealed
from harness.traces import NO_TOKEN, PositionTable, RequestTable, StepTable, Traces

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA = 1
HEADER = "capture.json"
TABLES = ("requests", "positions", "steps")


class Store:
    """Captures under one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def has(self, case: str) -> bool:
        """Whether a whole capture of the case is stored."""
        return (self.folder / case / HEADER).is_file()

    def cases(self) -> tuple[str, ...]:
        """Ids of all stored captures, sorted."""
        return tuple(sorted(entry.parent.name for entry in self.folder.glob(f"[0-9a-f]*/{HEADER}")))

    def write(self, capture: Capture) -> None:
        """Stores a capture, replacing one of the same case. Raises OutputError."""
        aside = self.folder / f".{capture.case}.{os.getpid()}"
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            files = {name: _write_table(aside / f"{name}.parquet", table) for name, table in _tables(capture.traces)}
            header = json.dumps(sealed(_header(capture, files)), indent=1, sort_keys=True)
            (aside / HEADER).write_text(header + "\n", encoding="utf-8")
            place = self.folder / capture.case
            shutil.rmtree(place, ignore_errors=True)
            aside.rename(place)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise OutputError(f"{self.folder}: cannot store capture {capture.case}: {error.strerror or error}; "
                              "free space or choose another --out") from error  # fmt: skip

    def read(self, case: str) -> Capture:
        """A stored capture, every file checked against its digest. Raises StoreError."""
        place = self.folder / case
        header = self.header(case)
        files = cast("Mapping[str, str]", header["files"])
        tables = {name: _read_table(place / f"{name}.parquet", files[name]) for name in TABLES if name in files}
        meta = cast("Mapping[str, object]", header["capture"])
        return _capture(meta, _traces(tables, cast("Mapping[str, int]", header["counters"])))

    def header(self, case: str) -> Mapping[str, object]:
        """The capture's description without its tables. Raises StoreError."""
        file = self.folder / case / HEADER
        try:
            header = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StoreError(
                f"{file}: expected a capture's header: {error}; delete the folder to capture again"
            ) from error
        message = schema_mistake(header.get("schema") if isinstance(header, dict) else None, SCHEMA)
        if message:
            raise StoreError(f"{file}: $.schema: {message}")
        check_seal(header, file, "capture again")
        if header["capture"]["case"] != case:
            raise StoreError(f"{file}: $.capture.case: expected {case}, as its folder is named, found "
                             f"{header['capture']['case']}: it is another case's capture; capture again")  # fmt: skip
        return cast("Mapping[str, object]", header)

    def remove(self, case: str) -> None:
        """Forgets a capture."""
        shutil.rmtree(self.folder / case, ignore_errors=True)


def subject_fields(header: Mapping[str, object]) -> tuple[Field, ...]:
    """The subject's fingerprint fields out of a capture's header."""
    meta = cast("Mapping[str, object]", header["capture"])
    return _fields(meta["subject"])


def _header(capture: Capture, files: Mapping[str, str]) -> dict[str, object]:
    meta = {
        "case": capture.case,
        "requested": dict(capture.requested),
        "resolved": dict(capture.resolved),
        "observed": dict(capture.observed),
        "subject": [dataclasses.asdict(field) for field in capture.subject],
        "process_nonce": capture.process_nonce,
        "repetition_nonce": capture.repetition_nonce,
        "session": capture.session,
        "judged_digest": capture.judged_digest,
        "seconds": capture.seconds,
    }
    return {
        "schema": SCHEMA,
        "capture": meta,
        "files": dict(files),
        "counters": dict(capture.traces.counters),
    }


def _capture(meta: Mapping[str, object], traces: Traces) -> Capture:
    return Capture(
        case=cast("str", meta["case"]),
        traces=traces,
        requested=cast("Mapping[str, Scalar]", meta["requested"]),
        resolved=cast("Mapping[str, Scalar]", meta["resolved"]),
        observed=cast("Mapping[str, Scalar]", meta["observed"]),
        subject=_fields(meta["subject"]),
        process_nonce=cast("str", meta["process_nonce"]),
        repetition_nonce=cast("str", meta["repetition_nonce"]),
        session=cast("str", meta["session"]),
        judged_digest=cast("str", meta["judged_digest"]),
        seconds=cast("float", meta["seconds"]),
    )


def _fields(value: object) -> tuple[Field, ...]:
    rows = cast("list[Mapping[str, object]]", value)
    return tuple(
        Field(
            name=cast("str", row["name"]),
            value=cast("Scalar | None", row["value"]),
            field_class=cast("FieldClass", row["field_class"]),
            source=cast("str", row["source"]),
        )
        for row in rows
    )


def _tables(traces: Traces) -> list[tuple[str, pa.Table]]:
    tables = [("requests", _table(traces.requests)), ("positions", _table(traces.positions))]
    if traces.steps is not None:
        tables.append(("steps", _table(traces.steps)))
    return tables


def _table(columns: RequestTable | PositionTable | StepTable) -> pa.Table:
    import pyarrow as pa

    arrays: dict[str, object] = {}
    for field in dataclasses.fields(columns):
        value = getattr(columns, field.name)
        if value is None:
            continue
        if isinstance(value, np.ndarray) and value.ndim == 2:
            value = value if value.shape[1] else _padding(value)
            flat = pa.array(np.ascontiguousarray(value).reshape(-1))
            arrays[field.name] = pa.FixedSizeListArray.from_arrays(flat, value.shape[1])
        else:
            arrays[field.name] = pa.array(value)
    return pa.table(arrays)


def _padding(nothing: np.ndarray) -> np.ndarray:
    """One column of padding in place of none: Arrow has no lists of width 0, and digests do not count padding."""
    return np.full((len(nothing), 1), NO_TOKEN if nothing.dtype.kind == "i" else np.nan, nothing.dtype)


def _write_table(file: Path, table: pa.Table) -> str:
    import pyarrow.parquet as pq

    pq.write_table(table, file, compression="zstd")
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _read_table(file: Path, digest: str) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        content = file.read_bytes()
    except OSError as error:
        raise StoreError(f"{file}: expected a stored table: {error.strerror}") from error
    found = hashlib.sha256(content).hexdigest()
    if found != digest:
        raise StoreError(f"{file}: expected SHA-256 {digest}, found {found}: the file was changed; capture again")
    return pq.ParquetFile(pa.BufferReader(content), pre_buffer=False).read(use_threads=False)


def _column(table: pa.Table, name: str, width: int | None = None) -> np.ndarray | None:
    if name not in table.column_names:
        return None
    chunk = table.column(name).combine_chunks()
    if width is None:
        return np.asarray(chunk.to_numpy(zero_copy_only=False))
    values = chunk.flatten().to_numpy(zero_copy_only=False)
    return np.asarray(values).reshape(len(chunk), width)


def _columns(table: pa.Table) -> dict[str, Any]:
    return {name: _column(table, name) for name in table.column_names}


def _matrix(table: pa.Table, name: str) -> np.ndarray | None:
    if name not in table.column_names:
        return None
    return _column(table, name, table.schema.field(name).type.list_size)


def _traces(tables: Mapping[str, pa.Table], counters: Mapping[str, int]) -> Traces:
    requests, positions, steps = tables["requests"], tables["positions"], tables.get("steps")
    rows: dict[str, Any] = {
        name: _column(requests, name) for name in requests.column_names if name not in ("id", "finish_reason")
    }
    return Traces(
        requests=RequestTable(
            id=tuple(requests.column("id").to_pylist()),
            finish_reason=tuple(requests.column("finish_reason").to_pylist()),
            **rows,
        ),
        positions=PositionTable(
            token=cast("np.ndarray", _column(positions, "token")),
            pick=cast("np.ndarray", _column(positions, "pick")),
            logprob=_column(positions, "logprob"),
            topk_ids=_matrix(positions, "topk_ids"),
            topk_logprobs=_matrix(positions, "topk_logprobs"),
            logits_digest=_matrix(positions, "logits_digest"),
        ),
        steps=None if steps is None else StepTable(**_columns(steps)),
        counters=tuple(sorted(counters.items())),
    )
