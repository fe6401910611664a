"""Accelerators and their libraries, with a made-up driver: what is read, what is not applicable, what is unknown."""

import importlib.metadata
import stat

import pytest

from harness.fingerprint import accelerator
from harness.fingerprint.accelerator import LIBRARIES, QUERIES, accelerator_fields, count_accelerators
from harness.fingerprint.reading import NOT_APPLICABLE

ANSWER = "143771, 9.0, Disabled, Enabled, 700.00, 1980, 1980\n143771, 9.0, Disabled, Enabled, 700.00, 345, 1980\n"
VERSION = "NVIDIA-SMI version  : 570.1\nDRIVER version      : 570.1\nCUDA Version        : 12.8\n"


@pytest.fixture(autouse=True)
def forget():
    accelerator._answer.cache_clear()
    yield
    accelerator._answer.cache_clear()


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A root with an NVIDIA driver, and a folder on the PATH for a program that stands in for nvidia-smi."""
    (tmp_path / "root" / "proc" / "driver" / "nvidia").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")

    def program(text):
        file = tmp_path / "bin" / "nvidia-smi"
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        return tmp_path / "root"

    return program


def by_name(root):
    return {field.name: field for field in accelerator_fields(root)}


def test_a_host_without_an_accelerator_has_not_applicable_everywhere(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert {field.value for field in accelerator_fields(tmp_path)} == {NOT_APPLICABLE}
    assert len(accelerator_fields(tmp_path)) == len(QUERIES) + 1 + len(LIBRARIES)


def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)


def test_devices_are_read_in_the_drivers_order_and_equal_ones_counted(host):
    found = by_name(host(f'case "$1" in --version) printf "{VERSION}";; *) printf "{ANSWER}";; esac'))
    assert found["accelerator.memory"].value == "2 x 143771"
    assert found["accelerator.compute_capability"].value == "2 x 9.0"
    assert found["accelerator.mig"].value == "2 x Disabled"
    assert found["accelerator.clock"].value == "1 x 1980, 1 x 345"
    assert found["accelerator.cuda_driver"].value == "12.8"
    classes = {name: field.field_class for name, field in found.items()}
    assert (classes["accelerator.memory"], classes["accelerator.mig"], classes["accelerator.clock"]) == (
        "identity", "identity", "context")  # fmt: skip


def test_a_property_that_no_device_offers_is_not_applicable(host):
    found = by_name(host('printf "81559, 8.0, [N/A], [N/A], 400.00, 1410, 1410\\n"'))
    assert found["accelerator.mig"].value == NOT_APPLICABLE
    assert found["accelerator.memory"].value == "1 x 81559"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'No devices were found'; exit 6", "nvidia-smi ended with status 6: No devices were found"),
        ("echo one, two", "nvidia-smi answered in another form: 'one, two'"),
        ("true", "nvidia-smi answered in another form"),
        ("exec sleep 60", "nvidia-smi gave no answer within 0 s"),
    ],
)
def test_what_cannot_be_asked_is_unknown_with_the_reason(host, monkeypatch, script, reason):
    if "sleep" in script:
        monkeypatch.setattr(accelerator, "TIMEOUT_S", 0.2)
    field = by_name(host(script))["accelerator.memory"]
    assert field.value is None
    assert field.source.startswith(f"unknown, because {reason}")


def test_a_device_without_the_program_is_unknown(tmp_path, monkeypatch):
    (tmp_path / "proc" / "driver" / "nvidia").mkdir(parents=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "is not on the PATH" in by_name(tmp_path)["accelerator.memory"].source


def test_the_program_is_asked_once_per_process(host, tmp_path):
    root = host(f'echo asked >> {tmp_path}/log; printf "{ANSWER}"')
    accelerator_fields(root)
    accelerator_fields(root)
    assert (tmp_path / "log").read_text().count("asked") == 2  # the devices, and the version


def test_libraries_show_version_and_package(tmp_path, monkeypatch):
    installed = {"nvidia-cublas-cu12": "12.8.4.1", "triton": "3.4.0"}
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: installed[name] if name in installed else missing(name)
    )
    found = by_name(tmp_path)
    assert found["accelerator.cublas"].value == "12.8.4.1 (nvidia-cublas-cu12)"
    assert found["accelerator.triton"].value == "3.4.0 (triton)"
    assert found["accelerator.nccl"].value == NOT_APPLICABLE
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    assert by_name(tmp_path)["accelerator.nccl"].value == "not installed"


def test_accelerators_are_counted_by_what_the_driver_shows(tmp_path):
    assert count_accelerators(tmp_path) == 0
    (tmp_path / "dev").mkdir()
    for name in ("nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1", "null"):
        (tmp_path / "dev" / name).touch()
    assert count_accelerators(tmp_path) == 2
    (tmp_path / "proc/driver/nvidia/gpus/0000:1b:00.0").mkdir(parents=True)
    assert count_accelerators(tmp_path) == 1
