"""Compiles the kernels at run time with NVRTC, once per source, architecture, compiler version and flags.

It launches nothing and needs no GPU. Rules: flags are ours alone; no ftz, no fast math, no contraction; a compiled file
is named by the SHA-256 of everything that can change it and appears by an atomic rename.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engines.bundled.gpu.interface import GpuError, Shape
from engines.bundled.gpu.source import define_flags, digest, read_source
from engines.bundled.kernels.build import cache_folder

FLAGS = (
    "-std=c++17",
    "-default-device",
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
)
_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """Machine code for one architecture, and the PTX it came from."""

    cubin: bytes
    ptx: str
    version: str  # of NVRTC
    digest: str  # SHA-256 over source, architecture, version and flags


class Nvrtc:
    """The NVRTC library of this machine."""

    def __init__(self) -> None:
        """Raises GpuError when there is none, with the places that were searched."""
        self._library = _load()
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def _check(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise GpuError(f"{name}: {self._library.nvrtcGetErrorString(code).decode()}")

    def compile(self, shape: Shape, architecture: str) -> Compiled:
        """The kernels for a shape and an architecture such as "sm_90", from the cache where they are there.

        Raises:
            GpuError: the compiler's log, or a cache folder that cannot be written.
        """
        source = read_source()
        flags = (f"--gpu-architecture={architecture}", *FLAGS, *define_flags(shape))
        name = digest(source, self.version, *flags)
        folder = cache_folder() / "cuda"
        cubin, ptx = folder / f"{name}.cubin", folder / f"{name}.ptx"
        if not (cubin.exists() and ptx.exists()):
            code, text = self._compile(source, flags)
            _write(ptx, text)
            _write(cubin, code)
        return Compiled(cubin=cubin.read_bytes(), ptx=ptx.read_text(), version=self.version, digest=name)

    def _compile(self, source: str, flags: tuple[str, ...]) -> tuple[bytes, bytes]:
        program = ctypes.c_void_p()
        self._check("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None)
        try:
            options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
            code = self._library.nvrtcCompileProgram(program, len(flags), options)
            if code != 0:
                log = self._read(program, "ProgramLog").decode(errors="replace")
                raise GpuError(f"NVRTC {self.version} failed on the kernels (code {code}):\n{log[-2000:]}")
            return self._read(program, "CUBIN"), self._read(program, "PTX").rstrip(b"\0")
        finally:
            self._check("nvrtcDestroyProgram", ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(f"nvrtcGet{what}", program, buffer)
        return buffer.raw


def forbidden_instructions(ptx: str) -> tuple[str, ...]:
    """Instructions of a compiled text that round otherwise than IEEE: approximations, flushed subnormals, mad."""
    words = (line.split()[0] for line in ptx.splitlines() if line.strip())
    return tuple(sorted({w for w in words if ".approx" in w or ".ftz" in w or ".full" in w or w.startswith("mad.f32")}))


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".building-")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).replace(path)
    except OSError as error:
        raise GpuError(f"kernel cache {path.parent}: {error.strerror}; set SAMEBITS_CACHE to a folder") from error


def _candidates() -> Iterator[str]:
    """The library as pip packages install it (beside torch), then as the system knows it."""
    for entry in sys.path:
        yield from (str(path) for path in sorted(Path(entry or ".").glob("nvidia/*/lib/libnvrtc.so.1[0-9]")))
    yield from _NAMES


def _load() -> ctypes.CDLL:
    tried = []
    for name in _candidates():
        try:
            for builtins in sorted(Path(name).parent.glob("libnvrtc-builtins.so.*")) if "/" in name else ():
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(name)
        except OSError:
            tried.append(name)
    raise GpuError(
        f"no NVRTC library: tried {', '.join(tried)}; it comes with torch's CUDA build or the package nvidia-cuda-nvrtc"
    )
