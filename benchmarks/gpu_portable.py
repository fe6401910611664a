"""The portable arithmetic on a GPU: bits against the CPU's, and time against eager torch float32.

Run as `python benchmarks/gpu_portable.py` on a machine with an NVIDIA GPU, NVRTC and a C++ compiler. It compares single
operators with this host's CPU kernels, whole-model logits with this host's CPU and with the digests in
gpu_digests.json (made on another machine by `--write-digests`, which needs no GPU), and only then prints times: medians
of replayed CUDA graphs. Exit code 1 if a single bit differs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from gpu_model import Sequences, engine_config, hashed_model, prompt, run_cases
from gpu_stages import marked_kernels, stage_cycles

from engines.bundled.arithmetic import open_arithmetic
from engines.bundled.arithmetic.order import KEY_CHUNK, portable_order
from engines.bundled.config import Model
from engines.bundled.gpu import operators, why_not
from engines.bundled.gpu.cases import Operators, hashed
from engines.bundled.gpu.cuda import CudaMachine
from engines.bundled.gpu.operators import Linear, Tuning
from engines.bundled.gpu.portable import GpuArithmetic
from engines.bundled.gpu.selfcheck import KERNELS, check_arithmetic, operator_pairs
from engines.bundled.gpu.start import open_machine
from engines.bundled.gpu.steps import lay_out
from engines.bundled.kernels.library import load
from engines.bundled.models.tiny import TinySource

DIGESTS = Path(__file__).with_name("gpu_digests.json")
NUM_PAGES = 2400
SECTIONS = frozenset({"operators", "models", "softmax", "steps", "linear", "kernels"})
DECODE_AB = "decode-ab"
THREADS = min(16, len(os.sched_getaffinity(0)))
Results = dict[str, object]
START = time.monotonic()


def say(*words: object) -> None:
    print(f"[{time.monotonic() - START:6.1f}]", *words, flush=True)


def models() -> dict[str, Model]:
    return {"tiny": TinySource().model(), "smollm2-shaped": hashed_model()}


def cpu_digests(wanted: dict[str, Model]) -> dict[str, str]:
    """Digest of every case by this host's CPU kernels."""
    found = {}
    for name, model in wanted.items():
        arithmetic = open_arithmetic(model, engine_config("portable", NUM_PAGES, THREADS))
        for case, digest, _ in run_cases(arithmetic, model.config, NUM_PAGES):
            found[f"{name}: {case}"] = digest
    return found


def open_gpu(model: Model, clusters: tuple[int, ...], arithmetic: str = "portable") -> GpuArithmetic:
    config = engine_config(arithmetic, NUM_PAGES, THREADS)
    machine, shape = open_machine(model, config, 0, clusters)
    return GpuArithmetic(model, config, machine, shape, load("auto", "auto"))


def check_operators(gpu: GpuArithmetic, results: Results) -> int:
    """Operators at the model's sizes and at larger ones; returns the number of differing elements."""
    kernels, cases, elements, wrong = load("auto", "auto"), 0, 0, 0
    pairs = list(operator_pairs(gpu.machine, gpu.shape, kernels))
    ops = Operators(gpu.machine, gpu.shape, kernels, THREADS)
    for k, n in ((576, 960), (576, 3072), (1536, 576), (1008, 520), (4096, 1024)):
        for kind in ("uniform", "wide", "subnormal"):
            weight = hashed((n, k), 50, kind)
            for m in (1, 2, 5, 16, 17, 100, 257):
                x = hashed((m, k), 60 + m, kind)
                pairs.append(ops.linear(f"linear {m}x{k}x{n} {kind}", x, weight, gpu.shape.width, add=m % 2 == 0))
    for lengths in ((1, 2, 15, 16, 17), (255, 256, 257), (700, 1, 513), (2001,)):
        qkv = hashed((sum(lengths), (gpu.shape.heads + 2 * gpu.shape.kv_heads) * gpu.shape.dim), 70, "uniform", 3.0)
        pairs.append(ops.attention(f"attention {lengths}", qkv, lengths, 1e5, KEY_CHUNK))
    for pair in pairs:
        cases, elements, wrong = cases + 1, elements + pair.cpu.size, wrong + pair.differing
        if pair.differing:
            say("DIFFERS", pair.name, pair.differing, "of", pair.cpu.size)
    results["operators"] = {"cases": cases, "elements": elements, "differing": wrong}
    say("operators:", cases, "cases,", elements, "elements,", wrong, "differing")
    return wrong


