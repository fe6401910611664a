"""Writing a corpus folder so that it appears whole or not at all.

It does not know requests. Rules: everything is written into a folder beside the target and renamed into
place; a folder is replaced only with `force`, and only if nothing but the old corpus is lost with it;
whatever goes wrong, the old state is what remains.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.corpus.manifest import MANIFEST, read_manifest
from harness.errors import CorpusError, OutputError


def write_folder(
    out: Path, files: Mapping[str, bytes], *, force: bool = False, replaceable: Sequence[Path] = ()
) -> None:
    """Writes `files` (name inside the folder to bytes) as the folder `out`.

    `replaceable` names files that the new folder holds a copy of, so that replacing them loses nothing.

    Raises:
        CorpusError: the folder exists and must not be replaced.
        OutputError: the disk is full, the parent is read-only, ...
    """
    check_replaceable(out, force=force, replaceable=replaceable)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
            fresh, old = Path(scratch) / "new", Path(scratch) / "old"
            write_files(fresh, files)
            swap(fresh, out, old)
    except OSError as error:
        raise OutputError(
            f"corpus folder {out}: cannot be written ({error.strerror or error}); nothing was changed; "
            "choose another --out or make room"
        ) from error


def check_replaceable(out: Path, *, force: bool, replaceable: Sequence[Path]) -> None:
    """Raises CorpusError where something exists at `out` that must stay."""
    if not out.exists() and not out.is_symlink():
        return
    if out.is_symlink() or not out.is_dir():
        raise CorpusError(f"corpus folder {out}: exists and is no folder; choose another --out")
    if (out / MANIFEST).exists() and not force:
        raise CorpusError(f"corpus folder {out}: already holds a corpus; add --force to replace it")
    owned = {path.resolve() for path in replaceable}
    if (out / MANIFEST).exists():
        owned |= {(out / name).resolve() for name in (MANIFEST, *owned_names(out))}
    kept = sorted(str(path) for path in out.rglob("*") if path.is_file() and path.resolve() not in owned)
    if kept:
        raise CorpusError(
            f"corpus folder {out}: holds files that are no part of a corpus ({', '.join(kept[:3])}"
            f"{', ...' if len(kept) > 3 else ''}); move them away or choose another --out"
        )


def owned_names(out: Path) -> tuple[str, ...]:
    """Names that the manifest in `out` lists."""
    return tuple(name for name, _ in read_manifest(out, f"corpus {out}").files)


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes `files` below `folder`."""
    folder.mkdir()
    for name in sorted(files):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(files[name])


def swap(fresh: Path, out: Path, old: Path) -> None:
    """Renames `fresh` to `out`, what was there to `old`; puts the latter back if that fails."""
    if not out.exists():
        fresh.rename(out)
        return
    out.rename(old)
    try:
        fresh.rename(out)
    except OSError:
        old.rename(out)
        raise
