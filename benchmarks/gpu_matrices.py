"""All matrices of the bundled engine on one GPU in one call of so many seconds; what is done stays when it is cut.

`python benchmarks/gpu_matrices.py OUT` runs, several at a time on the one card: the tests that need a GPU; quick,
scheduler and sampling in `portable` and in `tensorcore`, with `free` as their control; the host's CPU against the card;
graphs and compile caches; two ranks of `tensorcore`; the 8B shape alone and in a batch; SmolLM2 where its file is
present. Every part has a deadline of its own. OUT/matrices.md gets each part's verdict table and OUT/matrices.json its
verdicts, digests and exit code as they come. Nothing is timed: parts share the card. `--device emulated` or `cpu` runs
the float32 parts without one. Exit code: the highest of the parts', 3 at least if one was cut or could not start.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engines.bundled.gpu import why_not
from engines.bundled.models.catalogue import list_models

ROOT = Path(__file__).resolve().parents[1]
TOGETHER = 10  # parts at a time
NEEDS_CARD = ("tests", "tensorcore", "gpu", "8b")  # a name that holds one of these
GPU_CELLS = ("graphs-portable", "graphs-tensorcore", "caches-portable", "caches-tensorcore")
SHARES = {"quick": 2, "scheduler": 4, "sampling": 3}  # parts that a matrix is dealt out in
TESTS = ("tests/engines/bundled/gpu/test_gpu_device.py",)
Report = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something to run within `limit` seconds."""

    name: str
    command: tuple[str, ...]
    limit: float


@dataclass(slots=True, kw_only=True)
class State:
    """What became of a part."""

    state: str = "waiting"  # "running" | "done" | "cut" | "not started"
    exit_code: int | None = None
    seconds: float = 0.0
    verdicts: list[Report] = field(default_factory=list)
    captures: dict[str, str] = field(default_factory=dict)  # capture to SHA-256 of its content
    tail: list[str] = field(default_factory=list)


class Ledger:
    """The two files that are rewritten whenever something is known."""

    def __init__(self, out: Path, parts: Sequence[Part]) -> None:
        self._out, self._lock, self.stopped = out, threading.Lock(), threading.Event()
        self.states = {part.name: State() for part in parts}
        self._tables: list[str] = []

    def write(self, table: str = "") -> None:
        with self._lock:
            self._tables += [table] if table else []
            content = {name: asdict(state) for name, state in self.states.items()}
            put(self._out / "matrices.json", json.dumps(content, indent=1) + "\n")
            put(self._out / "matrices.md", "\n\n".join(self._tables) + "\n")


def put(path: Path, text: str) -> None:
    """Whole or not at all."""
    draft = path.with_suffix(".part")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def environment() -> dict[str, str]:
    """Of a part's processes: modules are found here first, then where this process's environment says."""
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def samebits(runs: Path, name: str, matrices: Sequence[str], *options: str) -> tuple[str, ...]:
    """The command of one run."""
    where = ("--engine", "bundled", "--out", str(runs / name), "--quiet", "--deadline", "300")
    return (sys.executable, "-m", "harness.cli", "run", *matrices, *where, *options)


def all_parts(runs: Path, device: str, cells: Sequence[str] = ()) -> list[Part]:
    """The most telling first. A part that is cut has no verdicts, so long matrices are several parts.

    `cells`: only these of quick, scheduler and sampling.
    """
    on, tiny = ("--set", f"device={device}"), ("--model", "tiny")
    # Bits are asked for here, not what another release of torch or Triton announces: warnings are shown alone.
    tests = (sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-W", "default", *TESTS)
    quick, scheduler, sampling = (
        [
            Part(name=part, command=samebits(runs, part, (name,), *tiny, *how, *named(some)), limit=450)
            for kind, how in (("portable", on), ("tensorcore", ("--mode", "tensorcore")))
            for number, some in enumerate(shares(name, count, cells), 1)
            for part in [f"{kind}-{name}-{number}"]
        ]
        for name, count in SHARES.items()
    )
    eight = [
        (name, ("gpu",), (*tiny, *named([f"{name}-alone-vs-batch"])), 450) for name in ("8b-native", "8b-tensorcore")
    ]
    big: list[tuple[str, tuple[str, ...], tuple[str, ...], float]] = []
    if any(listing.name == "smollm2" and listing.available for listing in list_models()):
        big = [
            ("cpu-to-gpu", ("gpu",), named(["cpu-to-gpu"]), 450),
            ("smollm2", ("quick",), ("--model", "smollm2", *on), 450),
            ("smollm2-tensorcore", ("quick",), ("--model", "smollm2", "--mode", "tensorcore"), 450),
        ]
    both = ("cpu-to-gpu-logits", ("gpu",), (*tiny, *named(["cpu-to-gpu-logits"])), 450)
    gpu = ("gpu", ("gpu",), (*tiny, *named(GPU_CELLS)), 450)
    ranks = ("gpu-ranks", ("gpu",), (*tiny, *named(["tensor-parallel-tensorcore"])), 450)
    single = [Part(name=name, command=samebits(runs, name, matrix, *how), limit=limit)
              for name, matrix, how, limit in (*eight, both, gpu, ranks, *big)]  # fmt: skip
    parts = [Part(name="tests", command=tests, limit=240), *single, *quick, *scheduler, *sampling]
    return [part for part in parts if device == "cuda" or not any(word in part.name for word in NEEDS_CARD)]


def named(cells: Sequence[str]) -> tuple[str, ...]:
    """The words that choose them."""
    return tuple(word for cell in cells for word in ("--cell", cell))


def cells_of(matrix: str) -> list[str]:
    """The names of its cells."""
    return sorted(path.stem for path in (ROOT / "cells" / matrix).glob("*.toml") if path.stem != "matrix")


def shares(matrix: str, count: int, cells: Sequence[str]) -> list[list[str]]:
    """The cells of a matrix, or those of them that are in `cells`, dealt out in `count` lists or fewer."""
    kept = [cell for cell in cells_of(matrix) if not cells or cell in cells]
    return [kept[i::count] for i in range(count) if kept[i::count]]


def run_part(part: Part, ledger: Ledger, runs: Path, end: float) -> None:
    """Runs a part to its end or deadline and notes what it left."""
    state, begin = ledger.states[part.name], time.monotonic()
    if end - begin < 20 or ledger.stopped.is_set():
        state.state = "not started"
        ledger.write()
        return
    state.state = "running"
    ledger.write()
    log = runs / f"{part.name}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            part.command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
            env=environment(),
        )  # fmt: skip
        state.state = "cut" if not wait(process, min(begin + part.limit, end), part, ledger, runs) else "done"
    state.exit_code, state.seconds = process.returncode, round(time.monotonic() - begin, 1)
    state.tail = log.read_text(errors="replace").splitlines()[-40:]
    table = collect(part, state, runs)
    ledger.write(f"## {part.name}: {state.state}, exit code {state.exit_code}, {state.seconds} s\n\n{table}")
    print(f"{part.name}: {state.state}, exit code {state.exit_code}, {state.seconds} s", flush=True)


