"""The user's cache folder: what is put there, atomically, and what is remembered of files already read.

It does not know formats. Rules: a file or folder appears whole or not at all; one process builds, the others
wait; what is remembered of files holds only while their sizes and modification times stay.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from engines.bundled.errors import ModelError

VARIABLE = "SAMEBITS_CACHE"
SCHEMA = 1
_BLOCK = 1 << 20


def cache_folder() -> Path:
    """`$SAMEBITS_CACHE`, or `~/.cache/samebits`."""
    named = os.environ.get(VARIABLE)
    return Path(named).expanduser() if named else Path.home() / ".cache" / "samebits"


@contextmanager
def building(target: Path) -> Iterator[Path | None]:
    """Yields a fresh folder to build `target` in and moves it there at the end; None if `target` exists
    already.

    Raises ModelError if the cache cannot be written.
    """
    if target.exists():
        yield None
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if target.exists():
                yield None
                return
            draft = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".part", dir=target.parent))
            try:
                yield draft
                draft.chmod(0o755)  # mkdtemp made it private
                draft.replace(target)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise _unwritable(target, error) from error


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def file_states(files: Sequence[Path]) -> list[list[str | int]]:
    """Name, size in bytes and modification time in nanoseconds of each file: what a quick check looks at."""
    return [[str(path), (stat := path.stat()).st_size, stat.st_mtime_ns] for path in map(Path.resolve, files)]


def remembered(what: str, files: Sequence[Path], compute: Callable[[], str]) -> str:
    """`compute()`, or what it returned when these files last had these sizes and times.

    Reading gigabytes to learn their digest again at each start would cost more than the start.
    """
    states = file_states(files)
    key = hashlib.sha256(json.dumps([what, states]).encode()).hexdigest()
    note = cache_folder() / "remembered" / f"{what}-{key[:32]}.json"
    if note.exists():
        return str(json.loads(note.read_text())["value"])
    value = compute()
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        draft = note.with_suffix(f".{os.getpid()}.part")
        draft.write_text(json.dumps({"schema": SCHEMA, "what": what, "files": states, "value": value}))
        draft.replace(note)
    except OSError as error:
        raise _unwritable(note, error) from error
    return value


def _unwritable(path: Path, error: OSError) -> ModelError:
    return ModelError(f"{path}: cannot be written ({error}); free space, or set {VARIABLE} to another folder")
