"""The `vllm-gpu` matrix on one NVIDIA GPU: verdicts, what vLLM settled on, and how long it took.

    python benchmarks/vllm_gpu.py --out OUT [--part 8b] [--part smollm2] [--sequential] [--limit 540]

Both parts run at the same time unless told otherwise: they are two engines of fixed memory on one GPU, and what one
computes must not depend on the other. Writes OUT/vllm-gpu.json, OUT/vllm-gpu.md, the run's record and report of each
part, and the ends of the engines' logs. Exit code: the highest of the parts', 1 if a part did not finish in time.
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
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PARTS = {"8b": "qwen3-8b-dummy", "smollm2": "smollm2"}
SHOWN = ("attention_backend", "batch_invariant_kernels", "execution", "flash_attention", "model_runner",
         "sampler_kernel")  # fmt: skip
RESOLVED = ("async_scheduling", "cascade_attention", "flashinfer_autotune", "graph_mode", "graph_sizes", "page_size",
            "prefix_cache")  # fmt: skip
TAIL_LINES = 40
GRACE_S = 20.0
START = time.monotonic()


def say(*words: object) -> None:
    print(f"[{time.monotonic() - START:6.1f}]", *words, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for everything that is to be kept")
    parser.add_argument(
        "--work", type=Path, help="folder for the runs and their captures; a temporary one if not given"
    )
    parser.add_argument("--part", action="append", choices=sorted(PARTS), help="only this part; repeatable")
    parser.add_argument("--sequential", action="store_true", help="one part after the other")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for everything; then runs are interrupted")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.work = options.work or Path(tempfile.mkdtemp(prefix="vllm-gpu-"))
    names = options.part or list(PARTS)
    say("versions", versions())
    groups = [[name] for name in names] if options.sequential else [names]
    codes: dict[str, int] = {}
    for group in groups:
        running = {name: start(name, options.work) for name in group}
        for name, process in running.items():
            codes[name] = wait(name, process, options.limit - (time.monotonic() - START))
    summary = {"schema": 1, "versions": versions(), "seconds": round(time.monotonic() - START, 1),
               "parts": {name: part(name, options.work, codes[name]) for name in names}}  # fmt: skip
    (options.out / "vllm-gpu.json").write_text(json.dumps(summary, indent=1))
    (options.out / "vllm-gpu.md").write_text(markdown(summary))
    keep(names, options.work, options.out)
    print(markdown(summary))
    return max(codes.values())


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


def start(name: str, work: Path) -> subprocess.Popen[bytes]:
    """One run of the part's cells."""
    cells = [file.stem for file in sorted((ROOT / "cells" / "vllm-gpu").glob(f"{name}-*.toml"))]
    chosen = [word for cell in cells for word in ("--cell", cell)]
    command = [sys.executable, "-m", "harness.cli", "run", "vllm-gpu", "--engine", "vllm", "--model", PARTS[name],
               *chosen, "--out", str(work / name), "--overwrite", "--deadline", "400"]  # fmt: skip
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    say("starting", name, f"({len(cells)} cells)")
    return subprocess.Popen(command, cwd=ROOT, env=environment)


def wait(name: str, process: subprocess.Popen[bytes], seconds: float) -> int:
    """The run's exit code; interrupted at the limit, which is 1."""
    try:
        code = process.wait(max(1.0, seconds))
    except subprocess.TimeoutExpired:
        say(name, "did not finish in time; interrupting it")
        process.send_signal(signal.SIGINT)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
        return 1
    say(name, "ended with", code)
    return code


def part(name: str, work: Path, code: int) -> dict[str, Any]:
    """What a finished run says: verdicts, lifetimes, times."""
    record = work / name / "run.json"
    if not record.is_file():
        return {"code": code, "finished": False, "verdicts": [], "lifetimes": []}
    run = json.loads(record.read_text())
    return {"code": code, "finished": True, "verdicts": run["verdicts"], "lifetimes": lifetimes(work / name)}


def lifetimes(folder: Path) -> list[dict[str, Any]]:
    """One entry per engine process: what it observed and resolved, and the seconds of its cases."""
    found: dict[str, dict[str, Any]] = {}
    for header in sorted(folder.glob("captures/*/capture.json")):
        capture = json.loads(header.read_text())["capture"]
        entry = found.setdefault(capture["process_nonce"], {"cases": 0, "seconds": 0.0})
        entry["cases"] += 1
        entry["seconds"] += capture["seconds"]
        entry["observed"] = {key: capture["observed"].get(key) for key in SHOWN}
        entry["resolved"] = {key: capture["resolved"].get(key) for key in RESOLVED}
        entry["requested"] = capture["requested"]
    return list(found.values())


def markdown(summary: dict[str, Any]) -> str:
    """Tables of verdicts and of engine processes."""
    lines = ["# vLLM on a GPU", "", ", ".join(f"{key} {value}" for key, value in summary["versions"].items()),
             f"in {summary['seconds']} s", "", "| cell | verdict | expected | positions differing | reason |",
             "|---|---|---|---|---|"]  # fmt: skip
    for name, entry in summary["parts"].items():
        if not entry["finished"]:
            lines.append(f"| ({name}) | not finished, exit code {entry['code']} | | | |")
        for verdict in entry["verdicts"]:
            compared = verdict.get("comparison") or {}
            counted = f"{compared.get('differing_positions', '')} of {compared.get('positions', '')}"
            lines.append(f"| {verdict['label']} | {verdict['verdict']} | {verdict.get('expected') or ''} | {counted} "
                         f"| {verdict['reason']} |")  # fmt: skip
    lines += ["", "| part | batch_invariant | observed | resolved | cases | seconds |", "|---|---|---|---|---|---|"]
    for name, entry in summary["parts"].items():
        for life in entry["lifetimes"]:
            told = [
                ", ".join(f"{key}={value}" for key, value in life[kind].items()) for kind in ("observed", "resolved")
            ]
            lines.append(f"| {name} | {life['requested']['batch_invariant']} | {told[0]} | {told[1]} | {life['cases']} "
                         f"| {life['seconds']:.1f} |")  # fmt: skip
    return "\n".join(lines) + "\n"


def keep(names: list[str], work: Path, out: Path) -> None:
    """Copies records, reports and log ends."""
    tails = []
    for name in names:
        for file in ("run.json", "report.html"):
            if (work / name / file).is_file():
                shutil.copyfile(work / name / file, out / f"{name}-{file}")
        for log in sorted((work / name / "logs").glob("*.log")):
            tails += [f"== {name} {log.name}", *log.read_text(errors="replace").splitlines()[-TAIL_LINES:]]
    (out / "logs.txt").write_text("\n".join(tails) + "\n")


if __name__ == "__main__":
    sys.exit(main())
