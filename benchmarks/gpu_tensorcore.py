"""`tensorcore` on a GPU: products and attention against torch's, generation against `native`, and one form of bits.

Run as `python benchmarks/gpu_tensorcore.py` on a machine with an NVIDIA GPU, torch for CUDA and Triton. Each arm runs
in a process of its own with a deadline (gpu_matmul.py, gpu_arm.py); an arm that fails is reported and the rest goes
on. The 8B-shaped model has random weights made on the device from a seed. Exit code 1 if an arm failed, or if
`tensorcore` gave a prompt more than one completion.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engines.bundled_adapter import SPLIT_K_OFF

HERE = Path(__file__).parent
Json = dict[str, dict[str, dict[str, float]]]


class Arm(NamedTuple):
    """A process: script and options, with split-K closed off or not, and its deadline in seconds."""

    name: str
    command: tuple[str, ...]
    split_k_off: bool
    seconds: int


ARMS = (
    Arm("products", ("gpu_matmul.py", "--ways", "tensorcore"), True, 120),
    Arm("products cublas", ("gpu_matmul.py", "--ways", "cublas"), False, 90),
    Arm("tensorcore", ("gpu_arm.py", "--arithmetic", "tensorcore"), True, 200),
    Arm("native", ("gpu_arm.py", "--arithmetic", "native", "--sections", "rows,single,census,alone"), False, 200),
    Arm("free", ("gpu_arm.py", "--arithmetic", "free", "--copies", "200", "--sections", "census"), False, 120),
    Arm("smollm2 tensorcore", ("gpu_arm.py", "--arithmetic", "tensorcore", "--shape", "smollm2",
                               "--sections", "steps,rows,single,census,memory"), True, 100),
    Arm("smollm2 native", ("gpu_arm.py", "--arithmetic", "native", "--shape", "smollm2",
                           "--sections", "rows,single,census"), False, 100),
)  # fmt: skip


def run_arm(arm: Arm, folder: Path, extra: tuple[str, ...]) -> dict[str, object]:
    """What the arm wrote; {"failed": why} beside it if it failed."""
    out = folder / f"{arm.name.replace(' ', '-')}.json"
    environment = {**os.environ, **(SPLIT_K_OFF if arm.split_k_off else {}), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, str(HERE / arm.command[0]), *arm.command[1:], *extra, "--out", str(out)]
    print(f"== {arm.name}: {' '.join(command[1:])}", flush=True)
    begin = time.monotonic()
    try:
        code = subprocess.run(command, env=environment, timeout=arm.seconds, check=False).returncode
        failed = "" if code == 0 else f"exit code {code}"
    except subprocess.TimeoutExpired:
        failed = f"stopped at its deadline of {arm.seconds} s"
    found = json.loads(out.read_text()) if out.exists() else {}
    print(f"== {arm.name}: {time.monotonic() - begin:.0f} s {failed}", flush=True)
    return {**found, **({"failed": failed} if failed else {})}


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arms", nargs="*", help="names of arms; all by default")
    parser.add_argument("--sweep", action="store_true", help="time every tile of the matrix product, too")
    parser.add_argument("--out", type=Path, help="folder for the arms' JSON")
    options = parser.parse_args()
    folder = options.out or Path(tempfile.mkdtemp(prefix="gpu-tensorcore-"))
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, object]] = {}
    for arm in ARMS:
        if options.arms is None or arm.name in options.arms:
            extra = ("--sweep",) if options.sweep and arm.name.startswith("products") else ()
            results[arm.name] = run_arm(arm, folder, extra)
    (folder / "all.json").write_text(json.dumps(results, indent=1))
    print_products(results.get("products", {}), results.get("products cublas", {}))  # type: ignore[arg-type]
    bad = [f"{name}: {found['failed']}" for name, found in results.items() if "failed" in found]
    for name, found in results.items():
        census = found.get("census")
        if "tensorcore" in name and isinstance(census, dict) and census["distinct"] != 1:
            bad.append(f"{name}: {census['distinct']} distinct completions of one prompt")
    print("\n".join(bad) or "every arm ran; tensorcore gave one completion")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
