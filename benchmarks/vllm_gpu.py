"""The `vllm-gpu` matrix on one NVIDIA GPU: verdicts, what vLLM settled on, and how long it took.

    python benchmarks/vllm_gpu.py --plan                          # engine processes and cases; needs no GPU
    python benchmarks/vllm_gpu.py --part 8b --out OUT/8b --limit 570
    python benchmarks/vllm_gpu.py --part smollm2 --out OUT/smollm2 --limit 900
    python benchmarks/vllm_gpu.py --part 8b --out OUT/8b --judge  # what a cut run left; needs no GPU

One part per call, each with the GPU to itself: part `8b` is three engine processes of about a minute and a half of
start, `smollm2` five of less. `--eager` plans the same cells without compiled graphs and CUDA graphs, which is most of
that start; its verdicts are about that mode and the files say so. Give both parts in one call and they run after
each other.

Everything is written as it comes and nothing waits for the end: captures lie in OUT/PART, a verdict is appended to
OUT/PART-verdicts.jsonl once all of its cases are captured, and OUT/vllm-gpu.json and OUT/vllm-gpu.md are written anew
with each. Exit code: the highest of the parts', 1 if a part did not finish in time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.plan import Plan

ROOT = Path(__file__).resolve().parents[1]
CELLS = ROOT / "cells" / "vllm-gpu"
PARTS = {"8b": "qwen3-8b-dummy", "smollm2": "smollm2"}
SHOWN = ("attention_backend", "batch_invariant_kernels", "execution", "flash_attention", "model_runner",
         "sampler_kernel")  # fmt: skip
RESOLVED = ("async_scheduling", "cascade_attention", "flashinfer_autotune", "graph_mode", "graph_sizes", "page_size",
            "prefix_cache")  # fmt: skip
GRAPHS = "enforce_eager = false"  # how the cells write it
TAIL_LINES = 40
GRACE_S = 20.0
POLL_S = 2.0
THREADS = 8  # part of what a case is, so that captures can be judged on a host with other cores
CASE_S = 300  # for one case, and for one start
ONE_HOST = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}  # no network is needed, and none is looked for
START = time.monotonic()


def say(*words: object) -> None:
    print(f"[{time.monotonic() - START:6.1f}]", *words, flush=True)


def main() -> int:
    options = arguments()
    sys.path.insert(0, str(ROOT))
    names = options.part or list(PARTS)
    options.out.mkdir(parents=True, exist_ok=True)
    parts = [Part(name, options.out, eager=options.eager) for name in names]
    if options.plan:
        for part in parts:
            part.show()
        return 0
    report = Report(options.out, parts, "judged by " if options.judge else "")
    say("versions", report.versions)
    for part in parts:
        if options.judge:
            part.look()
        else:
            part.run(options.limit - (time.monotonic() - START), report)
        report.write()
    print(report.markdown())
    return max(part.code for part in parts)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("vllm-gpu"), help="folder for everything that is to be kept")
    parser.add_argument("--part", action="append", choices=sorted(PARTS), help="only this part; repeatable")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds for everything; then a run is interrupted")
    parser.add_argument("--eager", action="store_true", help="without compiled graphs and CUDA graphs")
    parser.add_argument("--plan", action="store_true", help="say what would run, and run nothing")
    parser.add_argument("--judge", action="store_true", help="judge what lies in --out, and run nothing")
    return parser.parse_args()


class Part:
    """The cells of one model: a run in a folder of its own, and the verdicts that its captures allow so far."""

    def __init__(self, name: str, out: Path, *, eager: bool) -> None:
        self.name, self.out, self.eager = name, out, eager
        self.folder, self.matrix = out / name, out / f"{name}-cells"
        self.verdicts: dict[str, dict[str, Any]] = {}
        self.code, self.finished = 1, False
        self._write_cells()
        self.plan = self._plan()

    def _write_cells(self) -> None:
        """The part's cells as they ship, or with graphs off."""
        self.matrix.mkdir(exist_ok=True)
        for file in [CELLS / "matrix.toml", *sorted(CELLS.glob(f"{self.name}-*.toml"))]:
            text = file.read_text()
            if self.eager and file.name != "matrix.toml":
                if GRAPHS not in text:
                    sys.exit(f"{file}: expected {GRAPHS!r}, so that --eager can change it")
                text = text.replace(GRAPHS, "enforce_eager = true")
            (self.matrix / file.name).write_text(text)

    def _plan(self) -> Plan:
        from harness.choose import choose_plan

        return choose_plan(
            [str(self.matrix)], engine="vllm", model=PARTS[self.name], mode=None, assignments=(f"threads={THREADS}",)
        )

    def show(self) -> None:
        from harness.plan_text import plan_text

        print(plan_text(self.plan), end="\n\n")

    def run(self, seconds: float, report: Report) -> None:
        """Runs the cells for so long at most; judges on the way."""
        command = [sys.executable, "-m", "harness.cli", "run", str(self.matrix), "--engine", "vllm",
                   "--model", PARTS[self.name], "--set", f"threads={THREADS}", "--out", str(self.folder), "--overwrite",
                   "--deadline", str(CASE_S)]  # fmt: skip
        paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = {**ONE_HOST, **os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        say("starting", self.name, f"({len(self.plan.pairs)} cells, {self.plan.counts['lifetimes']} engine processes)")
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.out / f"{self.name}-verdicts.jsonl").unlink(missing_ok=True)
        process = subprocess.Popen(command, cwd=ROOT, env=environment)
        end = time.monotonic() + max(1.0, seconds)
        while process.poll() is None and time.monotonic() < end:
            time.sleep(POLL_S)
            if self.look():
                report.write()
        if process.poll() is None:
            say(self.name, "did not finish in time; interrupting it")
            interrupt(process)
        else:
            self.code, self.finished = process.returncode, True
            say(self.name, "ended with", self.code)
        self.look()

    def look(self) -> int:
        """Judges the pairs whose captures have become whole, and says how many did."""
        found = 0
        for record in self._record() or self._judged():
            if record["label"] in self.verdicts:
                continue
            found += 1
            self.verdicts[record["label"]] = record
            say(record["label"], record["verdict"], record["expected"] or "", "-", record["reason"])
            with (self.out / f"{self.name}-verdicts.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
        return found

    def _record(self) -> list[dict[str, Any]]:
        """The verdicts of a finished run; they hold those of cells that ended in an error too."""
        file = self.folder / "run.json"
        return list(json.loads(file.read_text())["verdicts"]) if file.is_file() else []

    def _judged(self) -> list[dict[str, Any]]:
        from harness.judge import judge
        from harness.record import verdict_record
        from harness.run import expected_captures
        from harness.store import Store

        store = Store(self.folder / "captures")
        expected = expected_captures(self.plan)
        found = []
        for pair in self.plan.pairs:
            if pair.label not in self.verdicts and all(store.has(case) for case in pair.cases):
                captures = {case: store.read(case) for case in pair.cases}
                found.append(verdict_record(self.plan, pair, judge(pair, captures, expected)))
        return found

    def lifetimes(self) -> list[dict[str, Any]]:
        """One entry per engine process: what it observed and resolved, and the seconds of its cases."""
        found: dict[str, dict[str, Any]] = {}
        for header in sorted(self.folder.glob("captures/[0-9a-f]*/capture.json")):
            capture = json.loads(header.read_text())["capture"]
            entry = found.setdefault(capture["process_nonce"], {"cases": 0, "seconds": 0.0})
            entry["cases"] += 1
            entry["seconds"] += capture["seconds"]
            entry["observed"] = {key: capture["observed"].get(key) for key in SHOWN}
            entry["resolved"] = {key: capture["resolved"].get(key) for key in RESOLVED}
            entry["requested"] = capture["requested"]
        return list(found.values())

    def open_cells(self) -> list[str]:
        """Labels without a verdict."""
        return [pair.label for pair in self.plan.pairs if pair.label not in self.verdicts]


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does; a run that does not end by it is killed."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()


class Report:
    """The files that say what there is so far."""

    def __init__(self, out: Path, parts: list[Part], role: str) -> None:
        self.out, self.parts = out, parts
        self.versions = {role + name: value for name, value in versions().items()}

    def write(self) -> None:
        """Writes them anew."""
        summary = {"schema": 2, "versions": self.versions, "seconds": round(time.monotonic() - START, 1),
                   "parts": {part.name: {"code": part.code, "finished": part.finished, "eager": part.eager,
                                         "verdicts": list(part.verdicts.values()), "not_judged": part.open_cells(),
                                         "lifetimes": part.lifetimes()} for part in self.parts}}  # fmt: skip
        (self.out / "vllm-gpu.json").write_text(json.dumps(summary, indent=1))
        (self.out / "vllm-gpu.md").write_text(self.markdown())
        self._write_logs()

    def _write_logs(self) -> None:
        tails = []
        for part in self.parts:
            for log in sorted((part.folder / "logs").glob("*.log")):
                tails += [f"== {part.name} {log.name}", *log.read_text(errors="replace").splitlines()[-TAIL_LINES:]]
        (self.out / "logs.txt").write_text("\n".join(tails) + "\n")

    def markdown(self) -> str:
        """Tables of verdicts and of engine processes."""
        lines = ["# vLLM on a GPU", "", ", ".join(f"{key} {value}" for key, value in self.versions.items()),
                 f"in {time.monotonic() - START:.0f} s", "",
                 "| cell | graphs | verdict | expected | positions differing | reason |",
                 "|---|---|---|---|---|---|"]  # fmt: skip
        for part in self.parts:
            graphs = "off" if part.eager else "on"
            for verdict in part.verdicts.values():
                compared = verdict.get("comparison") or {}
                counted = f"{compared.get('differing_positions', '')} of {compared.get('positions', '')}"
                lines.append(f"| {verdict['label']} | {graphs} | {verdict['verdict']} | {verdict['expected'] or ''} "
                             f"| {counted} | {verdict['reason']} |")  # fmt: skip
            lines += [f"| {label} | {graphs} | not judged | | | its captures are not whole |" for label in
                      part.open_cells()]  # fmt: skip
        lines += ["", "| part | batch_invariant | observed | resolved | cases | seconds |", "|---|---|---|---|---|---|"]
        for part in self.parts:
            for life in part.lifetimes():
                told = [", ".join(f"{key}={value}" for key, value in life[kind].items())
                        for kind in ("observed", "resolved")]  # fmt: skip
                lines.append(f"| {part.name} | {life['requested']['batch_invariant']} | {told[0]} | {told[1]} "
                             f"| {life['cases']} | {life['seconds']:.1f} |")  # fmt: skip
        return "\n".join(lines) + "\n"


def versions() -> dict[str, str]:
    """What computes here."""
    found = {}
    for name in ("vllm", "torch", "triton", "transformers", "flashinfer-python"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    if shutil.which(query[0]):
        found["gpu"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return found


if __name__ == "__main__":
    sys.exit(main())
