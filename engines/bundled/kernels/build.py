"""Compiles kernels.cpp into a shared library, once per source, compiler, flags and instruction set.

It does not know what the kernels compute. Rules: flags are ours alone and no environment variable of a compiler is
obeyed; a library is named by the SHA-256 of everything that can change it; it appears by an atomic rename, so that
concurrent builds are safe.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from engines.bundled.kernels.interface import KernelError

SOURCE = Path(__file__).with_name("kernels.cpp")
COMPILERS = ("g++", "clang++")
FLAGS = (
    "-std=c++20",
    "-O3",
    "-ffp-contract=off",
    "-fno-fast-math",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-pthread",
)
ISA_FLAGS = {"x86-64-v3": ("-march=x86-64-v3",), "x86-64-v4": ("-march=x86-64-v4",), "generic": ()}
KERNELS_VARIABLE = "SAMEBITS_KERNELS"  # a folder of compiled kernels of its own
OBEYED = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH")  # a compiler sees no other variable: not CXXFLAGS, not CPATH


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A compiled library: where it is and what made it."""

    path: Path
    isa: str
    compiler: str  # program and version
    digest: str  # SHA-256 over source, compiler version, flags and instruction set


def find_compiler(name: str) -> str | None:
    """The program that "auto" or a name of COMPILERS stands for, None when it is not installed."""
    wanted = COMPILERS if name == "auto" else (name,)
    return next((program for program in wanted if shutil.which(program)), None)


def cache_folder() -> Path:
    """$SAMEBITS_KERNELS, else $SAMEBITS_CACHE/kernels, or samebits/kernels in the user's cache folder."""
    if named := os.environ.get(KERNELS_VARIABLE):
        return Path(named)
    chosen = os.environ.get("SAMEBITS_CACHE")
    if chosen:
        return Path(chosen) / "kernels"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "samebits" / "kernels"


def build(isa: str, program: str, source: Path = SOURCE) -> Library:
    """The library for `isa` made by the compiler `program`, from the cache where it is there already.

    Raises:
        KernelError: the compiler fails (its output is in the message) or the cache cannot be written.
    """
    version = compiler_version(program)
    flags = (*FLAGS, *ISA_FLAGS[isa])
    text = source.read_bytes()
    digest = hashlib.sha256("\0".join((version, *flags, isa, "")).encode() + text).hexdigest()
    path = cache_folder() / f"{digest}.so"
    if not path.exists():
        _compile(program, flags, source, path)
    return Library(path=path, isa=isa, compiler=version, digest=digest)


def compiler_version(program: str) -> str:
    """The first line of the compiler's own version text, with the program's name in front."""
    line = _run([program, "--version"]).splitlines()[0].strip()
    return line if line.startswith(program) else f"{program}: {line}"


def _compile(program: str, flags: tuple[str, ...], source: Path, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".building-", suffix=".so")
        os.close(handle)
    except OSError as error:
        raise KernelError(
            f"kernel cache {path.parent}: cannot be written ({error.strerror}); set SAMEBITS_CACHE to a folder that can"
        ) from error
    try:
        _run([program, *flags, str(source), "-o", name])
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


def _run(command: list[str]) -> str:
    environment = {name: os.environ[name] for name in OBEYED if name in os.environ} | {"LC_ALL": "C"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    except OSError as error:
        raise KernelError(f"compiler {command[0]}: cannot be run ({error.strerror})") from error
    if done.returncode != 0:
        tail = (done.stderr or done.stdout)[-2000:]
        raise KernelError(f"compiler {command[0]} failed with status {done.returncode}:\n{tail}")
    return done.stdout
