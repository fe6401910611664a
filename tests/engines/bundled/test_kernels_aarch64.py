"""The kernels, cross-compiled for aarch64 and run by qemu, give the bits of x86: every kernel, by digests."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from presence import missing

from engines.bundled.kernels.build import FLAGS, SOURCE
from engines.bundled.kernels.library import _SIGNATURES

DRIVER = Path(__file__).with_name("portability") / "driver.cpp"
CROSS, EMULATORS = "aarch64-linux-gnu-g++", ("qemu-aarch64-static", "qemu-aarch64")
PACKAGES = "apt-get install g++-aarch64-linux-gnu qemu-user-static"


def emulator() -> str | None:
    return next((path for name in EMULATORS if (path := shutil.which(name))), None)


def require(present: bool, what: str) -> None:
    """Skips where a tool is missing on a developer's machine; where CI is set, that is a failure."""
    if not present:
        missing("aarch64", f"{what} is not installed ({PACKAGES})")


def built(folder: Path, compiler: str, *more: str) -> Path:
    """The driver as a program that needs no libraries."""
    program = folder / f"driver-{compiler}{''.join(more)}"
    flags = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC")]
    defines = [f'-DKERNELS="{SOURCE}"', "-static", "-Wl,--whole-archive", "-lpthread", "-Wl,--no-whole-archive"]
    subprocess.run([compiler, *flags, *more, str(DRIVER), *defines, "-o", str(program)], check=True)
    return program


def output(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """What this machine computes, by a compiler and instruction set that have a fused multiply-add."""
    require(platform.machine() in ("x86_64", "aarch64"), f"a compiler for comparison on {platform.machine()}")
    require(bool(shutil.which("g++")), "g++")
    arch = ("-march=x86-64-v3",) if platform.machine() == "x86_64" else ()
    program = built(tmp_path_factory.mktemp("here"), "g++", *arch)
    return output(str(program)), output(str(program), "hostile")


def test_the_driver_calls_every_kernel(here):
    plain, _ = here
    called = {word for line in plain for word in line.split() if word.startswith("sb_")}
    assert called == set(_SIGNATURES)
    assert len(plain) > 150
    assert len({line.split()[-1] for line in plain}) > 60, "digests that are all alike would prove nothing"


def test_threads_and_the_callers_floating_point_mode_change_nothing(here):
    plain, hostile = here
    assert hostile == plain
    middle = plain.index("threads 2")
    assert plain[1:middle] == plain[middle + 1 : -1]
    assert plain[-1] == "threads seen 2"


def test_aarch64_gives_the_bits_of_x86(here, tmp_path):
    require(bool(shutil.which(CROSS)), CROSS)
    runner = emulator()
    require(bool(runner), " or ".join(EMULATORS))
    program = built(tmp_path, CROSS)
    assert program.read_bytes()[18:20] == b"\xb7\x00", "ELF machine: aarch64"
    plain, hostile = here
    assert output(runner, str(program)) == plain
    assert output(runner, str(program), "hostile") == hostile
