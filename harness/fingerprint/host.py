"""The fingerprint of a host: processor, system, software, accelerators, variables and circumstances.

It does not know engines or models. Rules: nothing is imported or probed to describe it,
and nothing started but `nvidia-smi` where there is a device; reading
never fails; values name no user and no path; what moves without moving bits (host name, time, load, free
memory) is context.
"""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from harness.engine import Field
from harness.fingerprint.accelerator import accelerator_fields
from harness.fingerprint.file_digests import FileDigests
from harness.fingerprint.kernel_caches import cache_fields
from harness.fingerprint.processor import processor_fields
from harness.fingerprint.reading import NOT_APPLICABLE, Unknown, read_field, read_text
from harness.fingerprint.software import software_fields
from harness.fingerprint.variables import variable_fields

IMAGE_VARIABLE = "SAMEBITS_IMAGE_DIGEST"  # how a container that knows its image's digest tells us
NVIDIA = "proc/driver/nvidia"


def host_fields(
    environ: Mapping[str, str], *, now: datetime | None = None, root: Path = Path("/")
) -> tuple[Field, ...]:
    """Every field of this host, for the process it is called in.

    `environ` is the environment of the process, `now` an aware time (None: read the clock), and `root` the
    folder that holds `proc`, `sys` and `etc`.
    """
    return (
        *processor_fields(root),
        *software_fields(root),
        *_system_fields(root),
        *_accelerator_fields(root),
        *accelerator_fields(root),
        *cache_fields(environ, Path(environ["HOME"]) if environ.get("HOME") else None, FileDigests()),
        *variable_fields(environ),
        read_field("container.image", "lineage", IMAGE_VARIABLE, lambda: _image(environ, root)),
        *_circumstances(root, now or datetime.now(UTC)),
    )


def _system_fields(root: Path) -> tuple[Field, ...]:
    return (
        read_field("os.name", "identity", "/etc/os-release", lambda: _os_name(root)),
        read_field("os.machine", "identity", "uname", lambda: os.uname().machine),
        read_field("os.kernel", "lineage", "uname", lambda: f"{os.uname().sysname} {os.uname().release}"),
    )


def _circumstances(root: Path, now: datetime) -> tuple[Field, ...]:
    return (
        read_field("host.name", "context", "gethostname", socket.gethostname),
        read_field("host.time", "context", "clock", lambda: now.astimezone(UTC).isoformat(timespec="seconds")),
        read_field("host.load", "context", "getloadavg", lambda: round(os.getloadavg()[0], 2)),
        read_field("memory.total_kib", "context", "/proc/meminfo", lambda: _meminfo(root, "MemTotal")),
        read_field("memory.available_kib", "context", "/proc/meminfo", lambda: _meminfo(root, "MemAvailable")),
    )


def _accelerator_fields(root: Path) -> tuple[Field, ...]:
    return (
        read_field("accelerator.driver", "identity", f"/{NVIDIA}/version", lambda: _driver(root)),
        read_field("accelerator.models", "identity", f"/{NVIDIA}/gpus", lambda: _models(root)),
    )


def _os_name(root: Path) -> str:
    pairs = dict(line.split("=", 1) for line in read_text(root, "etc/os-release").splitlines() if "=" in line)
    return " ".join(pairs[key].strip("\"'") for key in ("ID", "VERSION_ID") if key in pairs) or _nameless()


def _nameless() -> str:
    raise Unknown("/etc/os-release gives neither ID nor VERSION_ID")


def _meminfo(root: Path, key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB$", read_text(root, "proc/meminfo"), re.MULTILINE)
    if found is None:
        raise Unknown(f"/proc/meminfo has no {key}")
    return int(found[1])


def _driver(root: Path) -> str:
    if not (root / NVIDIA).is_dir():
        return _without_nvidia(root)
    text = read_text(root, f"{NVIDIA}/version")
    version = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    if version is None:
        raise Unknown(f"/{NVIDIA}/version shows no version number")
    kind = "open" if "Open Kernel Module" in text.splitlines()[0] else "proprietary"
    return f"NVIDIA {version[1]} ({kind})"


def _models(root: Path) -> str:
    if not (root / NVIDIA).is_dir():
        return _without_nvidia(root)
    files = sorted((root / NVIDIA / "gpus").glob("*/information"))
    models = [re.search(r"^Model:\s*(.+?)\s*$", path.read_text(), re.MULTILINE) for path in files]
    if not models or None in models:
        raise Unknown(f"/{NVIDIA}/gpus does not name the models")
    counted = Counter(model[1] for model in models if model)
    return ", ".join(f"{count} x {name}" for name, count in sorted(counted.items()))


def _without_nvidia(root: Path) -> str:
    """Not applicable on a host without accelerators; unknown where a device is there that is not read."""
    devices = [name for name in ("dev/nvidiactl", "dev/kfd", "dev/accel") if (root / name).exists()]
    if devices:
        raise Unknown(f"/{devices[0]} is there but /{NVIDIA} is not")
    return NOT_APPLICABLE


def _image(environ: Mapping[str, str], root: Path) -> str:
    """The container image's digest: as declared, as Podman records it, or unknown inside other containers."""
    if IMAGE_VARIABLE in environ:
        return environ[IMAGE_VARIABLE]
    if (root / "run/.containerenv").is_file():
        found = re.search(r'^imageid="(.+)"$', (root / "run/.containerenv").read_text(), re.MULTILINE)
        return f"sha256:{found[1]}" if found else _hidden_image()
    if (root / ".dockerenv").exists() or _in_container_group(root):
        return _hidden_image()
    return NOT_APPLICABLE


def _hidden_image() -> str:
    raise Unknown(f"a container cannot see its image's digest; set {IMAGE_VARIABLE}")


def _in_container_group(root: Path) -> bool:
    try:
        groups = read_text(root, "proc/1/cgroup")
    except (OSError, Unknown):
        return False
    return re.search(r"docker|kubepods|containerd|libpod", groups) is not None
