"""Builders the engine tests share: sampling parameters, options, a scripted arithmetic, a runner."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence as Numbers

import numpy as np

from engines.bundled.batch import StepBatch
from engines.bundled.config import EngineConfig, Float32, ModelConfig
from engines.bundled.engine import Engine
from engines.bundled.kernels.library import load
from engines.bundled.models.tiny import CONFIG as TINY
from engines.bundled.request import Request, Sampling
from engines.bundled.sequence import Sequence

GREEDY = Sampling(
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    repetition_penalty=1.0,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    seed=None,
    max_tokens=8,
    min_tokens=0,
    ignore_eos=True,
    stop=(),
    stop_token_ids=(),
    logit_bias=(),
    logprobs=3,
)
OPTIONS = EngineConfig(
    arithmetic="portable",
    max_num_seqs=4,
    max_num_batched_tokens=16,
    page_size=4,
    num_pages=32,
    threads=1,
    isa="auto",
    compiler="auto",
    tuning=0,
)
SMALL = dataclasses.replace(TINY, vocab_size=61, max_position_embeddings=128, eos_token_ids=(7,))


def greedy(**changes: object) -> Sampling:
    """Greedy sampling with changes."""
    return dataclasses.replace(GREEDY, **changes)


def options(**changes: object) -> EngineConfig:
    """Small engine options with changes."""
    return dataclasses.replace(OPTIONS, **changes)


def kernels():
    """The kernels of this machine."""
    return load("auto", "auto")


class ScriptedArithmetic:
    """An arithmetic whose logits are a hash of the tokens it finds in the sequence's pages.

    A wrong page table, position or a page shared by two sequences changes the tokens found, and so the logits.
    `spoil` maps a prefix of tokens to the logits to return for it instead.
    """

    name = "scripted"
    definition = 0

    def __init__(self, model: ModelConfig, config: EngineConfig) -> None:
        self.vocab = model.vocab_size
        self.page_size = config.page_size
        garbage = np.random.default_rng(1).integers(0, model.vocab_size, (config.num_pages, config.page_size))
        self.memory = garbage.astype(np.int64)
        self.spoil: dict[tuple[int, ...], Float32] = {}
        self.batches: list[StepBatch] = []

    def forward(self, batch: StepBatch) -> Float32:
        self.batches.append(batch)
        for token, row, position in zip(batch.token, batch.sequence, batch.position, strict=True):
            self.memory[self._place(batch, row, position)] = token
        rows = [self._logits(self._prefix(batch, index)) for index in batch.wanted]
        return np.array(rows, np.float32).reshape(len(rows), self.vocab)

    def log_softmax(self, logits: Float32) -> Float32:
        return kernels().log_softmax(logits)

    def describe(self) -> dict[str, str | int | float | bool]:
        return {"backend": "scripted"}

    def _place(self, batch: StepBatch, row: int, position: int) -> tuple[int, int]:
        page = batch.page_table[row, position // self.page_size]
        assert page >= 0, "an unused entry of the page table was read"
        return page, position % self.page_size

    def _prefix(self, batch: StepBatch, index: int) -> tuple[int, ...]:
        row, last = batch.sequence[index], batch.position[index]
        return tuple(int(self.memory[self._place(batch, row, position)]) for position in range(last + 1))

    def _logits(self, prefix: tuple[int, ...]) -> Float32:
        if prefix in self.spoil:
            return self.spoil[prefix]
        seed = int.from_bytes(hashlib.blake2b(repr(prefix).encode(), digest_size=8).digest())
        return np.random.default_rng(seed).normal(0, 3, self.vocab).astype(np.float32)


def scripted_engine(
    config: EngineConfig = OPTIONS, model: ModelConfig = SMALL, page_order: Numbers[int] | None = None
) -> Engine:
    """An engine over a scripted arithmetic; ids decode to the letters from "A" on."""
    arithmetic = ScriptedArithmetic(model, config)
    return Engine(model, config, arithmetic, kernels(), lambda ids: "".join(chr(65 + i) for i in ids), page_order)


def request(name: str, prompt: Numbers[int], sampling: Sampling = GREEDY, **changes: object) -> Request:
    """A request by name."""
    return Request(id=name, prompt=tuple(prompt), sampling=sampling, **changes)


def run_all(engine: Engine, requests: Numbers[Request], arrivals: Numbers[int] | None = None) -> list[Sequence]:
    """Submits request i once `arrivals[i]` steps were run (all at once by default) and runs to the end."""
    due = list(arrivals or [0] * len(requests))
    sequences: list[Sequence | None] = [None] * len(requests)
    while None in sequences or engine.has_work:
        for index, step in enumerate(due):
            if sequences[index] is None and step <= engine.step_index:
                sequences[index] = engine.submit(requests[index])
        if engine.has_work:
            engine.step()
        else:
            engine.idle_until(min(step for step, found in zip(due, sequences, strict=True) if found is None))
    engine.check_pages()
    return sequences


def evidence(sequence: Sequence) -> list[tuple]:
    """Everything reported of a sequence, floats as bits."""
    return [
        (p.token, p.pick, bits(p.logprob), p.topk_ids.tolist(), p.topk_logprobs.tobytes(), p.digest)
        for p in sequence.positions
    ] + [(sequence.finish_reason,)]


def bits(number: float) -> bytes:
    """A float32's bytes."""
    return np.float32(number).tobytes()
