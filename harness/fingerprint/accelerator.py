"""Fingerprint fields of NVIDIA accelerators and the libraries that compute on them.

It does not import CUDA, torch or an engine, and starts nothing on a device. Rules: a host without an accelerator has
*not applicable*; a host with one that cannot be asked has *unknown*, with the reason; versions come from package
metadata; clocks are context; devices are listed in the driver's order, equal ones counted.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from harness.engine import Field, FieldClass
from harness.fingerprint.reading import NOT_APPLICABLE, Unknown, read_field

PROGRAM = "nvidia-smi"
TIMEOUT_S = 20.0
NVIDIA = "proc/driver/nvidia"
DEVICES = ("dev/nvidiactl", "dev/nvidia0")
NOT_INSTALLED = "not installed"


class Query(NamedTuple):
    """One property that `nvidia-smi --query-gpu` knows, and the field it becomes."""

    field: str
    property: str
    field_class: FieldClass
    reason: str


QUERIES = (
    Query(
        "accelerator.memory",
        "memory.total",
        "identity",
        "MiB per device; sizes caches and pages, and tells variants apart",
    ),
    Query("accelerator.compute_capability", "compute_cap", "identity", "chooses kernels"),
    Query("accelerator.mig", "mig.mode.current", "identity", "a slice has fewer multiprocessors, and other tiles"),
    Query("accelerator.ecc", "ecc.mode.current", "context", "memory errors are corrected, or are not"),
    Query("accelerator.power_limit", "power.limit", "context", "W"),
    Query("accelerator.clock", "clocks.current.sm", "context", "MHz, now"),
    Query("accelerator.clock_limit", "clocks.max.sm", "context", "MHz, at most"),
)
LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "accelerator.cuda": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12"),
    "accelerator.cublas": ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12"),
    "accelerator.cudnn": ("nvidia-cudnn", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    "accelerator.nccl": ("nvidia-nccl", "nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    "accelerator.triton": ("triton", "pytorch-triton"),
    "accelerator.flash_attention": ("flash-attn", "flash-attn-3", "flash-attn-4"),
    "accelerator.flashinfer": ("flashinfer-python", "flashinfer"),
}


def accelerator_fields(root: Path = Path("/")) -> tuple[Field, ...]:
    """Devices, the CUDA version the driver serves, and libraries. `root` holds `proc` and `dev`."""
    return (
        *_device_fields(root),
        *(read_field(name, "identity", "package metadata", _library(root, names)) for name, names in LIBRARIES.items()),
    )


def _device_fields(root: Path) -> tuple[Field, ...]:
    source = f"{PROGRAM} --query-gpu"
    fields = [
        read_field(query.field, query.field_class, f"{source}={query.property}; {query.reason}", _device(root, query))
        for query in QUERIES
    ]
    cuda = read_field("accelerator.cuda_driver", "identity", f"{PROGRAM} --version", lambda: _cuda_of_driver(root))
    return (*fields, cuda)


def _device(root: Path, query: Query) -> Callable[[], str]:
    def read() -> str:
        if not _present(root):
            return NOT_APPLICABLE
        return _counted([row[QUERIES.index(query)] for row in _rows()])

    return read


def count_accelerators(root: Path = Path("/")) -> int:
    """NVIDIA devices of this host, by what the driver shows in `proc` or `dev` below `root`; nothing is started."""
    listed = root / NVIDIA / "gpus"
    if listed.is_dir():
        return sum(1 for entry in listed.iterdir())
    devices = root / "dev"
    names = (path.name.removeprefix("nvidia") for path in devices.glob("nvidia*")) if devices.is_dir() else ()
    return sum(name.isdecimal() for name in names)


def _present(root: Path) -> bool:
    return (root / NVIDIA).is_dir() or any((root / device).exists() for device in DEVICES)


def _rows() -> list[list[str]]:
    """One row per device, its properties in the order of QUERIES. Raises Unknown."""
    properties = ",".join(query.property for query in QUERIES)
    text = _ask(f"--query-gpu={properties}", "--format=csv,noheader,nounits")
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    if not rows or any(len(row) != len(QUERIES) for row in rows):
        raise Unknown(f"{PROGRAM} answered in another form: {text.strip()[:80]!r}")
    return rows


def _counted(values: Sequence[str]) -> str:
    """`2 x 143771`; a property that no device offers is not applicable."""
    absent = ("[N/A]", "N/A", "[Not Supported]", "Not Supported")
    if all(value in absent for value in values):
        return NOT_APPLICABLE
    counted = Counter(values)
    return ", ".join(f"{counted[value]} x {value}" for value in dict.fromkeys(values))


def _cuda_of_driver(root: Path) -> str:
    if not _present(root):
        return NOT_APPLICABLE
    for line in _ask("--version").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "CUDA Version" and value.strip():
            return value.strip()
    raise Unknown(f"{PROGRAM} --version names no CUDA version")


def _ask(*arguments: str) -> str:
    """What the program answers. Raises Unknown."""
    text, problem = _answer(*arguments)
    if problem:
        raise Unknown(problem)
    return text


@cache
def _answer(*arguments: str) -> tuple[str, str]:
    """(what the program answers, why it does not); asked once per process, since it takes up to a second."""
    program = shutil.which(PROGRAM)
    if program is None:
        return "", f"there is an NVIDIA device, and {PROGRAM} is not on the PATH"
    try:
        done = subprocess.run(  # noqa: S603 - a fixed program
            [program, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"{PROGRAM} gave no answer within {TIMEOUT_S:.0f} s"
    if done.returncode != 0:
        return "", f"{PROGRAM} ended with status {done.returncode}: {_first_line(done.stdout, done.stderr)}"
    return done.stdout, ""


def _first_line(*texts: str) -> str:
    return next((line.strip() for text in texts for line in text.splitlines() if line.strip()), "no message")


def _library(root: Path, names: Sequence[str]) -> Callable[[], str]:
    def read() -> str:
        found = [f"{version} ({name})" for name in names if (version := _version(name)) is not None]
        if found:
            return ", ".join(found)
        return NOT_INSTALLED if _present(root) else NOT_APPLICABLE

    return read


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
