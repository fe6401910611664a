"""Which instruction set the kernels are built for on this CPU.

It does not know compilers. Rules: a level is used only when the CPU reports every feature that a compiler may use for
it; asking for more than the CPU has is an error, never a quiet step down.
"""

from __future__ import annotations

import platform
from pathlib import Path

from engines.bundled.kernels.interface import KernelError

ISAS = ("x86-64-v3", "x86-64-v4", "generic")
CPUINFO = Path("/proc/cpuinfo")

# Names as Linux prints them; the levels are those of the x86-64 psABI.
_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "sse4_2", "ssse3", "popcnt", "cx16"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


def resolve_isa(wanted: str, cpuinfo: Path = CPUINFO) -> str:
    """The instruction set that "auto" or a name of ISAS stands for on this CPU.

    Raises:
        KernelError: a name that is none of these, or a level that this CPU lacks (with the missing features).
    """
    flags = cpu_flags(cpuinfo)
    if wanted == "auto":
        return "x86-64-v4" if flags >= _V4 else "x86-64-v3" if flags >= _V3 else "generic"
    if wanted not in ISAS:
        raise KernelError(f"isa: expected auto, {', '.join(ISAS)}, got {wanted!r}")
    missing = {"x86-64-v3": _V3, "x86-64-v4": _V4, "generic": frozenset[str]()}[wanted] - flags
    if missing:
        raise KernelError(f"isa {wanted}: this CPU lacks {', '.join(sorted(missing))}; use auto or generic")
    return wanted


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """The features this x86-64 CPU reports; empty on other machines and where the system does not tell."""
    if platform.machine() not in ("x86_64", "AMD64") or not cpuinfo.exists():
        return frozenset()
    for line in cpuinfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()
