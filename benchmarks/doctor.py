"""How long `samebits doctor` takes on 1,000 files of every kind it reads; the aim is under 5 seconds.

Usage: python benchmarks/doctor.py [--files 1000] [--examples tests/harness/doctor/examples]

The files are the written examples, repeated with a little padding each so that no two are equal. Process CPU time is
printed beside wall time: on a shared machine only the first is steady.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from harness.doctor.diagnose import diagnose
from harness.doctor.settings import DoctorSettings

ROUNDS = 3


def read_files(examples: Path) -> list[tuple[str, str]]:
    """(name, text) of every file in the bundles."""
    found: list[tuple[str, str]] = []
    name, lines = "", []
    for bundle in sorted(examples.glob("*.txt")):
        for line in [*bundle.read_text().splitlines(), "##### end"]:
            if line.startswith(("##### ", "--- ", ">>> ")) and name:
                found.append((name, "\n".join(lines) + "\n"))
                name, lines = "", []
            if line.startswith("--- "):
                name = line[4:]
            elif name:
                lines.append(line)
    return found


def plan_files(pool: list[tuple[str, str]], count: int) -> Iterator[tuple[str, str]]:
    """`count` files, each in a folder of its own, no two equal."""
    for number in range(count):
        name, text = pool[number % len(pool)]
        mark = "" if name.endswith((".json", ".jsonl", ".service")) else f"# copy {number}\n" * 20
        if name.endswith(("Dockerfile", ".py", ".sh", ".sbatch", ".slurm", ".yaml", ".yml", ".env")):
            text = text + mark
        yield f"{number:05d}/{name}", text


def measure(folder: Path) -> tuple[float, float, int, int]:
    """Wall and CPU seconds of one diagnosis, and what it saw."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = diagnose([folder], DoctorSettings())
    return time.perf_counter() - wall, time.process_time() - cpu, result.files, len(result.findings)


def main() -> None:
    """Writes the files, diagnoses them three times, prints medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--examples", type=Path, default=Path("tests/harness/doctor/examples"))
    options = parser.parse_args()
    pool = read_files(options.examples)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, text in plan_files(pool, options.files):
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        runs = [measure(folder) for _ in range(ROUNDS)]
    walls, cpus = [run[0] for run in runs], [run[1] for run in runs]
    files, findings = runs[0][2], runs[0][3]
    print(f"{files} files, {findings} findings")
    print(f"wall {statistics.median(walls):.2f} s, CPU {statistics.median(cpus):.2f} s (medians of {ROUNDS})")
    print("under 5 s of CPU" if statistics.median(cpus) < 5 else "OVER 5 s of CPU")


if __name__ == "__main__":
    main()
