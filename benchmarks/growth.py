"""How the cost of a step grows with the batch and with the context, for `portable` and for `free`.

Run as `python benchmarks/growth.py --model smollm2 --rounds 5 --out FILE`. Both arms hold the same weights and share
one pool of keys and values; a cell is the median over rounds of one step, arms interleaved, with what `free` takes as a
multiple beside it. A decode step runs one token of every sequence after `context` cached ones, each sequence with pages
of its own; cells whose keys and values would not fit the pool are left out and say so.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path[0] = str(Path(__file__).resolve().parents[1])  # `benchmarks` is a package of the root

import numpy as np  # noqa: E402

from benchmarks import measured  # noqa: E402
from engines.bundled.arithmetic.portable import KernelArithmetic  # noqa: E402
from engines.bundled.arithmetic.weights import matrices, pack_weights, storage  # noqa: E402
from engines.bundled.batch import StepBatch  # noqa: E402
from engines.bundled.config import EngineConfig, Model  # noqa: E402
from engines.bundled.kernels.library import load  # noqa: E402
from engines.bundled.models.catalogue import open_source  # noqa: E402

PAGE = 16
POOL = 32_768  # tokens of keys and values in all
BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (64, 256, 1024, 4096)
ARMS = ("portable", "free")


def open_arms(model: Model, threads: int) -> tuple[dict[str, KernelArithmetic], str]:
    """Both arithmetics over the same packed weights and pages, filled with noise; and how the weights are stored."""
    kernels = load("auto", "auto")
    weights = pack_weights(model, kernels, threads)
    arms = {}
    for name in ARMS:
        config = EngineConfig(
            arithmetic=name, max_num_seqs=max(BATCHES), max_num_batched_tokens=max(CONTEXTS), page_size=PAGE,
            num_pages=POOL // PAGE, threads=threads, isa="auto", compiler="auto", tuning=0,
        )  # fmt: skip
        arms[name] = KernelArithmetic(model, config, kernels, weights)
    arms["free"].pages = arms["portable"].pages
    noise = np.random.default_rng(0)
    for layer in arms["portable"].pages:
        for cache in (layer.keys, layer.values):
            block = noise.standard_normal(cache[:64].shape, np.float32)
            for begin in range(0, len(cache), 64):
                cache[begin : begin + 64] = block[: len(cache) - begin]
    return arms, storage(list(matrices(weights)))


def make_batch(rows: int, count: int, context: int, vocabulary: int) -> StepBatch:
    """`count` new tokens of each of `rows` sequences after `context` cached ones; the last ones' logits are wanted."""
    pages = -(-(context + count) // PAGE)
    return StepBatch(
        token=(np.arange(rows * count, dtype=np.int32) * 7919 + 5) % np.int32(vocabulary),
        sequence=np.repeat(np.arange(rows, dtype=np.int32), count),
        position=np.tile(np.arange(context, context + count, dtype=np.int32), rows),
        page_table=np.arange(rows * pages, dtype=np.int32).reshape(rows, pages),
        wanted=np.arange(count - 1, rows * count, count, dtype=np.int32),
    )


def measure(arms: dict[str, KernelArithmetic], batch: StepBatch, rounds: int) -> dict[str, list[float]]:
    """Seconds of each arm in each round; a first round warms up and is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name in ARMS if number % 2 else ARMS[::-1]:
            begun = time.perf_counter()
            arms[name].forward(batch)
            if number:
                seconds[name].append(time.perf_counter() - begun)
    return seconds


def cell(seconds: dict[str, list[float]]) -> str:
    """`milliseconds (free as a multiple)`."""
    middle = measured.quarters(seconds["portable"])[1]
    multiple = measured.quarters([a / b for a, b in zip(seconds["free"], seconds["portable"], strict=True)])[1]
    return f"{middle * 1e3:.2f} ({multiple:.2f})"


def fits(rows: int, tokens: int, longest: int) -> bool:
    """Whether `rows` sequences of so many tokens fit the pool and the model's context."""
    return rows * -(-tokens // PAGE) * PAGE <= POOL and tokens <= longest


def decode_table(
    arms: dict[str, KernelArithmetic], model: Model, rounds: int, batches: Sequence[int], contexts: Sequence[int]
) -> tuple[str, list[dict[str, object]]]:
    """One row per context, one column per batch."""
    rows, kept = [], []
    for context in contexts:
        line = [f"context {context}"]
        for batch in batches:
            if not fits(batch, context + 1, model.config.max_position_embeddings):
                line.append("does not fit")
                continue
            step = make_batch(batch, 1, context, model.config.vocab_size)
            seconds = measure(arms, step, rounds)
            line.append(cell(seconds))
            kept.append({"step": "decode", "batch": batch, "context": context, "seconds": seconds})
        rows.append(line)
        print(f"decode at context {context}: done", flush=True)
    return measured.table(["decode, ms a step", *(f"batch {batch}" for batch in batches)], rows), kept


def prefill_table(
    arms: dict[str, KernelArithmetic], model: Model, rounds: int, lengths: Sequence[int]
) -> tuple[str, list[dict[str, object]]]:
    """One row, one column per prompt length, all of it in one step."""
    line, kept = ["one prompt"], []
    for length in lengths:
        if not fits(1, length, model.config.max_position_embeddings):
            line.append("does not fit")
            continue
        seconds = measure(arms, make_batch(1, length, 0, model.config.vocab_size), rounds)
        line.append(cell(seconds))
        kept.append({"step": "prefill", "batch": 1, "context": length, "seconds": seconds})
        print(f"prefill of {length}: done", flush=True)
    return measured.table(["prefill, ms", *(f"{length} tokens" for length in lengths)], [line]), kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)), help="and lengths of prompts")
    parser.add_argument("--out", type=Path, help="writes OUT.json and OUT.md")
    chosen = parser.parse_args()
    batches, contexts = ([int(part) for part in text.split(",")] for text in (chosen.batches, chosen.contexts))
    facts = {**measured.machine(), **measured.versions()}
    model = open_source(chosen.model).model()
    arms, stored = open_arms(model, chosen.threads)
    decode, first = decode_table(arms, model, chosen.rounds, batches, contexts)
    prefill, second = prefill_table(arms, model, max(1, chosen.rounds // 2), contexts)
    heading = (
        f"{measured.describe(facts)}; model {chosen.model}, {chosen.threads} threads, weights: {stored}; medians of "
        f"{chosen.rounds} rounds; `portable` in milliseconds, in brackets `free` as a multiple of it."
    )
    page = "\n\n".join([heading, decode, prefill])
    print("\n" + page)
    record = {"machine": facts, "model": chosen.model, "threads": chosen.threads, "rounds": chosen.rounds}
    measured.keep(chosen.out, {**record, "cells": [*first, *second]}, page)


if __name__ == "__main__":
    main()
