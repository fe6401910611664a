"""The kernels on this host: the same source through g++ and emulation.h, for tests at small shapes.

It knows no GPU. Rules: the same launches as on a GPU, one after the other; `reversed_order` runs threads the other way
round, which must not move a bit.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from engines.bundled.gpu.arguments import pack_arguments
from engines.bundled.gpu.interface import Array, GpuError, Launch, Shape
from engines.bundled.gpu.ledger import note_kernels
from engines.bundled.gpu.memory import EMULATED_BYTES, out_of_memory
from engines.bundled.gpu.source import EMULATION, define_flags, digest, read_source
from engines.bundled.kernels.build import cache_folder, compiler_version
from engines.bundled.kernels.isa import resolve_isa

FLAGS = ("-std=c++20", "-O2", "-ffp-contract=off", "-fno-fast-math", "-fPIC", "-shared", "-w", "-DEMULATED")


class EmulatedRecording:
    """Launches kept to be run again."""

    def __init__(self, machine: EmulatedMachine, launches: list[Launch]) -> None:
        self._machine, self._launches = machine, launches

    def replay(self) -> None:
        """Runs them."""
        for launch in self._launches:
            self._machine.launch(launch)

    def close(self) -> None:
        """Forgets them."""
        self._launches = []


class EmulatedMachine:
    """Host memory and emulated kernels."""

    def __init__(self, shape: Shape, *, reversed_order: bool = False, memory: int = EMULATED_BYTES) -> None:
        """`memory` is the number of bytes this machine pretends to have.

        Raises:
            GpuError: no g++, or it fails.
            KernelError: the kernel cache cannot be written.
        """
        self._library = ctypes.CDLL(str(build_emulation(shape)))
        self._reversed = int(reversed_order)
        self._left = memory
        self._held: dict[int, Array] = {}
        self.launched: list[str] = []
        self.facts: dict[str, str | int | float | bool] = {"gpu": "emulated on the host", "gpu_compiler": "g++"}

    def allocate(self, count: int) -> int:
        """Words of NaN, so that reading what nobody wrote shows."""
        if 4 * count > self._left:
            raise out_of_memory(4 * count, self._left)
        self._left -= 4 * count
        array = np.full(count + 64, 0x7FC54321, np.int32)
        raw = int(array.__array_interface__["data"][0])
        address = (raw + 255) & ~255
        self._held[address] = array
        return address

    def release(self, address: int) -> None:
        """Gives the words back to the pretended memory."""
        self._left += self._held.pop(address).nbytes - 256

    def upload(self, address: int, array: Array) -> None:
        """A host copy."""
        source = np.ascontiguousarray(array)
        ctypes.memmove(address, int(source.__array_interface__["data"][0]), source.nbytes)

    def download(self, address: int, array: Array) -> None:
        """A host copy."""
        ctypes.memmove(int(array.__array_interface__["data"][0]), address, array.nbytes)

    def launch(self, launch: Launch) -> None:
        """Runs the kernel to its end."""
        run = getattr(self._library, f"emulate_{launch.kernel}")
        arguments = pack_arguments(launch.kernel, launch.arguments)
        grid = (ctypes.c_uint * 3)(*launch.grid)
        run(ctypes.byref(arguments), grid, launch.block, launch.cluster, launch.shared, self._reversed)
        self.launched.append(launch.kernel)
        note_kernels(1)

    def record(self, launches: list[Launch]) -> EmulatedRecording:
        """Kept as a list."""
        return EmulatedRecording(self, launches)

    def free_bytes(self) -> int:
        """What is left of the pretended memory."""
        return self._left

    def device_of(self, address: int) -> str | None:
        """By what this machine has handed out."""
        return "emulated" if address in self._held else None

    def clusters_that_fit(self, launch: Launch) -> int:
        """Any number."""
        return launch.grid[0]

    def close(self) -> None:
        """Forgets the arrays."""
        self._held.clear()


def build_emulation(shape: Shape) -> Path:
    """The shared library for a shape, from the cache where it is there. Raises GpuError."""
    if shutil.which("g++") is None:
        raise GpuError("emulated kernels need g++, which is not installed; install the Debian package g++")
    isa = resolve_isa("auto")
    flags = (*FLAGS, *([f"-march={'x86-64-v3' if isa == 'x86-64-v4' else isa}"] if isa != "generic" else []))
    source = read_source()
    name = digest(source, EMULATION.read_text(), compiler_version("g++"), *flags, *define_flags(shape))
    path = cache_folder() / f"emulated-{name}.so"
    if not path.exists():
        _compile(source, (*flags, *define_flags(shape)), path)
    return path


def _compile(source: str, flags: tuple[str, ...], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        text, library = Path(folder) / "kernels.cpp", Path(folder) / "kernels.so"
        text.write_text(source)
        command = ["g++", *flags, f"-I{EMULATION.parent}", str(text), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode != 0:
            raise GpuError(f"g++ failed on the kernels:\n{done.stderr[-2000:]}")
        library.replace(path)