def wait(process: subprocess.Popen[bytes], end: float, part: Part, ledger: Ledger, runs: Path) -> bool:
    """True if it ended by itself; digests of captures are noted meanwhile."""
    while True:
        try:
            process.wait(max(0.1, min(10.0, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            ledger.states[part.name].captures = digests(runs / part.name)
            ledger.write()
            if time.monotonic() < end and not ledger.stopped.is_set():
                continue
            for sent, patience in (
                (signal.SIGINT, 8.0),
                (signal.SIGKILL, 8.0),
            ):  # an interrupted run keeps its captures
                os.killpg(process.pid, sent)
                try:
                    process.wait(patience)
                    break
                except subprocess.TimeoutExpired:
                    continue
            return False
        return True


def collect(part: Part, state: State, runs: Path) -> str:
    """Verdicts and digests into the state; the table as markdown."""
    folder = runs / part.name
    state.captures = digests(folder)
    if (folder / "run.json").is_file():
        state.verdicts = json.loads((folder / "run.json").read_text())["verdicts"]
        return (folder / "summary.md").read_text()
    return "```\n" + "\n".join(state.tail) + "\n```"


def digests(folder: Path) -> dict[str, str]:
    """Capture to SHA-256 of its content, of those that are whole."""
    found = {}
    for path in sorted(folder.glob("captures/*/capture.json")):
        try:
            found[path.parent.name] = str(json.loads(path.read_text())["sha256"])
        except (OSError, ValueError, KeyError):
            continue  # it is being written
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=560.0, help="for everything")
    parser.add_argument("--device", choices=("cuda", "emulated", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="+", default=[], help="only these")
    parser.add_argument("--together", type=int, default=TOGETHER)
    parser.add_argument("--cells", nargs="+", default=[], help="only these of quick, scheduler and sampling")
    parser.add_argument("--keep", type=Path, help="where the runs' own folders stay; a temporary folder otherwise")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    if options.device == "cuda" and (reason := why_not()):
        print(f"UNSUPPORTED: {reason}")
        return 3
    options.out.mkdir(parents=True, exist_ok=True)
    runs = options.keep or Path(tempfile.mkdtemp(prefix="samebits-matrices-"))
    runs.mkdir(parents=True, exist_ok=True)
    parts = all_parts(runs, options.device, options.cells)
    known = {cell for matrix in SHARES for cell in cells_of(matrix)}
    if strangers := sorted(set(options.cells) - known):
        parser.error(f"--cells: there is no {strangers[0]!r} in {', '.join(SHARES)}; `samebits cells list` shows all")
    unknown = sorted(set(options.parts) - {part.name for part in parts})
    if unknown:
        parser.error(f"--parts: there is no {unknown[0]!r} here; there are {', '.join(part.name for part in parts)}")
    chosen = [part for part in parts if not options.parts or part.name in options.parts]
    ledger = Ledger(options.out, chosen)
    with ThreadPoolExecutor(options.together) as pool:
        done = [pool.submit(run_part, part, ledger, runs, end) for part in chosen]
        try:
            for one in done:
                one.result()
        except KeyboardInterrupt:
            ledger.stopped.set()  # parts are ended, what they have is kept
    if options.keep is None:
        shutil.rmtree(runs, ignore_errors=True)
    states = ledger.states.values()
    print((options.out / "matrices.md").read_text())
    worst = max((abs(state.exit_code or 0) for state in states), default=2)
    return max(worst, 3) if any(state.state != "done" for state in states) else worst


if __name__ == "__main__":
    sys.exit(main())
