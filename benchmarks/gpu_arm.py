"""One arm of gpu_tensorcore.py in a process of its own: one arithmetic, one shape, the sections asked for, as JSON.

It prints progress and writes OUT after every section. A process of its own because cuBLAS reads the variables that
close split-K off when torch is imported: `tensorcore` runs with them, what it is compared with without. Exit code: 1 if
`tensorcore` gave other bits where the same must come (gpu_bits.py), else 0; `free` and `native` may.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from gpu_bits import ROUND, wrong_bits
from gpu_model import SMOLLM2
from gpu_workloads import (
    PAGE,
    QWEN3_8B,
    ROWS,
    SEATS,
    STEP_TOKENS,
    census,
    census_figures,
    mixed_prompts,
    random_prompt,
    row_figures,
    single_figures,
)

from engines.bundled.batch import StepBatch
from engines.bundled.config import EngineConfig, ModelConfig
from engines.bundled.gpu.tensorcore.forward import TensorCoreArithmetic
from engines.bundled.gpu.tensorcore.generate import Generator, Job
from engines.bundled.gpu.tensorcore.parallel import EmulatedRanks, join_sums, rounded
from engines.bundled.gpu.tensorcore.softmax import summarise
from engines.bundled.gpu.tensorcore.start import open_source
from engines.bundled.gpu.tensorcore.weights import K_ORDERS, checksum, random_normal

START = time.monotonic()
SHAPES = {"8b": QWEN3_8B, "smollm2": SMOLLM2}
SECTIONS = ("rows", "single", "census", "alone", "steps", "memory", "ranks", "reports")
Results = dict[str, object]


def say(*words: object) -> None:
    print(f"[{time.monotonic() - START:6.1f}]", *words, flush=True)


def open_arm(arithmetic: str, config: ModelConfig, pages: int, k_order: str) -> TensorCoreArithmetic:
    engine = EngineConfig(
        arithmetic=arithmetic, max_num_seqs=SEATS, max_num_batched_tokens=STEP_TOKENS, page_size=PAGE, num_pages=pages,
        threads=8, isa="auto", compiler="auto", tuning=0, dtype="bfloat16", k_order=k_order,
    )  # fmt: skip
    return open_source(config, engine, random_normal(0, "cuda:0"), "cuda:0")


def jobs_of(config: ModelConfig, draw: random.Random, count: int, prompt: int, new: int) -> list[Job]:
    return [Job(prompt=random_prompt(draw, config, prompt), tokens=new) for _ in range(count)]


def measure_rows(generator: Generator, config: ModelConfig) -> Results:
    """Seconds and output tokens per second of each workload, best of its repeats, as the vLLM rows were taken."""
    draw, found = random.Random(1), {}
    for row in ROWS:
        times = []
        for _ in range(row.repeats + 1):
            torch.cuda.synchronize()
            times.append(generator.generate(jobs_of(config, draw, row.requests, row.prompt, row.new)))
        found[row.name] = row_figures(row, times)
        say(row.name, found[row.name])
    return found


def measure_single(generator: Generator, config: ModelConfig) -> Results:
    """One sequence: milliseconds to its first token and from token to token."""
    draw, found = random.Random(1), {}
    for prompt in (128, 1024):
        first = [generator.generate(jobs_of(config, draw, 1, prompt, 1)) for _ in range(12)]
        between = []
        for _ in range(4):
            whole = generator.generate(jobs_of(config, draw, 1, prompt, 129))
            between.append((whole - statistics.median(first)) / 128)
        found[str(prompt)] = single_figures(first, between)
        say("one sequence", prompt, found[str(prompt)])
    return found


def count_distinct(generator: Generator, config: ModelConfig, copies: int, new: int) -> Results:
    """Copies of one prompt among companions: how many completions there are, and where they part."""
    work = census(config, copies, new)
    jobs = [Job(prompt=prompt, tokens=tokens) for _, prompt, tokens in work]
    seconds = generator.generate(jobs)
    outs = [job.out for (is_copy, _, _), job in zip(work, jobs, strict=True) if is_copy]
    alone = [Job(prompt=next(prompt for is_copy, prompt, _ in work if is_copy), tokens=new)]
    generator.generate(alone)
    found: Results = {
        **census_figures(outs, alone[0].out, new),
        "output tokens/s": sum(len(job.out) for job in jobs) / seconds, "s": seconds,
    }  # fmt: skip
    say("census", found)
    return found


def compare_alone(generator: Generator, config: ModelConfig, count: int, new: int) -> Results:
    """The same requests together, together again in another order, and one by one: how many get other tokens."""
    prompts = mixed_prompts(config, count)

    def run(order: list[int]) -> list[list[int]]:
        jobs = [Job(prompt=prompts[i], tokens=new) for i in order]
        generator.generate(jobs)
        return [job.out for _, job in sorted(zip(order, jobs, strict=True), key=lambda pair: pair[0])]

    together = run(list(range(count)))
    shuffled = run(random.Random(5).sample(range(count), count))
    alone = []
    for prompt in prompts:
        job = Job(prompt=prompt, tokens=new)
        generator.generate([job])
        alone.append(job.out)
    found = {
        "requests": count, "new tokens": new,
        "differ shuffled": sum(a != b for a, b in zip(together, shuffled, strict=True)),
        "differ alone": sum(a != b for a, b in zip(together, alone, strict=True)),
    }  # fmt: skip
    say("alone and together", found)
    return found


def check_memory(generator: Generator, config: ModelConfig) -> Results:
    """Bytes and pages before and after a thousand requests."""
    draw = random.Random(6)
    make = lambda count: [  # noqa: E731
        Job(prompt=random_prompt(draw, config, draw.randint(1, 200)), tokens=draw.randint(1, 40)) for _ in range(count)
    ]

    def state() -> tuple[int, int, int]:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), len(generator.free)

    first = make(1000)
    generator.generate(first)  # records the graphs that the same requests need again
    before = state()
    again = [Job(prompt=job.prompt, tokens=job.tokens) for job in first]
    generator.generate(again)
    same = all(a.out == b.out for a, b in zip(first, again, strict=True))
    found = {
        "before": before,
        "after": state(),
        "same tokens": same,
        "what": "bytes allocated, bytes reserved, free pages",
    }
    say("memory", found)
    return found


def time_steps(arithmetic: TensorCoreArithmetic) -> Results:
    """Microseconds of one decode step as it is replayed: (sequences, context)."""
    graphs, found = arithmetic.graphs, {}
    assert graphs is not None
    with torch.inference_mode():
        graphs.pages.copy_(torch.arange(graphs.pages.numel(), device=graphs.pages.device).view_as(graphs.pages) % 14000)
        for sequences, context in ((1, 64), (1, 512), (1, 2048), (16, 64), (16, 512), (16, 2048), (256, 512)):
            graph, _ = graphs.graph(sequences, context + 64)
            graphs.position.fill_(-1)
            graphs.position[:sequences] = context
            times = []
            for _ in range(31):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                times.append(1e3 * begin.elapsed_time(end))
            found[f"decode {sequences} at {context}"] = statistics.median(times)
    say("steps us", found)
    return found


def compare_ranks(arithmetic: TensorCoreArithmetic) -> Results:
    """Logits of emulated ranks, each with its own part of weights and pages, that are not those of one process.

    Three prompts in one step, then three steps of decoding. Ranks that round their sums before they are added, as an
    all-reduce in bfloat16 does, have to differ. For --k-order tree.
    """
    steps = rank_steps(arithmetic)
    expected = [arithmetic.logits(step).clone() for step in steps]
    found: Results = {"logits": sum(map(torch.Tensor.numel, expected))}
    for name, ranks, exchange in (
        *((f"{ranks} ranks", ranks, join_sums) for ranks in (1, 2, 4, 8)),
        (f"2 ranks {ROUND}", 2, rounded(join_sums)),
    ):
        emulated = EmulatedRanks(arithmetic, ranks, 64, exchange)
        same = [
            emulated.logits(step).view(torch.int16) == one.view(torch.int16)
            for step, one in zip(steps, expected, strict=True)
        ]
        found[f"{name}, differing"] = sum(int((~one).sum()) for one in same)
        found[f"{name}, bytes of each"] = [shard.bytes for shard in emulated.shards]
        del emulated
    say("ranks", {name: value for name, value in found.items() if "bytes" not in name})
    return found


def rank_steps(arithmetic: TensorCoreArithmetic) -> list[StepBatch]:
    """Prompts of 300, 40 and 1 tokens on shuffled pages, then one token each, three times."""
    draw, lengths = random.Random(9), (300, 40, 1)
    pages = np.array(draw.sample(range(64), 3 * 20), np.int32).reshape(3, 20)
    prompts = [random_prompt(draw, arithmetic.model, length) for length in lengths]
    index = np.arange(3, dtype=np.int32)
    whole = StepBatch(
        token=np.concatenate([np.asarray(prompt, np.int32) for prompt in prompts]),
        sequence=np.repeat(index, lengths),
        position=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        page_table=pages,
        wanted=(np.cumsum(lengths) - 1).astype(np.int32),
    )
    return [whole] + [
        StepBatch(
            token=np.asarray(random_prompt(draw, arithmetic.model, 3), np.int32), sequence=index,
            position=np.asarray(lengths, np.int32) + more, page_table=pages, wanted=index,
        )
        for more in range(3)
    ]  # fmt: skip


def time_reports(arithmetic: TensorCoreArithmetic, config: ModelConfig) -> Results:
    """Milliseconds from logits on the device to what is reported of them, and by the host's kernels; and their bits."""
    found: Results = {}
    for rows in (1, 32, 256):
        generator = torch.Generator("cuda").manual_seed(rows)
        logits = torch.randn((rows, config.vocab_size), generator=generator, device="cuda").mul(3).to(torch.bfloat16)
        asked = np.zeros(rows, np.int32)
        for k in (1, 20):
            times = []
            for _ in range(12):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                summary = summarise(logits, k, asked, softmax=True)
                times.append(1e3 * (time.perf_counter() - begin))
            found[f"{rows} rows, {k} largest, ms"] = statistics.median(times[2:])
        begin = time.perf_counter()
        x = logits.float().cpu().numpy()
        logprobs, ids = arithmetic.log_softmax(x), arithmetic.kernels.top_k(x, 20)
        found[f"{rows} rows by the host, ms"] = 1e3 * (time.perf_counter() - begin)
        mine = np.stack([summary.logprobs(row, summary.values[row]) for row in range(rows)])
        theirs = np.take_along_axis(logprobs, ids, 1)
        differing = (summary.ids != ids) | (mine.view(np.int32) != theirs.view(np.int32))
        found[f"{rows} rows, differing"] = int(differing.sum())
    say("reports", found)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arithmetic", choices=("tensorcore", "free", "native"), required=True)
    parser.add_argument("--k-order", choices=K_ORDERS, default="chain")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--sections", default="rows,single,census,alone,memory")
    parser.add_argument("--copies", type=int, default=1000)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    chosen = options.sections.split(",")
    if unknown := sorted(set(chosen) - set(SECTIONS)):
        parser.error(f"--sections: there is no {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    config = SHAPES[options.shape]
    arithmetic = open_arm(options.arithmetic, config, 14000, options.k_order)
    results: Results = {
        "facts": arithmetic.describe(),
        "weights": checksum(arithmetic.weights),
        "start s": time.monotonic() - START,
    }
    say("opened", results)
    generator = Generator(arithmetic)
    generator.generate(jobs_of(config, random.Random(0), 4, 20, 8))
    say("warm")
    sections: dict[str, Callable[[], Results]] = {
        "rows": lambda: measure_rows(generator, config),
        "single": lambda: measure_single(generator, config),
        "census": lambda: count_distinct(generator, config, options.copies, 128),
        "alone": lambda: compare_alone(generator, config, 64, 48),
        "steps": lambda: time_steps(arithmetic),
        "memory": lambda: check_memory(generator, config),
        "ranks": lambda: compare_ranks(arithmetic),
        "reports": lambda: time_reports(arithmetic, config),
    }
    for name in chosen:
        results[name] = sections[name]()
        results["steps run"] = {"prefill": generator.prefill_steps, "decode": generator.decode_steps}
        options.out.write_text(json.dumps(results, indent=1, default=str))
    if options.arithmetic != "tensorcore":
        return 0
    wrong = wrong_bits(results)
    say("bits:", "; ".join(wrong) or "as they have to be where they were compared")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
