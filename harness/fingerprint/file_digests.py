"""SHA-256 of large files, remembered while inode, size and modification time stay.

It does not know what the files are. Rules: files are streamed, never held; what is remembered is a convenience that may
be lost or rebuilt at any time; a full re-check reads every byte and corrects what was remembered.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

SCHEMA = 1
BLOCK = 1 << 22
VARIABLE = "SAMEBITS_CACHE"
State = tuple[int, int, int, int]  # device, inode, size in bytes, modification time in ns


def cache_file() -> Path:
    """Where digests are remembered: below `$SAMEBITS_CACHE`, or `~/.cache/samebits`."""
    named = os.environ.get(VARIABLE)
    base = Path(named).expanduser() if named else Path.home() / ".cache" / "samebits"
    return base / "file-digests.json"


class FileDigests:
    """Digests of files. Use `save` once at the end; two processes that save at once lose speed, not truth."""

    def __init__(self, place: Path | None = None, *, recheck: bool = False) -> None:
        self.place = place or cache_file()
        self.recheck = recheck
        self.read = 0  # files read to their end
        self._known = _load(self.place)
        self._new = False

    def of(self, file: Path) -> str:
        """The file's digest. Raises OSError."""
        path = file.resolve()
        state = _state(path)
        key = hashlib.sha256(os.fsencode(path)).hexdigest()
        known = self._known.get(key)
        if known is not None and not self.recheck and known[:4] == list(state):
            return str(known[4])
        digest = _stream(path)
        self.read += 1
        if _state(path) == state:  # a file that was written meanwhile is not remembered
            self._known[key] = [*state, digest]
            self._new = True
        return digest

    def of_all(self, files: Iterable[tuple[str, Path]]) -> str:
        """One digest over names and digests of several files, sorted by name. Raises OSError."""
        rows = [f"{name}\0{self.of(file)}\n" for name, file in sorted(files)]
        return "sha256:" + hashlib.sha256("".join(rows).encode("utf-8", "surrogateescape")).hexdigest()

    def save(self) -> None:
        """Remembers what was learnt; a cache that cannot be written is left as it is."""
        if not self._new:
            return
        aside = self.place.with_name(f".{self.place.name}.{os.getpid()}")
        try:
            self.place.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps({"schema": SCHEMA, "files": self._known}))
            aside.replace(self.place)
        except OSError:
            with contextlib.suppress(OSError):
                aside.unlink()


def _state(path: Path) -> State:
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _stream(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _load(place: Path) -> dict[str, list[int | str]]:
    try:
        value = json.loads(place.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(value, dict) or value.get("schema") != SCHEMA or not isinstance(value.get("files"), dict):
        return {}
    return {key: row for key, row in value["files"].items() if isinstance(row, list) and len(row) == 5}
