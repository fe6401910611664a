"""Finding and reading files, within bounds: regular files only, 2 MiB at most, no symlinked folders, no devices.

It knows names and bytes, not contents. Nothing is opened before `stat` calls it a regular file; a file that cannot be
read is returned with the reason, never skipped in silence.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from harness.errors import UsageError

MAX_BYTES = 2 * 1024 * 1024
MAX_FILES = 200_000
_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "node_modules", "site-packages", "venv", "env", "build", "dist", "vendor", "third_party"}
)
_SUFFIXES = {
    ".py": "python",
    ".sh": "shell",
    ".bash": "shell",
    ".sbatch": "shell",
    ".slurm": "shell",
    ".zsh": "shell",
    ".ksh": "shell",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".tpl": "skip",
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".toml": "toml",
    ".env": "dotenv",
    ".service": "systemd",
    ".dockerfile": "dockerfile",
}

# What `Dockerfile.` may be followed by without being one.
_PROSE = frozenset({".md", ".txt", ".rst", ".dockerignore", ".j2", ".tmpl", ".template", ".bak", ".orig", ".html"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file worth reading: its path as reported, its kind, and its text, or the reason there is none."""

    path: str
    kind: str
    text: str = ""
    unreadable: str = ""


def find_sources(paths: Iterable[Path], exclude: tuple[str, ...] = ()) -> Iterator[Source]:
    """Every readable kind of file at or below `paths`, sorted, each once.

    Raises UsageError for a path that does not exist and for more than 200,000 files.
    """
    seen: set[str] = set()
    for path in paths:
        for number, file in enumerate(_list_files(path)):
            if number >= MAX_FILES:
                raise UsageError(f"{path}: more than {MAX_FILES} files; give a narrower path or --exclude")
            name = file.as_posix()
            if name in seen or _excluded(name, exclude):
                continue
            seen.add(name)
            source = read_source(file, forced=file == path)
            if source is not None:
                yield source


def _excluded(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"*/{pattern}") for pattern in patterns)


def _list_files(path: Path) -> Iterator[Path]:
    try:
        mode = path.lstat().st_mode if path.is_symlink() else path.stat().st_mode
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error}); give an existing path") from error
    if not stat.S_ISDIR(mode) and not (path.is_symlink() and _links_to_folder(path)):
        yield path
        return
    for folder, folders, files in os.walk(path, followlinks=False):
        folders[:] = sorted(name for name in folders if _enters(name))
        for name in sorted(files):
            yield Path(folder) / name


def _links_to_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except OSError:
        return False


def _enters(name: str) -> bool:
    return name not in _SKIPPED_FOLDERS and (not name.startswith(".") or name == ".github")


def kind_of(path: PurePosixPath) -> str:
    """The kind a file's name stands for: "" for none, "maybe-shell" for a name that only its first line can tell."""
    name = path.name
    lower = name.lower()
    if lower in ("dockerfile", "containerfile"):
        return "dockerfile"
    suffix = path.suffix.lower()
    if lower.startswith(("dockerfile.", "containerfile.")) and suffix not in _SUFFIXES and suffix not in _PROSE:
        return "dockerfile"
    if name == ".env" or name.startswith(".env."):
        return "dotenv"
    if path.suffix == ".conf" and path.parent.name.endswith(".service.d"):
        return "systemd"
    if suffix:
        return _SUFFIXES.get(suffix, "")
    return "maybe-shell"


def read_source(path: Path, *, forced: bool = False) -> Source | None:
    """The file as text; None when it is of no kind we read. `forced` reports what cannot be read at all."""
    name = path.as_posix()
    kind = kind_of(PurePosixPath(name))
    if kind in ("", "skip") and not forced:
        return None
    data = _read_bytes(path)
    if isinstance(data, str):
        quiet = kind in ("", "skip", "maybe-shell") and not forced
        return None if quiet else Source(path=name, kind=kind or "unknown", unreadable=data)
    if kind in ("", "skip", "maybe-shell"):
        if not _has_shell_line(data):
            return None
        kind = "shell"
    if b"\0" in data:
        return Source(path=name, kind=kind, unreadable="it holds NUL bytes, so it is binary or UTF-16, not text")
    return Source(path=name, kind=kind, text=data.decode("utf-8-sig", errors="replace"))


def _read_bytes(path: Path) -> bytes | str:
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            return "it is not a regular file (a pipe, a socket or a device is never opened)"
        if info.st_size > MAX_BYTES:
            return f"it is larger than {MAX_BYTES // 1024 // 1024} MiB; exclude it or split it"
        with path.open("rb") as handle:
            return handle.read(MAX_BYTES + 1)
    except OSError as error:
        return f"the system says: {error.strerror or error}"


def _has_shell_line(data: bytes) -> bool:
    first = data[:80].split(b"\n", 1)[0]
    if not first.startswith(b"#!"):
        return False
    words = first[2:].replace(b"/", b" ").split()
    return any(word in (b"sh", b"bash", b"dash", b"ksh", b"zsh") for word in words)
