"""One arm of gpu_tensorcore.py in a process of its own: one arithmetic, one shape, the sections asked for, as JSON.

It prints progress and writes OUT after every section. A process of its own because cuBLAS reads the variables that
close split-K off when torch is imported: `tensorcore` runs with them, what it is compared with without.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from gpu_model import SMOLLM2
from gpu_workloads import PAGE, QWEN3_8B, ROWS, SEATS, STEP_TOKENS, census, mixed_prompts, random_prompt

from engines.bundled.config import EngineConfig, ModelConfig
from engines.bundled.gpu.tensorcore.forward import TensorCoreArithmetic
from engines.bundled.gpu.tensorcore.generate import Generator, Job
from engines.bundled.gpu.tensorcore.start import open_source
from engines.bundled.gpu.tensorcore.weights import checksum, random_normal

START = time.monotonic()
SHAPES = {"8b": QWEN3_8B, "smollm2": SMOLLM2}
Results = dict[str, object]


def say(*words: object) -> None:
    print(f"[{time.monotonic() - START:6.1f}]", *words, flush=True)


def open_arm(arithmetic: str, config: ModelConfig, pages: int) -> TensorCoreArithmetic:
    engine = EngineConfig(
        arithmetic=arithmetic, max_num_seqs=SEATS, max_num_batched_tokens=STEP_TOKENS, page_size=PAGE, num_pages=pages,
        threads=8, isa="auto", compiler="auto", tuning=0, dtype="bfloat16",
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
        best = min(times[1:])
        found[row.name] = {
            "s": best, "all s": times, "output tokens/s": row.requests * row.new / best,
            "all tokens/s": row.requests * (row.new + row.prompt) / best,
        }  # fmt: skip
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
        found[str(prompt)] = {
            "first token ms": 1e3 * statistics.median(first[2:]), "between tokens ms": 1e3 * statistics.median(between)
        }  # fmt: skip
        say("one sequence", prompt, found[str(prompt)])
    return found


def count_distinct(generator: Generator, config: ModelConfig, copies: int, new: int) -> Results:
    """Copies of one prompt among companions: how many completions there are, and where they part."""
    work = census(config, copies, new)
    jobs = [Job(prompt=prompt, tokens=tokens) for _, prompt, tokens in work]
    seconds = generator.generate(jobs)
    outs = [tuple(job.out) for (is_copy, _, _), job in zip(work, jobs, strict=True) if is_copy]
    alone = [Job(prompt=next(prompt for is_copy, prompt, _ in work if is_copy), tokens=new)]
    generator.generate(alone)
    parts = next((i for i in range(new) if len({out[i] for out in outs}) > 1), None)
    found = {
        "copies": len(outs), "new tokens": new, "distinct": len(set(outs)), "first divergence": parts,
        "equal to the prompt alone": Counter(outs)[tuple(alone[0].out)],
        "most common": [count for _, count in Counter(outs).most_common(5)],
        "distinct after 16, 64": [len({out[:n] for out in outs}) for n in (16, 64)],
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arithmetic", choices=("tensorcore", "free", "native"), required=True)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--sections", default="rows,single,census,alone,memory")
    parser.add_argument("--copies", type=int, default=1000)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    config = SHAPES[options.shape]
    arithmetic = open_arm(options.arithmetic, config, 14000)
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
    }
    for name in options.sections.split(","):
        results[name] = sections[name]()
        results["steps"] = {"prefill": generator.prefill_steps, "decode": generator.decode_steps}
        options.out.write_text(json.dumps(results, indent=1, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
