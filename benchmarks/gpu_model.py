"""A SmolLM2-shaped model of hashed weights, and the steps whose logits are compared between machines.

It knows no GPU. Rules: every weight is integer arithmetic and one rounding, so that nothing big travels; each case runs
its steps on fresh pages and yields the logits of all of them, as one digest.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np

from engines.bundled.batch import Arithmetic, StepBatch
from engines.bundled.config import EngineConfig, Float32, Model, ModelConfig
from engines.bundled.gpu.cases import hashed
from engines.bundled.models.tensors import tensor_shapes

PAGE = 16
SMOLLM2 = ModelConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, head_dim=64, max_position_embeddings=2304, rms_norm_eps=1e-5, rope_theta=100000.0,
    tie_word_embeddings=True, bos_token_id=1, eos_token_ids=(2,),
)  # fmt: skip


def hashed_model(config: ModelConfig = SMOLLM2) -> Model:
    """The model; spreads are those of trained weights: unit variance in, unit variance out."""
    weights = {}
    for i, (name, shape) in enumerate(tensor_shapes(config).items()):
        if len(shape) == 1:
            weights[name] = np.float32(1.0) + hashed(shape, i + 1) * np.float32(0.25)
        else:
            weights[name] = hashed(shape, i + 1, "uniform", math.sqrt(3.0 / shape[1]))
    return Model(name="hashed", config=config, weights=weights, digest="hashed")


def engine_config(arithmetic: str, num_pages: int, threads: int) -> EngineConfig:
    """Options of the benchmark."""
    return EngineConfig(
        arithmetic=arithmetic, max_num_seqs=16, max_num_batched_tokens=2048, page_size=PAGE, num_pages=num_pages,
        threads=threads, isa="auto", compiler="auto", tuning=0,
    )  # fmt: skip


class Sequences:
    """Page tables and lengths of some sequences, and the steps that extend them. Pages are dealt in a stirred order."""

    def __init__(self, count: int, most: int, num_pages: int) -> None:
        per = -(-most // PAGE)
        if count * per > num_pages:
            raise ValueError(f"{count} sequences of {most} tokens need {count * per} pages, there are {num_pages}")
        order = np.argsort(hashed((num_pages,), 99), kind="stable").astype(np.int32)
        self.table = order[: count * per].reshape(count, per)
        self.length = np.zeros(count, np.int32)

    def step(self, which: list[int], tokens: list[list[int]], *, everything: bool) -> StepBatch:
        """New tokens for some sequences; logits of all of them, or of each sequence's last."""
        counts = np.array([len(part) for part in tokens])
        ends = np.cumsum(counts)
        position = [int(self.length[s]) + i for s, part in zip(which, tokens, strict=True) for i in range(len(part))]
        self.length[which] += counts.astype(np.int32)
        return StepBatch(
            token=np.array([t for part in tokens for t in part], np.int32),
            sequence=np.repeat(np.arange(len(which), dtype=np.int32), counts),
            position=np.array(position, np.int32),
            page_table=np.ascontiguousarray(self.table[which]),
            wanted=(np.arange(ends[-1]) if everything else ends - 1).astype(np.int32),
        )


def prompt(config: ModelConfig, index: int, length: int) -> list[int]:
    """Hashed token ids."""
    unit = hashed((length,), 1000 + index) * np.float32(0.5) + np.float32(0.5)
    return [int(u * np.float32(config.vocab_size)) % config.vocab_size for u in unit]


def run_cases(arithmetic: Arithmetic, config: ModelConfig, num_pages: int) -> Iterator[tuple[str, str, int]]:
    """(case, SHA-256 over the logits of all its steps, logits compared)."""
    for name, steps in cases(config, num_pages):
        digest, count = hashlib.sha256(), 0
        state: list[Float32] = []
        for batch in steps(state):
            logits = arithmetic.forward(batch)
            digest.update(logits.tobytes())
            count += logits.size
            state[:] = [logits]
        yield name, digest.hexdigest(), count


def cases(config: ModelConfig, num_pages: int):  # noqa: ANN201 - pairs of a name and a generator function
    """Every case: prefill whole, chunked, token by token; decode alone and in a batch; contexts past one key chunk."""

    def prefill(_: list[Float32]) -> Iterator[StepBatch]:
        yield Sequences(1, 64, num_pages).step([0], [prompt(config, 0, 64)], everything=True)

    def chunked(_: list[Float32]) -> Iterator[StepBatch]:
        s, ids = Sequences(1, 64, num_pages), prompt(config, 0, 64)
        for a, b in ((0, 1), (1, 6), (6, 22), (22, 64)):
            yield s.step([0], [ids[a:b]], everything=True)

    def token_by_token(_: list[Float32]) -> Iterator[StepBatch]:
        s, ids = Sequences(1, 64, num_pages), prompt(config, 0, 64)
        for token in ids:
            yield s.step([0], [[token]], everything=True)

    def decode_alone(state: list[Float32]) -> Iterator[StepBatch]:
        s = Sequences(1, 160, num_pages)
        yield s.step([0], [prompt(config, 1, 100)], everything=False)
        for _ in range(32):
            yield s.step([0], [[int(state[0][0].argmax())]], everything=False)

    def decode_batch(state: list[Float32]) -> Iterator[StepBatch]:
        s, all_ = Sequences(16, 64, num_pages), list(range(16))
        yield s.step(all_, [prompt(config, 10 + i, 3 + 2 * i) for i in all_], everything=False)
        for _ in range(16):
            yield s.step(all_, [[int(row.argmax())] for row in state[0]], everything=False)

    def long_context(_: list[Float32]) -> Iterator[StepBatch]:
        s = Sequences(3, 600, num_pages)
        yield s.step([0], [prompt(config, 30, 512)], everything=False)
        yield s.step([0, 1], [[7], prompt(config, 31, 250)], everything=False)
        for i in range(12):
            yield s.step([0], [[i]], everything=False)
            yield s.step([0, 1], [[i], [i + 1]], everything=False)
            yield s.step([2, 0, 1], [prompt(config, 32 + i, 20), [i], [i]], everything=False)

    return (
        ("prefill 64", prefill),
        ("chunked prefill", chunked),
        ("token by token", token_by_token),
        ("decode alone", decode_alone),
        ("decode batch of 16", decode_batch),
        ("long contexts", long_context),
    )
