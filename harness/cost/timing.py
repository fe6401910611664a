"""What one timed serving came to, per sample of a request, and its place on disk as Parquet.

It does not know metrics or verdicts. Rules: times are seconds of the session's clock; digests are of the answer under
its corpus id, so that copies of a request can be compared with each other and with the untimed reference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from harness.errors import OutputError, StoreError

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One sample of one copy of a request. `judged` and `tokens_only` are SHA-256 digests in hexadecimal."""

    request: str
    copy: int
    sample: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int | None  # by the engine's own steps; None: it does not show them
    preemptions: int
    due_s: float
    submitted_s: float
    finish_s: float
    token_s: tuple[float, ...]  # when each token came
    judged: str
    tokens_only: str

    @property
    def key(self) -> str:
        """What the reference knows it by."""
        return reference_key(self.request, self.sample)


def reference_key(request: str, sample: int) -> str:
    """A request's sample as one string."""
    return f"{request} sample {sample}"


def write_rows(file: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Writes rows as Parquet, whole or not at all. Raises OutputError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    aside = file.with_name(f".{file.name}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist([dict(row) for row in rows], schema=_schema(rows)), aside)
        aside.replace(file)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise OutputError(f"{file}: cannot be written: {error}; free space or choose another --out") from error


def write_timings(file: Path, timings: Sequence[Timing]) -> str:
    """Writes timings; returns the file's SHA-256. Raises OutputError."""
    write_rows(file, [asdict(timing) for timing in timings])
    return hashlib.sha256(file.read_bytes()).hexdigest()


def read_timings(file: Path, sha256: str) -> tuple[Timing, ...]:
    """Timings, checked against their digest. Raises StoreError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        content = file.read_bytes()
    except OSError as error:
        raise StoreError(f"{file}: expected the timings of a serving: {error.strerror}; measure again") from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise StoreError(f"{file}: its bytes are not those that were written; measure again")
    rows = pq.ParquetFile(pa.BufferReader(content)).read(use_threads=False).to_pylist()
    return tuple(_timing(row) for row in rows)


def _timing(row: Mapping[str, Any]) -> Timing:
    values = {field.name: row[field.name] for field in fields(Timing)}
    return Timing(**{**values, "token_s": tuple(values["token_s"])})


def _schema(rows: Sequence[Mapping[str, object]]) -> pa.Schema:
    """Types of the columns; an empty column is of doubles."""
    import pyarrow as pa

    kinds = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = []
    for name in names:
        values = [row[name] for row in rows if row.get(name) is not None]
        if values and isinstance(values[0], tuple | list):
            columns.append((name, pa.list_(pa.float64())))
        else:
            found = {type(value) for value in values}
            kind = float if not found or float in found else cast("type", found.pop())
            columns.append((name, kinds[kind]))
    return pa.schema(columns)
