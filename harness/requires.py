"""Checks what a cell requires against this machine. It knows the host, and no engine."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from harness.cell import Requires
from harness.engine import Scalar
from harness.fingerprint.accelerator import count_accelerators
from harness.packages import is_installed


def unmet_requirement(
    requires: Requires, engine: str, cores: int, settings: Mapping[str, Scalar] = MappingProxyType({})
) -> str | None:
    """Why the cell cannot run here, or None. `settings` are those of the whole run."""
    if requires.engines and engine not in requires.engines:
        return f"the cell is for {', '.join(requires.engines)}, the engine is {engine}"
    if requires.devices and settings.get("device", requires.devices[0]) not in requires.devices:
        wanted = " or ".join(requires.devices)
        return f"the cell varies what exists on device={wanted} alone; this run has device={settings['device']}"
    for package in requires.packages:
        if not is_installed(package):
            return f"package {package!r} is not installed"
    for program in requires.programs:
        if shutil.which(program) is None:
            return f"program {program!r} is not on the PATH"
    if requires.cores > cores:
        return f"{requires.cores} cores are needed, {cores} are usable"
    if requires.accelerators and (found := count_accelerators()) < requires.accelerators:
        return f"{requires.accelerators} accelerator(s) needed, this host shows {found or 'none'}"
    return _missing_flags(requires.cpu_flags)


def _missing_flags(flags: Sequence[str]) -> str | None:
    if not flags:
        return None
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123 - one line of a proc file
            present = next((set(line.split()) for line in file if line.startswith(("flags", "Features"))), set())
    except OSError as error:
        return f"CPU flags {', '.join(flags)} cannot be checked: {error.strerror}"
    missing = [flag for flag in flags if flag not in present]
    return f"this CPU lacks {', '.join(missing)}" if missing else None
