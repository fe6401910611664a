"""The baselines of a project: the newest of each key, and those it replaced.

It does not know how runs are judged. Rules: objects are immutable; the head of a key is one small file that names the
newest entry; entries chain back to the first; nothing is deleted.

    heads/<engine>/<model>/<cell>/<variant>.json     {"schema": 1, "entry": SHA-256}
    objects/<aa>/<SHA-256>.json                      entries and fingerprints
    objects/<aa>/<SHA-256>.parquet                   accepted captures
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from urllib.parse import quote

from harness.baseline.drift import Accepted
from harness.baseline.entry import SCHEMA, Baseline, Key, read_baseline
from harness.baseline.folder import Folder
from harness.baseline.table import SUFFIX, read_table
from harness.errors import StoreError
from harness.fingerprint import Fingerprint
from harness.matrix import schema_mistake

if TYPE_CHECKING:
    import pyarrow as pa

JSON = ".json"


class Shelf:
    """Baselines under a path or fsspec URL."""

    def __init__(self, url: str) -> None:
        """Raises UsageError for an unusable URL."""
        self.folder = Folder(url)

    def newest(self, key: Key) -> Baseline | None:
        """The baseline in force, or None. Raises StoreError."""
        entry = self._head(key)
        if entry is None:
            return None
        baseline = self.entry(entry)
        if baseline.key != key:
            raise StoreError(f"{self.folder.url}/{_head(key)}: expected a baseline of {key}, found one of "
                             f"{baseline.key}: the file was moved or changed; restore it")  # fmt: skip
        return baseline

    def accepted(self, key: Key) -> Accepted | None:
        """The baseline in force with what opens it, or None. Raises StoreError."""
        baseline = self.newest(key)
        if baseline is None:
            return None
        return Accepted(baseline=baseline, fingerprint=lambda: self.fingerprint(baseline),
                        table=lambda: self.table(baseline))  # fmt: skip

    def _head(self, key: Key) -> str | None:
        name = _head(key)
        content = self.folder.read(name)
        if content is None:
            return None
        try:
            head = json.loads(content)
        except ValueError as error:
            raise StoreError(f"{self.folder.url}/{name}: expected JSON: {error}; restore it") from error
        message = schema_mistake(head.get("schema") if isinstance(head, dict) else None, SCHEMA)
        if message:
            raise StoreError(f"{self.folder.url}/{name}: $.schema: {message}")
        return str(head.get("entry"))

    def entry(self, digest: str) -> Baseline:
        """An entry by digest. Raises StoreError."""
        return read_baseline(self.folder.get(digest, JSON), f"{self.folder.url}: object {digest}{JSON}")

    def past(self, key: Key) -> tuple[Baseline, ...]:
        """All baselines of a key, newest first. Raises StoreError."""
        found: list[Baseline] = []
        entry = self._head(key)
        while entry is not None:
            found.append(self.entry(entry))
            entry = found[-1].previous
        return tuple(found)

    def keys(self) -> tuple[Key, ...]:
        """Every key with a baseline, sorted. Raises StoreError."""
        names = self.folder.names("heads", JSON)
        heads = (json.loads(self.folder.read(name) or b"{}") for name in names)
        return tuple(sorted(self.entry(str(head.get("entry"))).key for head in heads))

    def table(self, baseline: Baseline) -> pa.Table:
        """The accepted capture. Raises StoreError."""
        return read_table(self.folder.get(baseline.table, SUFFIX))

    def fingerprint(self, baseline: Baseline) -> Fingerprint:
        """Where it was made. Raises StoreError."""
        return Fingerprint.from_json(json.loads(self.folder.get(baseline.fingerprint, JSON)))

    def replace(self, baseline: Baseline) -> str:
        """Puts a baseline in force; returns its digest. Raises OutputError."""
        digest = self.folder.put(baseline.to_bytes(), JSON)
        head = json.dumps({"schema": SCHEMA, "entry": digest}) + "\n"
        self.folder.write(_head(baseline.key), head.encode())
        return digest


def _head(key: Key) -> str:
    parts = [quote(part, safe="") for part in (key.engine, key.model, key.cell, key.variant)]
    return f"heads/{'/'.join(parts)}.json"
