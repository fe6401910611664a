"""Compiling the kernels: what names a library, whose flags count, and what happens when it cannot be done."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from arithmetic_cases import BUILDS

from engines.bundled.kernels import build as building
from engines.bundled.kernels.build import Library, build, cache_folder, compiler_version
from engines.bundled.kernels.interface import KernelError
from engines.bundled.kernels.isa import resolve_isa
from engines.bundled.kernels.library import load

SMALL = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SAMEBITS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "small.cpp"
    path.write_text(SMALL)
    return path


@pytest.fixture
def fake_compiler(tmp_path, monkeypatch) -> Path:
    """A compiler that writes its arguments and environment where its output should be."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "g++"
    program.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo "g++ (fake) 1.0"; exit 0; }\n'
        'for out; do :; done\necho "$@" > "$out"\nenv >> "$out"\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return program


def test_a_library_is_built_once(source):
    first = build("generic", BUILDS[0][1], source)
    stamp = first.path.stat().st_mtime_ns
    assert build("generic", BUILDS[0][1], source) == first
    assert first.path.stat().st_mtime_ns == stamp
    assert [p.name for p in cache_folder().iterdir()] == [f"{first.digest}.so"]


def test_everything_that_can_move_a_bit_is_in_the_name(source, fake_compiler, monkeypatch):
    digests = [build("generic", "g++", source).digest, build("x86-64-v3", "g++", source).digest]
    monkeypatch.setattr(building, "FLAGS", (*building.FLAGS, "-g"))
    digests.append(build("generic", "g++", source).digest)
    source.write_text(SMALL + "\n")
    digests.append(build("generic", "g++", source).digest)
    fake_compiler.write_text(fake_compiler.read_text().replace("1.0", "1.1"))
    digests.append(build("generic", "g++", source).digest)
    assert len(set(digests)) == len(digests)


def test_a_users_flags_are_ignored(source, fake_compiler, monkeypatch):
    for name in ("CXXFLAGS", "CPPFLAGS", "CFLAGS", "LDFLAGS", "CPATH", "CPLUS_INCLUDE_PATH", "GCC_EXEC_PREFIX"):
        monkeypatch.setenv(name, "-ffast-math")
    text = build("x86-64-v4", "g++", source).path.read_text()
    assert "fast-math" not in text.replace("-fno-fast-math", "")
    assert {"-ffp-contract=off", "-fno-fast-math", "-march=x86-64-v4", "-O3"} <= set(text.split())
    assert "-march=native" not in text


def test_concurrent_builds_leave_one_whole_library(source):
    code = (
        "import sys, ctypes; from pathlib import Path; from engines.bundled.kernels.build import build\n"
        "print(ctypes.CDLL(str(build('generic', sys.argv[1], Path(sys.argv[2])).path)).answer())"
    )
    command = [sys.executable, "-c", code, BUILDS[0][1], str(source)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for _ in range(4)]
    assert [p.communicate(timeout=120)[0].strip() for p in running] == [b"42"] * 4
    assert len(list(cache_folder().iterdir())) == 1


def test_a_failed_compilation_tells_why_and_leaves_nothing(source):
    source.write_text("this is no program")
    with pytest.raises(KernelError, match=r"failed with status 1:\n.*error"):
        build("generic", BUILDS[0][1], source)
    assert list(cache_folder().iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(source, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SAMEBITS_CACHE", str(tmp_path / "file"))
    with pytest.raises(KernelError, match=r"kernel cache .*file.*SAMEBITS_CACHE"):
        build("generic", BUILDS[0][1], source)


def test_a_damaged_library_is_named(tmp_path):
    from engines.bundled.kernels.library import CompiledKernels

    path = tmp_path / "broken.so"
    path.write_text("no library")
    with pytest.raises(KernelError, match=r"broken\.so: cannot be loaded .*delete it"):
        CompiledKernels(Library(path=path, isa="generic", compiler="x", digest="x"), "test")


@pytest.mark.parametrize(
    ("isa", "compiler", "words"),
    [
        ("x86-64-v9", "auto", "isa: expected auto, x86-64-v3.*got 'x86-64-v9'"),
        ("auto", "icc", "compiler: expected auto, none, g.*got 'icc'"),
    ],
)
def test_unknown_names_are_refused(isa, compiler, words):
    with pytest.raises(KernelError, match=words):
        load(isa, compiler)


def test_a_missing_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelError, match=r"compiler clang\+\+: not installed"):
        load("auto", "clang++")
    kernels = load("auto", "auto")
    assert (kernels.backend, kernels.isa, kernels.compiler) == ("fallback", "none", "none")
    assert "no C++ compiler (g++ or clang++) is installed" in kernels.reason


def cpu(tmp_path, flags):
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor : 0\nflags\t\t: {' '.join(flags)}\nflags\t\t: last\n")
    return path


def test_instruction_set_follows_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    v3 = ["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "sse4_2", "ssse3", "popcnt", "cx16"]
    v4 = [*v3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"]
    assert resolve_isa("auto", cpu(tmp_path, v4)) == "x86-64-v4"
    assert resolve_isa("x86-64-v3", cpu(tmp_path, v4)) == "x86-64-v3"
    assert resolve_isa("auto", cpu(tmp_path, v3)) == "x86-64-v3"
    assert resolve_isa("auto", cpu(tmp_path, v3[1:])) == resolve_isa("generic", cpu(tmp_path, [])) == "generic"
    with pytest.raises(KernelError, match="x86-64-v4: this CPU lacks avx512vl"):
        resolve_isa("x86-64-v4", cpu(tmp_path, v4[:-1]))
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert resolve_isa("auto", cpu(tmp_path, v4)) == "generic"


def test_compiler_version_names_the_program():
    for _, compiler in BUILDS:
        assert compiler_version(compiler).startswith(compiler)
        assert any(character.isdigit() for character in compiler_version(compiler))
