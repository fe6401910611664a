"""Emulated machines and steps for the tests of the GPU arithmetics."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engines.bundled.batch import StepBatch
from engines.bundled.config import EngineConfig, Model
from engines.bundled.gpu.emulated import EmulatedMachine
from engines.bundled.gpu.portable import GpuArithmetic, shape_of
from engines.bundled.kernels.library import load
from engines.bundled.models.tensors import tensor_shapes
from engines.bundled.models.tiny import TinySource

PAGE = 16


def tiny() -> Model:
    return TinySource().model()


def family(**changes) -> Model:
    """The tiny model with other parts: tensors that it lacks are drawn, those it does not need left out."""
    model = tiny()
    shape = replace(model.config, **changes)
    random = np.random.default_rng(5)
    drawn = {name: random.uniform(0.5, 1.5, size).astype(np.float32) for name, size in tensor_shapes(shape).items()}
    weights = {name: model.weights.get(name, tensor) for name, tensor in drawn.items()}
    return replace(model, config=shape, weights=weights)


def config(arithmetic: str = "portable", num_pages: int = 64) -> EngineConfig:
    return EngineConfig(
        arithmetic=arithmetic, max_num_seqs=8, max_num_batched_tokens=64, page_size=PAGE, num_pages=num_pages,
        threads=1, isa="auto", compiler="auto", tuning=0,
    )  # fmt: skip


def emulated(
    model: Model, arithmetic: str = "portable", *, cluster: int = 8, reversed_order: bool = False, memory: int = 1 << 32
) -> GpuArithmetic:
    """The GPU arithmetic over emulated kernels."""
    settings = config(arithmetic)
    shape = shape_of(model.config, settings.page_size, cluster)
    machine = EmulatedMachine(shape, reversed_order=reversed_order, memory=memory)
    return GpuArithmetic(model, settings, machine, shape, load("auto", "auto"))


def batch(
    token: list[int], sequence: list[int], position: list[int], wanted: list[int], pages: list[list[int]]
) -> StepBatch:
    """A step from plain lists."""
    return StepBatch(
        token=np.array(token, np.int32),
        sequence=np.array(sequence, np.int32),
        position=np.array(position, np.int32),
        page_table=np.array(pages, np.int32),
        wanted=np.array(wanted, np.int32),
    )


def step(pieces: list[tuple[list[int], int, list[int]]]) -> StepBatch:
    """Pieces of (tokens, first position, pages); the last token's logits of each."""
    counts = [len(tokens) for tokens, _, _ in pieces]
    width = max(len(pages) for _, _, pages in pieces)
    return StepBatch(
        token=np.array([t for tokens, _, _ in pieces for t in tokens], np.int32),
        sequence=np.repeat(np.arange(len(pieces), dtype=np.int32), counts),
        position=np.array([p for tokens, at, _ in pieces for p in range(at, at + len(tokens))], np.int32),
        page_table=np.array([pages + [-1] * (width - len(pages)) for _, _, pages in pieces], np.int32),
        wanted=(np.cumsum(counts) - 1).astype(np.int32),
    )


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 512, count).tolist()


def script() -> list[StepBatch]:
    """Steps over two sequences on shuffled pages: prefill, chunks, decode alone and together, past one key chunk."""
    order = np.random.default_rng(3).permutation(48)
    pages = [order[:24].tolist(), order[24:].tolist()]
    steps = [
        batch(tokens(1, 20), [0] * 20, list(range(20)), [19], pages),
        batch([5], [0], [20], [0], pages),
        batch(tokens(2, 7), [1] * 7, list(range(7)), list(range(7)), pages),
        batch([5, 9], [0, 1], [21, 7], [0, 1], pages),
        batch([5, *tokens(3, 30)], [0, *[1] * 30], [22, *range(8, 38)], [0, 30], pages),
    ]
    steps += [batch(tokens(a, 60), [0] * 60, list(range(a, a + 60)), [59], pages) for a in range(23, 263, 60)]
    return [
        *steps,
        batch([6], [0], [263], [0], pages),  # more than one chunk of keys, alone
        batch([5, 9], [1, 0], [38, 264], [0, 1], pages),  # a short and a long row
        batch([8, 2], [0, 1], [265, 39], [1], pages),
        batch([8], [1], [40], [], pages),  # nothing wanted
        batch([8], [1], [41], [0], pages),
    ]


def resident_script() -> list[StepBatch]:
    """Steps of one token on shuffled pages, alone at 1, at 4 to 6, around the end of near keys and of 1 to 3 chunks."""
    pages = [np.random.default_rng(3).permutation(48)[:40].tolist()]

    def decode(position: int) -> StepBatch:
        return batch(tokens(position, 1), [0], [position], [0], pages)

    def prefill(begin: int, end: int) -> StepBatch:
        return batch(tokens(begin, end - begin), [0] * (end - begin), list(range(begin, end)), [end - begin - 1], pages)

    return [
        decode(0), prefill(1, 4), decode(4), decode(5), decode(6), prefill(7, 67), prefill(67, 127), decode(127),
        decode(128), *(prefill(begin, begin + 60) for begin in range(129, 489, 60)), decode(489), prefill(490, 550),
        decode(550),
    ]  # fmt: skip


LENGTHS = (270, 135, 5, 1, 17, 3, 20, 9, 2)  # of the sequences of `rows_script`, before it decodes


def rows_script(cluster: int) -> list[StepBatch]:
    """Steps of 2 to 8 rows, each the newest of its sequence, with at most `cluster` chunks of keys, and prefills."""
    order, used, pages = np.random.default_rng(4).permutation(64), 0, []
    for length in LENGTHS:
        pages.append(order[used : used + length // 16 + 2].tolist())
        used += len(pages[-1])
    table = [row + [0] * (max(map(len, pages)) - len(row)) for row in pages]
    lengths, steps = list(LENGTHS), []
    for s, length in enumerate(LENGTHS):
        for begin in range(0, length, 60):
            count = min(60, length - begin)
            steps.append(
                batch(tokens(begin + s, count), [0] * count, list(range(begin, begin + count)), [], [table[s]])
            )
    for which in (
        [0, 1],
        [2, 0, 1],
        [1, 2, 3],
        [1, 2, 3, 4],
        [8, 7, 6, 5, 4],
        [0, 1, 2, 3, 4, 5, 6],
        [8, 1, 2, 3, 4, 5, 6, 7],
    ):
        if sum(lengths[s] // 256 + 1 for s in which) > cluster:
            continue
        rows, wanted = len(which), list(range(len(which)))[:: 1 if len(which) % 2 == 0 else -1]
        ids, position = tokens(rows, rows), [lengths[s] for s in which]
        steps.append(
            batch(ids, list(range(rows)), position, wanted[:4] if rows == 5 else wanted, [table[s] for s in which])
        )
        for s in which:
            lengths[s] += 1
    return steps