def check_model(
    name: str, gpu: GpuArithmetic, brought: dict[str, str], here: dict[str, str], results: Results, label: str
) -> int:
    """Whole-model logits in every case; returns the number of cases whose digest differs."""
    wrong, compared, before = 0, 0, (gpu.steps, gpu.fused_steps, gpu.graph_steps)
    for case, digest, count in run_cases(gpu, gpu.model, NUM_PAGES):
        key = f"{name}: {case}"
        good = (digest == brought.get(key), digest == here.get(key, digest))
        compared += count
        if not all(good):
            wrong += 1
            say("DIFFERS", label, key, "brought/here", good)
    steps = [now - old for now, old in zip((gpu.steps, gpu.fused_steps, gpu.graph_steps), before, strict=True)]
    results.setdefault("models", {})[f"{name} {label}"] = {  # type: ignore[attr-defined]
        "logits": compared, "cases differing": wrong, "steps": steps[0], "fused": steps[1], "graphs": steps[2],
    }  # fmt: skip
    say(f"{name} {label}:", compared, "logits,", wrong, "cases differing; steps, fused, graphs:", steps)
    return wrong


def step_time(gpu: GpuArithmetic, batch: int, tokens: int, start: int, is_fused: bool, repetitions: int) -> float:
    """Median microseconds of one step as a CUDA graph: `tokens` new tokens of each of `batch` sequences at `start`."""
    sequences = Sequences(batch, start + tokens, NUM_PAGES)
    sequences.length[:] = start
    which = list(range(batch))
    step_batch = sequences.step(which, [prompt(gpu.model, i, tokens) for i in which], everything=False)
    order = portable_order(gpu.model)
    step = lay_out(step_batch, gpu.shape, gpu.pitch, order.key_chunk)
    machine = gpu.machine
    assert isinstance(machine, CudaMachine)
    machine.upload(gpu.room(step, order).inputs, step.words)
    recording = machine.record(gpu.launches(step, order, is_fused))
    machine.measure(recording, 3)
    result = statistics.median(machine.measure(recording, repetitions))
    recording.close()
    return result


