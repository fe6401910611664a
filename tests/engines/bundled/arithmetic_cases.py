"""Small random models, steps and kernel builds that the arithmetic tests share."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np

from engines.bundled.arithmetic import open_arithmetic
from engines.bundled.batch import StepBatch
from engines.bundled.config import EngineConfig, Model, ModelConfig
from engines.bundled.kernels.build import COMPILERS
from engines.bundled.kernels.interface import KernelError
from engines.bundled.kernels.isa import ISAS, resolve_isa
from engines.bundled.kernels.library import load
from engines.bundled.models.tensors import tensor_shapes

CONFIG = EngineConfig(
    arithmetic="portable",
    max_num_seqs=8,
    max_num_batched_tokens=64,
    page_size=16,
    num_pages=96,
    threads=1,
    isa="auto",
    compiler="auto",
    tuning=0,
)


def has_isa(isa: str) -> bool:
    try:
        resolve_isa(isa)
    except KernelError:
        return False
    return True


# Every build this machine can make and run; "generic" is always among them.
BUILDS = tuple((i, c) for i in ISAS for c in COMPILERS if has_isa(i) and shutil.which(c))
ALL_KERNELS = tuple(load(isa, compiler) for isa, compiler in BUILDS)


def bits(x):
    """Bit patterns, with every NaN the same."""
    x = np.asarray(x, np.float32)
    return np.where(np.isnan(x), np.int32(0x7FC00000), x.view(np.int32))


def same(a, b) -> bool:
    assert np.size(a) > 0
    return np.shape(a) == np.shape(b) and bool((bits(a) == bits(b)).all())


def normal(seed, *shape, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def tiny_model(heads=4, kv_heads=2, head_dim=16, hidden=64, inner=160, layers=2, vocab=512, seed=0, **more) -> Model:
    config = ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
        **more,
    )
    weights = {}
    for i, (name, shape) in enumerate(sorted(tensor_shapes(config).items())):
        if "norm" in name:
            weights[name] = (1 + normal(seed * 1000 + i, *shape, scale=0.1)).astype(np.float32)
        else:
            weights[name] = normal(seed * 1000 + i, *shape, scale=shape[-1] ** -0.5 if "embed" not in name else 1.0)
    return Model(name="random", config=config, weights=weights, digest="")


def tokens(seed, count, vocab=512):
    return np.random.default_rng(seed).integers(0, vocab, count).astype(np.int32)


def step(pieces, page_table) -> StepBatch:
    """A step of (row, first position, token ids) pieces in which the logits of every token are wanted."""
    return StepBatch(
        token=np.concatenate([ids for _, _, ids in pieces]).astype(np.int32),
        sequence=np.concatenate([np.full(len(ids), row, np.int32) for row, _, ids in pieces]),
        position=np.concatenate([np.arange(p, p + len(ids), dtype=np.int32) for _, p, ids in pieces]),
        page_table=page_table,
        wanted=np.arange(sum(len(ids) for _, _, ids in pieces), dtype=np.int32),
    )


def pages_for(config=CONFIG, rows=1, seed=None):
    """A page table of `rows` rows that uses every page once, in order or shuffled."""
    order = np.arange(config.num_pages, dtype=np.int32)
    if seed is not None:
        order = np.random.default_rng(seed).permutation(order).astype(np.int32)
    return np.ascontiguousarray(order[: config.num_pages // rows * rows].reshape(rows, -1))


def options(**changes) -> EngineConfig:
    return replace(CONFIG, **changes)


def opened(model, garbage=np.nan, **changes):
    """An arithmetic whose KV pages hold stale garbage."""
    arithmetic = open_arithmetic(model, options(**changes))
    for pages in arithmetic.pages:
        pages.keys[...] = garbage
        pages.values[...] = garbage
    return arithmetic


def run_schedule(arithmetic, sequences, table, random):
    """Logits (length, vocab) of each sequence, computed in steps of random company, chunk sizes and order."""
    done = [0] * len(sequences)
    logits = [np.full((len(ids), 0), np.nan, np.float32) for ids in sequences]
    while any(d < len(ids) for d, ids in zip(done, sequences, strict=True)):
        unfinished = [i for i, ids in enumerate(sequences) if done[i] < len(ids)]
        rows = random.sample(unfinished, random.randint(1, len(unfinished)))
        pieces = []
        for i in rows:
            first = max(0, done[i] - random.choice([0, 0, 0, 3]))  # now and then some positions are computed again
            last = min(len(sequences[i]), done[i] + random.choice([1, 1, 2, 7, 30]))
            pieces.append((i, first, sequences[i][first:last]))
            done[i] = last
        out = arithmetic.forward(step(pieces, table))
        for i, first, ids in pieces:
            if logits[i].shape[1] == 0:
                logits[i] = np.full((len(sequences[i]), out.shape[1]), np.nan, np.float32)
            logits[i][first : first + len(ids)], out = out[: len(ids)], out[len(ids) :]
    return logits
