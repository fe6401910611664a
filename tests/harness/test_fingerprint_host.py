"""Reading a host: from made-up system trees, so that every machine tests every kind of machine."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from harness.fingerprint import fingerprint_of, software
from harness.fingerprint.host import host_fields
from harness.fingerprint.processor import isa_level, ranges
from harness.fingerprint.reading import Unknown, read_field
from harness.fingerprint.variables import VARIABLES, variable_fields

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
V2 = "sse sse2 pni ssse3 cx16 sse4_1 sse4_2 popcnt lahf_lm"
V3 = V2 + " abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"
V4 = V3 + " avx512f avx512dq avx512cd avx512bw avx512vl"

X86 = """processor\t: {n}
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 207
model name\t: Intel(R) Xeon(R) Processor
stepping\t: 2
microcode\t: 0x2b
flags\t\t: fpu ibrs smep {flags}
"""
ARM = """processor\t: 0
Features\t: fp asimd evtstrm aes asimdhp sve bf16 i8mm
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: 0xd40
CPU revision\t: 1
"""


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def read(root: Path, environ=None) -> dict[str, object]:
    return {field.name: field for field in host_fields(environ or {}, now=NOW, root=root)}


def values(root: Path, environ=None) -> dict[str, object]:
    return {name: field.value for name, field in read(root, environ).items()}


def test_an_x86_host(tmp_path):
    caches = {
        f"sys/devices/system/cpu/cpu0/cache/index{i}/{key}": value
        for i, cache in enumerate([("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "2M")])
        for key, value in zip(("level", "type", "size"), cache, strict=True)
    }
    found = values(tree(tmp_path, {"proc/cpuinfo": "\n".join(X86.format(n=n, flags=V4) for n in (0, 1)), **caches}))
    expected = {
        "cpu.vendor": "GenuineIntel", "cpu.family": "6", "cpu.model": "207", "cpu.stepping": "2",
        "cpu.model_name": "Intel(R) Xeon(R) Processor", "cpu.microcode": "0x2b", "cpu.isa.level": "x86-64-v4",
        "cpu.caches": "L1d 48K, L1i 32K, L2 2M",
    }  # fmt: skip
    assert expected.items() <= found.items()
    flags = found["cpu.isa.flags"].split()
    assert flags == sorted(flags)
    assert {"fma", "avx512f"} <= set(flags)
    assert not {"ibrs", "fpu", "smep"} & set(flags)


def test_an_arm_host(tmp_path):
    found = values(tree(tmp_path, {"proc/cpuinfo": ARM}))
    assert found["cpu.vendor"] == "0x41"
    assert found["cpu.model"] == found["cpu.model_name"] == "0xd40"
    assert found["cpu.isa.level"] == "aarch64"
    assert found["cpu.microcode"] == "not applicable"
    assert found["cpu.isa.flags"] == "asimd asimdhp bf16 fp i8mm sve"


def test_a_mixture_of_cores_is_shown_and_its_level_is_what_all_have(tmp_path):
    cores = X86.format(n=0, flags=V4) + "\n" + X86.format(n=1, flags=V3).replace("207", "151")
    found = values(tree(tmp_path, {"proc/cpuinfo": cores}))
    assert found["cpu.model"] == "151 | 207"
    assert found["cpu.isa.level"] == "x86-64-v3"


@pytest.mark.parametrize(
    ("flags", "level"), [("sse2", "x86-64-v1"), (V2, "x86-64-v2"), (V3, "x86-64-v3"), (V4, "x86-64-v4")]
)
def test_levels_need_every_flag_below_them(flags, level):
    assert isa_level(frozenset(flags.split())) == level
    assert isa_level(frozenset(V4.split()) - {"fma"}) == "x86-64-v2"


def test_an_empty_host_reads_as_unknown_with_reasons_and_never_fails(tmp_path):
    found = read(tmp_path)
    for name in (
        "cpu.vendor",
        "cpu.isa.level",
        "cpu.caches",
        "os.name",
        "os.libm",
        "memory.total_kib",
        "cpu.quota",
    ):
        assert found[name].value is None, name
        assert found[name].source.startswith("unknown, because "), name
    assert found["accelerator.driver"].value == "not applicable"
    assert found["container.image"].value == "not applicable"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\0\0",
        "processor : 0\n",
        "nonsense",
        "\udcff".encode("utf-8", "surrogateescape").decode("latin-1"),
    ],
)
def test_a_damaged_processor_file_reads_as_unknown(tmp_path, text):
    found = read(tree(tmp_path, {"proc/cpuinfo": text, "proc/meminfo": text, "etc/os-release": text}))
    for name in ("cpu.vendor", "cpu.isa.flags", "memory.total_kib", "os.name"):
        assert found[name].value is None
        assert str(tmp_path) not in found[name].source


def test_a_folder_where_a_file_should_be_reads_as_unknown(tmp_path):
    (tmp_path / "proc/cpuinfo").mkdir(parents=True)
    field = read(tmp_path)["cpu.vendor"]
    assert field.value is None
    assert field.source == "unknown, because /proc/cpuinfo: Is a directory"


def test_system_memory_and_quota(tmp_path):
    found = values(
        tree(
            tmp_path,
            {
                "etc/os-release": 'PRETTY_NAME="Debian"\nID=debian\nVERSION_ID="12"\n',
                "proc/meminfo": "MemTotal:  1000 kB\nMemAvailable: 10 kB\n",
                "sys/fs/cgroup/cpu.max": "150000 100000\n",
            },
        )
    )
    assert (found["os.name"], found["memory.total_kib"], found["memory.available_kib"]) == (
        "debian 12",
        1000,
        10,
    )
    assert found["cpu.quota"] == "1.5 processors"
    assert found["host.time"] == "2026-03-01T12:00:00+00:00"
    old = {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}
    assert values(tree(tmp_path / "old", old))["cpu.quota"] == "none"


NVIDIA = "NVRM version: NVIDIA UNIX{kind} for x86_64  580.95.05  Release Build\nGCC version: gcc 12\n"


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        (" Open Kernel Module", "NVIDIA 580.95.05 (open)"),
        (" x86_64 Kernel Module", "NVIDIA 580.95.05 (proprietary)"),
    ],
)
def test_nvidia_driver_and_models(tmp_path, kind, shown):
    files = {"proc/driver/nvidia/version": NVIDIA.format(kind=kind)}
    files |= {f"proc/driver/nvidia/gpus/{i}/information": "Model: \t NVIDIA H200\nGPU UUID: GPU-1\n" for i in (0, 1)}
    found = values(tree(tmp_path, files))
    assert found["accelerator.driver"] == shown
    assert found["accelerator.models"] == "2 x NVIDIA H200"


def test_a_device_without_its_driver_files_is_unknown_not_absent(tmp_path):
    field = read(tree(tmp_path, {"dev/kfd": ""}))["accelerator.driver"]
    assert field.value is None
    assert "/dev/kfd is there" in field.source


def test_the_container_image_is_declared_recorded_or_unknown(tmp_path):
    assert values(tmp_path, {"SAMEBITS_IMAGE_DIGEST": "sha256:1"})["container.image"] == "sha256:1"
    podman = tree(tmp_path / "podman", {"run/.containerenv": 'engine="podman"\nimageid="abc"\n'})
    assert values(podman)["container.image"] == "sha256:abc"
    docker = read(tree(tmp_path / "docker", {".dockerenv": ""}))["container.image"]
    assert (docker.value, docker.field_class) == (None, "lineage")
    kubernetes = tree(tmp_path / "k8s", {"proc/1/cgroup": "0::/kubepods/pod1\n"})
    assert values(kubernetes)["container.image"] is None


def test_ranges():
    assert ranges([]) == ""
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def test_variables_are_recorded_set_or_not():
    found = {field.name: field for field in variable_fields({"OMP_NUM_THREADS": "2", "OTHER": "1", "MKL_CBWR": ""})}
    assert len(found) == len(VARIABLES)
    assert found["env.OMP_NUM_THREADS"].value == "2"
    assert found["env.MKL_CBWR"].value == ""
    assert found["env.OMP_SCHEDULE"].value == "not set"
    assert "OpenMP: " in found["env.OMP_NUM_THREADS"].source


def test_variables_are_sorted_and_each_has_a_reason():
    assert [row.name for row in VARIABLES] == sorted({row.name for row in VARIABLES})
    assert all(row.engines and len(row.reason) > 10 for row in VARIABLES)


@pytest.mark.parametrize("value", ["/home/alice/lib.so", "~/lib", r"C:\Users\alice"])
def test_paths_become_digests(value):
    fields = {field.name: field.value for field in variable_fields({"LD_PRELOAD": value})}
    assert fields["env.LD_PRELOAD"].startswith("a path, sha256:")
    assert "alice" not in fields["env.LD_PRELOAD"]
    other = {field.name: field.value for field in variable_fields({"LD_PRELOAD": value + "x"})}
    assert fields["env.LD_PRELOAD"] != other["env.LD_PRELOAD"]


def test_the_source_digest_follows_names_and_bytes(tmp_path):
    files = {"harness/a.py": "1", "engines/k/b.cpp": "2", "harness/note.md": "x"}
    tree(tmp_path, files)
    first = software.source_digest(tmp_path)
    tree(tmp_path, {"harness/note.md": "y", "reports/r.py": "z", "harness/__pycache__/a.pyc": "q"})
    assert software.source_digest(tmp_path) == first
    seen = {first}
    for change in ({"engines/k/b.cpp": "3"}, {"harness/c.py": ""}, {"harness/a.py": "12"}):
        tree(tmp_path, change)
        seen.add(software.source_digest(tmp_path))
    assert len(seen) == 4
    with pytest.raises(Unknown, match=r"no \.cpp or \.py files"):
        software.source_digest(tmp_path / "nowhere")


def test_the_source_digest_tells_names_and_borders_apart(tmp_path):
    layouts = (
        {"harness/a.py": "x", "harness/b.py": "y"},
        {"harness/a.py": "xy", "harness/b.py": ""},
        {"harness/a.py": "x", "harness/c.py": "y"},
        {"harness/a.py": "x\x00", "harness/b.py": "y"},
        {"harness/a.py": "xharness/b.py\x00y", "harness/b.py": ""},
        {"harness/a.py": "x", "engines/b.py": "y"},
    )
    digests = {software.source_digest(tree(tmp_path / str(n), files)) for n, files in enumerate(layouts)}
    assert len(digests) == len(layouts)


def test_the_source_digest_knows_where_a_file_ends(tmp_path):
    one = tree(tmp_path / "one", {"harness/a.py": "xharness/b.py\x000\x00"})
    two = tree(tmp_path / "two", {"harness/a.py": "x", "harness/b.py": ""})
    assert software.source_digest(one) != software.source_digest(two)
    one = tree(tmp_path / "three", {"harness/a.py": "xharness/b.py\x00"})
    assert software.source_digest(one) != software.source_digest(two)


class FakeDistribution:
    def __init__(self, record):
        self.record = record

    def read_text(self, name):
        assert name == "RECORD"
        return self.record


RECORD = """torch/lib/libgomp.so.1,sha256=AAAABBBBCCCCDDDD,10
torch/_C.so,sha256=EEEE,11
torch/__init__.py,sha256=FFFF,12
torch/x.so.py,sha256=GGGG,12
"""


def with_record(monkeypatch, record):
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: FakeDistribution(record))


def test_a_build_is_the_hashes_of_its_native_files(monkeypatch):
    with_record(monkeypatch, RECORD)
    digest = software._native_digest("torch")
    assert software._bundled("torch", software._OPENMP) == "libgomp.so.1 (AAAABBBBCCCC)"
    assert software._bundled("torch", software._BLAS) == "no library of its own; part of package.torch.native"
    with_record(monkeypatch, RECORD.replace("FFFF", "HHHH"))  # a Python file is not native code
    assert software._native_digest("torch") == digest
    with_record(monkeypatch, RECORD.replace("GGGG", "HHHH"))
    assert software._native_digest("torch") == digest
    with_record(monkeypatch, RECORD.replace("EEEE", "HHHH"))
    assert software._native_digest("torch") != digest
    with_record(monkeypatch, "gguf/a.py,sha256=1,2\n")
    assert software._native_digest("gguf") == "no native code"


@pytest.mark.parametrize(("record", "reason"), [(None, "left no RECORD"), ("torch/_C.so,,\n", "without a hash")])
def test_a_build_without_hashes_is_unknown(monkeypatch, record, reason):
    with_record(monkeypatch, record)
    with pytest.raises(Unknown, match=reason):
        software._native_digest("torch")


def test_a_package_that_is_missing_is_known_to_be(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert [field.value for field in software.package_fields("torch")] == ["not installed"] * 2
    assert [field.value for field in software._library_fields("torch")] == ["not installed"] * 2


def test_an_unexpected_fault_is_not_swallowed():
    def fault():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        read_field("x", "identity", "here", fault)


def test_this_host_twice_is_the_same_and_names_no_user_or_path():
    first, second = (fingerprint_of(host_fields(dict(os.environ), now=NOW)) for _ in range(2))
    assert first.digest == second.digest
    assert {"cpu.isa.level", "os.libc", "package.torch", "samebits.source"} <= {f.name for f in first.fields}
    home = str(Path.home())
    for field in first.fields:
        if isinstance(field.value, str):
            assert home not in field.value
            assert not field.value.startswith("/"), field.name


def test_describing_a_host_imports_nothing_it_describes():
    heavy = ("torch", "numpy", "pyarrow", "tokenizers", "gguf", "jinja2")
    code = (
        "import os, sys; from harness.fingerprint.host import host_fields; host_fields(os.environ);"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