def time_steps(gpu: GpuArithmetic, others: dict[int, GpuArithmetic], model: Model, results: Results) -> None:
    """Decode and prefill, ours and eager torch's."""
    from gpu_eager import step_times

    rows: list[dict[str, object]] = []
    grid = (
        [(b, 1, c) for b in (1, 16) for c in (64, 512, 2048)]
        + [(b, 1, 64) for b in (2, 4, 8)]
        + [(1, n, 0) for n in (64, 512)]
    )
    for batch, tokens, start in grid:
        row: dict[str, object] = {"batch": batch, "tokens": tokens, "context": start}
        repetitions = 40 if tokens == 1 else 15
        row["separate"] = step_time(gpu, batch, tokens, start, False, repetitions)
        for cluster, other in others.items():
            fits = batch * (start // 256 + 1) <= cluster * 12
            if tokens == 1 and fits:
                row[f"fused {cluster}"] = step_time(other, batch, tokens, start, True, repetitions)
        row.update(step_times(model, batch, tokens, start, repetitions))
        rows.append({k: round(v, 1) if isinstance(v, float) else v for k, v in row.items()})
        say(rows[-1])
    results["steps us"] = rows


DECODES = ((1, 64), (1, 200), (1, 512), (1, 1900), (2, 64), (4, 64), (8, 64))  # rows, keys before the step
VARIANTS = {"launches": False, "resident": True}  # two launches a layer, one launch for all layers


def compare_decodes(gpu: GpuArithmetic, model: Model, brought: dict[str, str], results: Results) -> int:
    """The ways to run fused decode: bits of every case of the whole model, and times with the variants interleaved.

    Returns the number of cases whose logits differ from the digests computed on a CPU.
    """
    say("resident decode on this card:", gpu.has_resident)
    wrong, variants = int(not gpu.has_resident), [v for v in VARIANTS if gpu.has_resident or not VARIANTS[v]]
    table: dict[str, dict[str, float]] = {}
    results["decode variants us"] = table
    time_variants(gpu, variants, DECODES[:1], table)
    if gpu.has_resident:
        time_layers(gpu, model, results)
    for variant in variants:
        gpu.use_resident = VARIANTS[variant]
        check_arithmetic(gpu)
        say("self-check passed,", variant)
    for variant in variants:
        gpu.use_resident = VARIANTS[variant]
        wrong += compare_rows(gpu)
        wrong += check_model("smollm2-shaped", gpu, brought, brought, results, variant)
        gpu.use_graphs = False
        wrong += check_model("smollm2-shaped", gpu, brought, brought, results, f"{variant}, without graphs")
        gpu.use_graphs = True
    time_variants(gpu, variants, DECODES[1:], table)
    gpu.use_resident = False
    return wrong


def compare_rows(gpu: GpuArithmetic) -> int:
    """Decode steps of 1 to 8 rows after prefills of several lengths, fused against separate; cases that went wrong."""
    wrong, cases, before = 0, 0, gpu.fused_steps
    for rows in range(1, 9):
        for start in (3, 100, 127, 200, 255, 300):
            sequences, which = Sequences(rows, start + rows + 2, NUM_PAGES), list(range(rows))
            lengths = [start - i if start > 8 else start for i in which]
            gpu.forward(sequences.step(which, [prompt(gpu.model, i, lengths[i]) for i in which], everything=False))
            for _ in range(2):
                step = sequences.step(which, [prompt(gpu.model, 50 + i, 1) for i in which], everything=False)
                fused = gpu.forward(step)
                gpu.use_fused = False
                separate = gpu.forward(step)
                gpu.use_fused = True
                cases += 1
                wrong += not np.array_equal(fused.view(np.int32), separate.view(np.int32))
    fused_steps = gpu.fused_steps - before
    say("decode of 1 to 8 rows:", cases, "cases,", wrong, "differing; fused:", fused_steps)
    return wrong + abs(cases - fused_steps)  # a step that was not fused was compared with itself


def time_variants(
    gpu: GpuArithmetic, variants: list[str], cases: tuple[tuple[int, int], ...], table: dict[str, dict[str, float]]
) -> None:
    """Median microseconds of decode steps of `rows` at a context, five rounds of 40 replays each."""
    for rows, start in cases:
        times: dict[str, list[float]] = {variant: [] for variant in variants}
        for _ in range(5):
            for variant in variants:
                gpu.use_resident = VARIANTS[variant]
                times[variant].append(step_time(gpu, rows, 1, start, True, 40))
        table[f"{rows} at {start}"] = {variant: round(statistics.median(found), 1) for variant, found in times.items()}
        say(f"decode {rows} at {start}, us:", table[f"{rows} at {start}"])


def time_layers(gpu: GpuArithmetic, model: Model, results: Results) -> None:
    """Where a resident step of one row at 64 goes: by the number of layers, and what follows the layers alone."""
    machine, order, gpu.use_resident = gpu.machine, portable_order(gpu.model), True
    assert isinstance(machine, CudaMachine)
    sequences, layers = Sequences(1, 65, NUM_PAGES), model.config.num_hidden_layers
    sequences.length[:] = 64
    step = lay_out(sequences.step([0], [[7]], everything=False), gpu.shape, gpu.pitch, order.key_chunk)
    machine.upload(gpu.room(step, order).inputs, step.words)
    launches, found = gpu.launches(step, order, is_fused=True), {}
    parts = {
        f"{n} layers": [replace(launches[0], arguments={**launches[0].arguments, "count": n})]
        for n in sorted({2, layers})
    }
    for name, some in {**parts, "head": launches[1:]}.items():
        recording = machine.record(some)
        machine.measure(recording, 3)
        found[name] = round(statistics.median(machine.measure(recording, 40)), 1)
        recording.close()
    results["resident parts us"] = found
    say("resident step by parts, us:", found)
    with marked_kernels():
        marked = open_gpu(model, (gpu.shape.cluster,))
    marked.use_resident = True
    marked.machine.upload(marked.room(step, order).inputs, step.words)
    assert isinstance(marked.machine, CudaMachine)
    launch = marked.launches(step, order, is_fused=True)[0]
    cycles = stage_cycles(marked.machine, launch, marked.shape, layers)
    results["resident stages, cycles"] = cycles
    for kind, table in cycles.items():
        say("cycles a layer,", kind, table)


def sweep_linear(gpu: GpuArithmetic, results: Results) -> None:
    """Every kernel and split for the model's linear layers: microseconds, and torch's."""
    import torch
    from gpu_eager import time_graph

    machine, width, table = gpu.machine, gpu.shape.width, {}
    assert isinstance(machine, CudaMachine)
    for k, n in ((576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152)):
        packed = machine.allocate(operators.padded(n) * k)
        for m in (1, 8, 16, 64, 256, 512) if n < 49152 else (1, 16):
            x, out = machine.allocate(m * k), machine.allocate(m * n)
            op = Linear(x=x, weight=packed, out=out, rows=m, outputs=n, inputs=k, width=width)
            chunks, times = -(-k // width), {}
            for kernel in KERNELS:
                for share in (1, 2, 4, 8):
                    few = kernel.startswith("few")
                    if few and (m > 16 or 8 * share * chunks > operators.FEW_THREADS):
                        continue
                    if not few and (
                        m < 8 or not operators.takes(kernel, width, k) or (share >= 2 * chunks and share > 1)
                    ):
                        continue
                    launch = operators.linear(op, gpu.partial, True, Tuning(kernel=kernel, share=share))
                    recording = machine.record([launch] * 10)
                    machine.measure(recording, 1)
                    times[f"{kernel}/{share}"] = statistics.median(machine.measure(recording, 5)) / 10
                    recording.close()
            recording = machine.record([operators.linear(op, gpu.partial, True)] * 10)
            machine.measure(recording, 1)
            chosen = statistics.median(machine.measure(recording, 5)) / 10
            recording.close()
            a, b = torch.randn(m, k, device="cuda"), torch.randn(n, k, device="cuda")
            theirs = time_graph(lambda a=a, b=b: [torch.nn.functional.linear(a, b) for _ in range(10)], 5) / 10
            best = sorted(times, key=lambda name: times[name])[:3]
            table[f"{m}x{k}x{n}"] = {
                "chosen": chosen, "torch": theirs, **{name: times[name] for name in best}
            }  # fmt: skip
            say(f"linear {m}x{k}x{n}:", {name: round(t, 1) for name, t in table[f"{m}x{k}x{n}"].items()})
            machine.release(x)
            machine.release(out)
        machine.release(packed)
    results["linear us"] = table


def time_softmax(gpu: GpuArithmetic, results: Results) -> int:
    """Log-softmax of a step's logits on the device and by this host's kernels, wall-clock, transfers included.

    Returns the number of differing elements.
    """
    table, wrong = {}, 0
    for batch in (1, 8, 16):
        sequences, which = Sequences(batch, 8, NUM_PAGES), list(range(batch))
        logits = gpu.forward(sequences.step(which, [prompt(gpu.model, i, 4) for i in which], everything=False))
        found = {}
        for place, on_device in (("device", True), ("host", False)):
            gpu.use_device_softmax = on_device
            times = []
            for _ in range(30):
                begin = time.perf_counter()
                found[place] = gpu.log_softmax(logits)
                times.append(1e6 * (time.perf_counter() - begin))
            table[f"{batch} rows, {place}"] = round(statistics.median(times), 1)
        gpu.use_device_softmax = True
        wrong += int(np.count_nonzero(found["device"].view(np.int32) != found["host"].view(np.int32)))
    results["log-softmax us"] = table
    say("log-softmax us:", table, "elements differing:", wrong)
    return wrong


def profile_kernels(gpu: GpuArithmetic, results: Results) -> None:
    """Microseconds of each kernel of a prefill of 512 and of a decode of 16 at 2048, repeated alone."""
    machine = gpu.machine
    assert isinstance(machine, CudaMachine)
    for batch, tokens, start in ((1, 512, 0), (16, 1, 2048)):
        sequences = Sequences(batch, start + tokens, NUM_PAGES)
        sequences.length[:] = start
        which, order = list(range(batch)), portable_order(gpu.model)
        made = sequences.step(which, [prompt(gpu.model, i, tokens) for i in which], everything=False)
        step = lay_out(made, gpu.shape, gpu.pitch, order.key_chunk)
        machine.upload(gpu.room(step, order).inputs, step.words)
        launches = gpu.launches(step, order, is_fused=False)[1:]
        per_layer = (len(launches) - 2) // gpu.model.num_hidden_layers
        times = {}
        for i, launch in enumerate(launches[:per_layer]):
            recording = machine.record([launch] * 10)
            machine.measure(recording, 1)
            times[f"{i} {launch.kernel}"] = round(statistics.median(machine.measure(recording, 5)) / 10, 1)
            recording.close()
        results[f"kernels us {batch}x{tokens}@{start}"] = times
        say(f"kernels {batch}x{tokens}@{start}:", times)


def host_facts() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"]
    try:
        card = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        card = "unknown"
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    return {"card": card, "cpu": cpu, "python": platform.python_version(), "numpy": np.__version__}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write-digests", action="store_true", help="compute gpu_digests.json on this CPU and stop")
    parser.add_argument("--skip", nargs="*", default=[], choices=sorted(SECTIONS), help="sections to leave out")
    parser.add_argument(
        "--sections", nargs="+", choices=[*sorted(SECTIONS), DECODE_AB], help=f"only these; {DECODE_AB} goes alone"
    )
    parser.add_argument("--out", type=Path, help="where to write everything as JSON")
    options = parser.parse_args()
    if options.sections and DECODE_AB in options.sections and (len(options.sections) > 1 or options.skip):
        parser.error(f"--sections: {DECODE_AB} goes alone, got {' '.join(options.sections)} with --skip {options.skip}")
    wanted = models()
    if options.write_digests:
        DIGESTS.write_text(json.dumps(cpu_digests(wanted), indent=1) + "\n")
        return 0
    if reason := why_not():
        print(f"UNSUPPORTED: {reason}")
        return 3
    if options.sections == [DECODE_AB]:
        return measure_decodes(wanted["smollm2-shaped"], options.out)
    sections = frozenset(options.sections) if options.sections is not None else SECTIONS
    if not (sections := sections - frozenset(options.skip)):
        parser.error("--sections, --skip: nothing is left to measure")
    return measure(wanted, SECTIONS - sections, options.out)


def measure_decodes(model: Model, out: Path | None) -> int:
    """Only the ways to run fused decode."""
    results: Results = {"host": host_facts()}
    gpu = open_gpu(model, (8,))
    say("opened", gpu.describe())
    wrong = compare_decodes(gpu, model, json.loads(DIGESTS.read_text()), results)
    if out:
        out.write_text(json.dumps(results, indent=1, default=str))
    say("bits differ" if wrong else "not one bit differs")
    return int(wrong > 0)


def measure(wanted: dict[str, Model], skip: frozenset[str], out: Path | None) -> int:
    results: Results = {"host": host_facts()}
    say(results["host"])
    wrong = 0
    brought = json.loads(DIGESTS.read_text())
    model = wanted["smollm2-shaped"]
    gpus = {cluster: open_gpu(model, (cluster,)) for cluster in (16, 8)}
    gpus = {cluster: gpu for cluster, gpu in gpus.items() if gpu.shape.cluster}
    plain = next(iter(gpus.values())) if gpus else open_gpu(model, ())
    results["facts"] = plain.describe()
    say("opened", results["facts"], "clusters", list(gpus))
    for cluster, gpu in gpus.items():
        check_arithmetic(gpu)
        say("self-check passed, clusters of", cluster)
    if "operators" not in skip:
        wrong += check_operators(plain, results)
    if "models" not in skip:
        here = cpu_digests(wanted)
        say("this host's CPU computed its digests; equal to those brought along:", here == brought)
        wrong += here != brought
        for cluster, gpu in gpus.items():
            wrong += check_model("smollm2-shaped", gpu, brought, here, results, f"clusters of {cluster}")
        plain.use_fused = False
        wrong += check_model("smollm2-shaped", plain, brought, here, results, "separate operators")
        plain.use_graphs = False
        wrong += check_model("smollm2-shaped", plain, brought, here, results, "without graphs")
        tiny = open_gpu(wanted["tiny"], (8,))
        wrong += check_model("tiny", tiny, brought, here, results, "clusters of 8")
    if "softmax" not in skip:
        wrong += time_softmax(plain, results)
    for name, section in (
        ("steps", lambda: time_steps(plain, gpus, model, results)),
        ("kernels", lambda: profile_kernels(plain, results)),
        ("linear", lambda: sweep_linear(plain, results)),
    ):
        if name not in skip:
            section()
        if out:
            out.write_text(json.dumps(results, indent=1, default=str))
    say("bits differ" if wrong else "not one bit differs")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
