"""Fingerprint fields of installed software: Python, libc, numeric packages by native code, our own source.

It does not import what it describes. Rules: a version string is not a build, so each package with native
code also has a digest over the hashes that its installer recorded for it; our own source is digested as it
lies on disk.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.metadata
import os
import platform
import re
from functools import cache, partial
from pathlib import Path

import harness
from harness.engine import Field
from harness.fingerprint.reading import Unknown, read_field

PACKAGES = ("gguf", "llguidance", "numpy", "pyarrow", "safetensors", "tokenizers", "torch")
NOT_INSTALLED = "not installed"
SOURCE_FOLDERS = ("engines", "harness")
SOURCE_SUFFIXES = (".cpp", ".py")

_NATIVE = re.compile(r"\.(so(\.[0-9.]+)?|dylib|pyd|dll)$")
_MAYBE_NATIVE = re.compile(r"\.(so|dylib|pyd|dll)")
_BLAS = re.compile(r"(openblas|mkl|blis|nvpl|armpl|accelerate)", re.IGNORECASE)
_OPENMP = re.compile(r"lib(gomp|iomp|omp)[^/]*$")
_LIBM = ("lib/{m}-linux-gnu/libm.so.6", "lib64/libm.so.6", "usr/lib/libm.so.6", "lib/libm.so.6")


@cache
def software_fields(root: Path) -> tuple[Field, ...]:
    """Identity fields of Python, libc, packages, BLAS, OpenMP and samebits itself.

    Read once per process: what a process has loaded does not change under it.
    """
    return (
        read_field("python.version", "identity", "platform", _python),
        read_field("python.build", "identity", "platform.python_compiler", platform.python_compiler),
        read_field("os.libc", "identity", "confstr", _libc),
        read_field("os.libm", "identity", "libm.so.6", lambda: _libm(root)),
        *(field for name in PACKAGES for field in package_fields(name)),
        *(field for name in ("numpy", "torch") for field in _library_fields(name)),
        Field(name="samebits.version", value=harness.__version__, field_class="identity", source="harness"),
        read_field("samebits.source", "identity", ", ".join(SOURCE_FOLDERS), source_digest),
    )


def source_digest(home: Path | None = None) -> str:
    """SHA-256 over names and bytes of our `.py` and `.cpp` files, sorted by name, as `sha256:…`.

    `home` is the folder that holds `harness` and `engines`; by default the one this file was loaded from.
    """
    base = home or Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for path in sorted(_sources(base), key=lambda item: item.relative_to(base).as_posix()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(base).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return f"sha256:{digest.hexdigest()}"


def _sources(base: Path) -> list[Path]:
    found = [path for name in SOURCE_FOLDERS for path in (base / name).rglob("*") if path.suffix in SOURCE_SUFFIXES]
    if not found:
        raise Unknown(f"no {' or '.join(SOURCE_SUFFIXES)} files lie in {' or '.join(SOURCE_FOLDERS)}")
    return found


def _python() -> str:
    return f"{platform.python_implementation()} {platform.python_version()}"


def _libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or _no_libc()
    except ValueError:
        return _no_libc()


def _no_libc() -> str:
    raise Unknown("the C library does not report a GNU version")


def _libm(root: Path) -> str:
    """Digest of libm: distributions patch and rebuild it under one version."""
    for pattern in _LIBM:
        path = root / pattern.format(m=os.uname().machine)
        if path.is_file():
            return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    raise Unknown("libm.so.6 is in none of the usual folders")


def package_fields(name: str) -> tuple[Field, ...]:
    """Version of an installed package, and the digest of its native code."""
    version = read_field(f"package.{name}", "identity", "package metadata", partial(_version, name))
    build = read_field(f"package.{name}.native", "identity", "package RECORD", partial(_native_digest, name))
    return version, build


def _library_fields(name: str) -> tuple[Field, ...]:
    return (
        read_field(f"blas.{name}", "identity", "package RECORD", partial(_bundled, name, _BLAS)),
        read_field(f"openmp.{name}", "identity", "package RECORD", partial(_bundled, name, _OPENMP)),
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


def _native_digest(name: str) -> str:
    """SHA-256 over the recorded (path, hash) pairs of a package's shared libraries."""
    rows = _native_files(name)
    if rows is None:
        return NOT_INSTALLED
    if not rows:
        return "no native code"
    return "sha256:" + hashlib.sha256("\n".join(f"{path} {digest}" for path, digest in rows).encode()).hexdigest()


def _bundled(name: str, pattern: re.Pattern[str]) -> str:
    """The matching shared libraries that a package carries, with the first digits of their recorded hash."""
    rows = _native_files(name)
    if rows is None:
        return NOT_INSTALLED
    found = [
        f"{Path(path).name} ({digest.removeprefix('sha256=')[:12]})"
        for path, digest in rows
        if pattern.search(Path(path).name)
    ]
    return ", ".join(found) or f"no library of its own; part of package.{name}.native"


def _native_files(name: str) -> list[tuple[str, str]] | None:
    """Sorted (path, recorded hash) of shared libraries; None when the package is not installed."""
    try:
        record = importlib.metadata.distribution(name).read_text("RECORD")
    except importlib.metadata.PackageNotFoundError:
        return None
    if record is None:
        raise Unknown(f"the installer of {name} left no RECORD of its files")
    lines = [line for line in record.splitlines() if _MAYBE_NATIVE.search(line)]  # a RECORD has many thousands
    rows = [row for row in csv.reader(lines) if _NATIVE.search(row[0])]
    if any(len(row) < 2 or not row[1] for row in rows):
        raise Unknown(f"the RECORD of {name} has native files without a hash")
    return sorted((row[0], row[1]) for row in rows)
