"""Fingerprint fields of the processor: which one, which instructions, how many cores, which caches.

It does not know engines. Rules: a mixture of cores is shown as a mixture; only instruction-set flags that
arithmetic can use are kept, so that a kernel's list of mitigations does not move the fingerprint; caches
are identity, because BLAS libraries choose their blocks by them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

from harness.engine import Field
from harness.fingerprint.reading import NOT_APPLICABLE, Unknown, read_field, read_text

CPUINFO = "proc/cpuinfo"
CACHES = "sys/devices/system/cpu/cpu0/cache"
Processors = Callable[[], tuple[Mapping[str, str], ...]]

# Keys of /proc/cpuinfo: x86, then aarch64's nearest equivalent.
_NAMED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("cpu.vendor", ("vendor_id", "CPU implementer")),
    ("cpu.family", ("cpu family", "CPU architecture")),
    ("cpu.model", ("model", "CPU part")),
    ("cpu.model_name", ("model name", "CPU part")),
    ("cpu.stepping", ("stepping", "CPU revision")),
)

# Levels of the x86-64 psABI beyond the baseline, with the kernel's names of the flags.
_LEVELS: tuple[tuple[str, frozenset[str]], ...] = (
    ("x86-64-v2", frozenset({"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"})),
    ("x86-64-v3", frozenset({"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"})),
    ("x86-64-v4", frozenset({"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"})),
)
_ARITHMETIC = re.compile(
    r"(sse|ssse|pni$|fma|f16c|avx|amx|abm$|bmi|popcnt|movbe|xop"
    r"|fp$|fphp|asimd|sve|sme(\d|_|$)|bf16|i8mm|neon|vfp|ebf16|rpres|afp)"
)


def processor_fields(root: Path) -> tuple[Field, ...]:
    """Identity fields `cpu.*`, and the affinity list and the container's quota as context."""
    info = f"/{CPUINFO}"
    processors = cache(partial(_processors, root))  # read once, where the first field asks for it
    return (
        *(read_field(name, "identity", info, partial(_value, processors, keys)) for name, keys in _NAMED),
        read_field("cpu.microcode", "identity", info, lambda: _microcode(processors)),
        read_field("cpu.isa.level", "identity", info, lambda: isa_level(_flags(processors))),
        read_field("cpu.isa.flags", "identity", info, lambda: _arithmetic(_flags(processors))),
        read_field("cpu.caches", "identity", f"/{CACHES}", lambda: _caches(root)),
        read_field("cpu.count", "identity", "os.cpu_count", _count),
        read_field("cpu.usable", "identity", "os.sched_getaffinity", lambda: len(_affinity())),
        read_field("cpu.affinity", "context", "os.sched_getaffinity", lambda: ranges(_affinity())),
        read_field("cpu.quota", "context", "cgroup", lambda: _quota(root)),
    )


def isa_level(flags: frozenset[str]) -> str:
    """The highest x86-64 level that the flags reach, or the architecture for other processors."""
    if "asimd" in flags or "sse2" not in flags:
        return os.uname().machine if "asimd" not in flags else "aarch64"
    level = "x86-64-v1"
    for name, needed in _LEVELS:
        if not needed <= flags:
            break
        level = name
    return level


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as `0-3,8`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][-1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _processors(root: Path) -> tuple[Mapping[str, str], ...]:
    blocks = re.split(r"\n\s*\n", read_text(root, CPUINFO))
    parsed = (dict(_pairs(block)) for block in blocks)
    return tuple(block for block in parsed if "processor" in block)


def _pairs(block: str) -> list[tuple[str, str]]:
    lines = (line.partition(":") for line in block.splitlines())
    return [(key.strip(), value.strip()) for key, colon, value in lines if colon]


def _value(processors: Processors, keys: tuple[str, ...]) -> str:
    """The processors' value under the first of `keys` they have; different values are joined."""
    for key in keys:
        values = sorted({block[key] for block in processors() if key in block})
        if values:
            return " | ".join(values)
    raise Unknown(f"/{CPUINFO} has no {' or '.join(repr(key) for key in keys)}")


def _microcode(processors: Processors) -> str:
    if any("CPU implementer" in block for block in processors()):
        return NOT_APPLICABLE
    return _value(processors, ("microcode",))


def _flags(processors: Processors) -> frozenset[str]:
    """Flags that every processor has."""
    per_core = [frozenset((block.get("flags") or block.get("Features") or "").split()) for block in processors()]
    common = frozenset.intersection(*per_core) if per_core else frozenset()
    if not common:
        raise Unknown(f"/{CPUINFO} lists no instruction-set flags")
    return common


def _arithmetic(flags: frozenset[str]) -> str:
    return " ".join(sorted(flag for flag in flags if _ARITHMETIC.match(flag)))


def _caches(root: Path) -> str:
    indices = sorted((root / CACHES).glob("index*"))
    if not indices:
        raise Unknown(f"/{CACHES} is not there")
    return ", ".join(_cache(root, index.name) for index in indices)


def _cache(root: Path, index: str) -> str:
    level, kind, size = (read_text(root, f"{CACHES}/{index}/{key}") for key in ("level", "type", "size"))
    suffix = {"Data": "d", "Instruction": "i"}.get(kind, "")
    return f"L{level}{suffix} {size}"


def _count() -> int:
    count = os.cpu_count()
    if count is None:
        raise Unknown("the system does not say how many processors it has")
    return count


def _affinity() -> list[int]:
    if not hasattr(os, "sched_getaffinity"):
        raise Unknown("this system has no processor affinity")
    return sorted(os.sched_getaffinity(0))


def _quota(root: Path) -> str:
    """Processors' worth of time that the control group grants, version 2 or 1."""
    try:
        quota, period = read_text(root, "sys/fs/cgroup/cpu.max").split()
    except FileNotFoundError:
        quota = read_text(root, "sys/fs/cgroup/cpu/cpu.cfs_quota_us")
        period = read_text(root, "sys/fs/cgroup/cpu/cpu.cfs_period_us")
    return "none" if quota in ("max", "-1") else f"{int(quota) / int(period):g} processors"
