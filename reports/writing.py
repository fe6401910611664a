"""Writes a report whole or not at all. It does not know what is in it."""

from __future__ import annotations

import os
from pathlib import Path

from harness.errors import OutputError


def write_whole(file: Path, text: str) -> None:
    """Writes beside the file, flushes, and renames; what was there before stays until then.

    Raises:
        OutputError: read-only folder, full disk, no such folder.
    """
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with aside.open("w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(file)
    except OSError as error:
        _forget(aside)
        reason = error.strerror or type(error).__name__
        raise OutputError(f"{file}: cannot be written ({reason}); free space or choose another folder") from error


def _forget(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError:
        return
