"""`tensorcore` on a GPU: products against torch's, generation against `native` and vLLM, and one form of bits.

    python benchmarks/gpu_tensorcore.py --seconds 570 --out OUT
    python benchmarks/gpu_tensorcore.py --arms tensorcore "vllm ordinary" "vllm invariant" --out OUT

For a machine with an NVIDIA GPU, torch for CUDA and Triton; the vLLM arms need vLLM as well. Arms run one after another
on the first GPU that CUDA_VISIBLE_DEVICES shows, each in a process of its own with a deadline; one that fails is
reported and the rest goes on. The models are shapes with random weights made on the device from a seed. Exit code: 1 if
an arm failed or `tensorcore` gave other bits where the same must come; else 2 if an arm was left out, because vLLM is
not there or `--seconds` were over; else 0. Missed targets are listed and change no exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gpu_table
from gpu_bits import wrong_bits

from engines.bundled_adapter import SPLIT_K_OFF
from harness.packages import is_installed

HERE = Path(__file__).parent
Json = dict[str, dict[str, dict[str, float]]]


class Arm(NamedTuple):
    """A process: script and options, with split-K closed off or not, and its seconds: about, and at most."""

    name: str
    command: tuple[str, ...]
    split_k_off: bool
    expected: int
    most: int


VLLM = "gpu_vllm_arm.py"
ARMS = (  # the most telling first: what a budget cuts off is the end
    Arm("tensorcore", ("gpu_arm.py", "--arithmetic", "tensorcore"), True, 90, 200),
    Arm("vllm ordinary", (VLLM, "--mode", "ordinary"), False, 125, 220),
    Arm("vllm invariant", (VLLM, "--mode", "invariant"), False, 165, 260),
    Arm("tensorcore tree", ("gpu_arm.py", "--arithmetic", "tensorcore", "--k-order", "tree", "--sections",
                            "rows,single,ranks,reports"), True, 60, 200),
    Arm("native", ("gpu_arm.py", "--arithmetic", "native", "--sections", "rows,single,census,alone"), False, 170, 230),
    Arm("products", ("gpu_matmul.py", "--ways", "tensorcore"), True, 60, 120),
    Arm("products cublas", ("gpu_matmul.py", "--ways", "cublas"), False, 40, 90),
    Arm("smollm2 tensorcore", ("gpu_arm.py", "--arithmetic", "tensorcore", "--shape", "smollm2",
                               "--sections", "steps,rows,single,census,memory"), True, 50, 100),
    Arm("smollm2 native", ("gpu_arm.py", "--arithmetic", "native", "--shape", "smollm2",
                           "--sections", "rows,single,census"), False, 40, 100),
    Arm("smollm2 vllm ordinary", (VLLM, "--mode", "ordinary", "--shape", "smollm2"), False, 90, 150),
    Arm("smollm2 vllm invariant", (VLLM, "--mode", "invariant", "--shape", "smollm2"), False, 100, 170),
    Arm("free", ("gpu_arm.py", "--arithmetic", "free", "--copies", "200", "--sections", "census"), False, 40, 120),
)  # fmt: skip


def run_arm(arm: Arm, folder: Path, extra: tuple[str, ...], seconds: float) -> dict[str, object]:
    """What the arm wrote; {"failed": why} beside it if it failed. Whatever it started ends with it."""
    out = folder / f"{arm.name.replace(' ', '-')}.json"
    out.unlink(missing_ok=True)
    environment = {**os.environ, **(SPLIT_K_OFF if arm.split_k_off else {}), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, str(HERE / arm.command[0]), *arm.command[1:], *extra, "--out", str(out)]
    print(f"== {arm.name}: {' '.join(command[1:])}", flush=True)
    begin = time.monotonic()
    process = subprocess.Popen(command, env=environment, process_group=0)
    try:
        code = process.wait(seconds)
        failed = "" if code == 0 else f"exit code {code}"
    except subprocess.TimeoutExpired:
        failed = f"stopped at its deadline of {seconds:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    found = json.loads(out.read_text()) if out.exists() else {}
    print(f"== {arm.name}: {time.monotonic() - begin:.0f} s {failed}", flush=True)
    return {**found, **({"failed": failed} if failed else {})}


def left_out(arm: Arm, seconds: float) -> str:
    """Why the arm cannot run in what is left of the budget, or at all; nothing if it can."""
    if arm.command[0] == VLLM and not is_installed("vllm"):
        return "vLLM is not installed here"
    return f"{seconds:.0f} s are left, it takes about {arm.expected}" if seconds < arm.expected else ""


def print_products(ours: Json, theirs: Json) -> None:
    """Ratios of time to cuBLAS's, and their geometric means."""
    ways = ("cublaslt", "tiles", "one tile")
    logs: dict[str, list[float]] = {way: [] for way in ways}
    print("rows x outputs x inputs | cuBLAS us | " + " | ".join(f"{way} ratio" for way in ways))
    for key, row in ours.get("products us", {}).items():
        base = theirs.get("products us", {}).get(key, {}).get("cublas")
        if base is None:
            continue
        for way in ways:
            logs[way].append(math.log(row[way] / base))
        print(f"{key} | {base:.1f} | " + " | ".join(f"{row[way] / base:.2f}" for way in ways))
    for way, values in logs.items():
        if values:
            print(f"geometric mean {way}: {math.exp(sum(values) / len(values)):.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="*", choices=[arm.name for arm in ARMS], help="names of arms; all by default")
    parser.add_argument("--seconds", type=float, default=math.inf, help="for everything; later arms are left out")
    parser.add_argument("--sweep", action="store_true", help="time every tile of the matrix product, too")
    parser.add_argument("--out", type=Path, help="folder for the arms' JSON")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the arm under way ends with this process
    end = time.monotonic() + options.seconds
    folder = options.out or Path(tempfile.mkdtemp(prefix="gpu-tensorcore-"))
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, object]] = {}
    absent: dict[str, str] = {}
    for arm in ARMS:
        if options.arms is not None and arm.name not in options.arms:
            continue
        remaining = end - time.monotonic()
        reason = left_out(arm, remaining)
        if reason:
            absent[arm.name] = reason
            print(f"== {arm.name}: left out: {reason}", flush=True)
            continue
        extra = ("--sweep",) if options.sweep and arm.name.startswith("products") else ()
        results[arm.name] = run_arm(arm, folder, extra, min(arm.most, remaining))
        (folder / "all.json").write_text(json.dumps({**results, "left out": absent}, indent=1))
        (folder / "table.md").write_text(gpu_table.markdown(results) + "\n")
    (folder / "all.json").write_text(json.dumps({**results, "left out": absent}, indent=1))
    print_products(results.get("products", {}), results.get("products cublas", {}))  # type: ignore[arg-type]
    print(gpu_table.markdown(results), "", *gpu_table.missed(results), "", sep="\n")
    return conclude(results, absent)


def conclude(results: dict[str, dict[str, object]], absent: dict[str, str]) -> int:
    """Says what failed and what did not run; the exit code."""
    bad = [f"{name}: {found['failed']}" for name, found in results.items() if "failed" in found]
    for name, found in results.items():
        if "tensorcore" in name:
            bad += [f"{name}: {wrong}" for wrong in wrong_bits(found)]
    lines = [*bad, *(f"{name}: left out: {reason}" for name, reason in absent.items())]
    print("\n".join(lines) or "every arm ran; tensorcore gave one form of bits where it was compared")
    return 1 if bad else 2 if absent else 0


if __name__ == "__main__":
    sys.exit(main())
