"""The forward pass split over ranks, many shapes: ranks are threads here, and collectives a shared list."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from arithmetic_cases import normal, options, pages_for, same, step, tokens

from engines.bundled.arithmetic import open_arithmetic
from engines.bundled.config import Model, RopeScaling
from engines.bundled.kernels.library import load
from engines.bundled.models.tensors import tensor_shapes
from engines.bundled.models.tiny import CONFIG, MOE_CONFIG
from engines.bundled.parallel import layout
from engines.bundled.parallel.layout import lay_out
from engines.bundled.parallel.pieces import take_shard
from engines.bundled.parallel.shard import ShardArithmetic


class Meeting:
    """Where the ranks of one group put down what they give; each waits until all have."""

    def __init__(self, ranks):
        self.barrier = threading.Barrier(ranks, timeout=60)
        self.given = [None] * ranks

    def exchange(self, rank, part):
        self.given[rank] = part.copy()
        self.barrier.wait()
        everyone = np.stack(self.given)
        self.barrier.wait()
        return everyone


class ThreadGroup:
    """A rank's view of the meeting, with `Group`'s methods."""

    def __init__(self, meeting, rank, ranks):
        self.meeting, self.rank, self.ranks = meeting, rank, ranks

    def gather(self, part):
        return self.meeting.exchange(self.rank, part)

    def all_reduce(self, values):
        everyone = self.meeting.exchange(self.rank, values)
        total = everyone[-1].copy()
        for other in everyone[-2::-1]:  # some order of its own
            total += other
        return total


def model_of(config):
    weights = {}
    for i, (name, shape) in enumerate(tensor_shapes(config).items()):
        scale = 0.3 if len(shape) > 1 else 0.2
        weights[name] = normal(i, *shape, scale=scale) + np.float32(len(shape) == 1 and "norm" in name)
    return Model(name="random", config=config, weights=weights, digest="")


SMOLLM2 = dataclasses.replace(
    CONFIG, num_attention_heads=9, num_key_value_heads=3, head_dim=8, hidden_size=72, intermediate_size=190
)  # chunks of 24, 8 of them in the MLP, the last one short
MODELS = {
    "nine heads in three groups": SMOLLM2,
    "biases, no tie": dataclasses.replace(SMOLLM2, qkv_bias=True, tie_word_embeddings=False),
    "head norms, windows, another rope": dataclasses.replace(
        CONFIG, qk_norm=True, windows=(5, 0), rope_scaling=RopeScaling(kind="linear", factor=2.0)
    ),
    "no KV groups: chunks of several heads": dataclasses.replace(
        CONFIG, num_attention_heads=20, num_key_value_heads=20, intermediate_size=530
    ),
    "experts, and a layer without": dataclasses.replace(MOE_CONFIG, dense_layers=(1,)),
}
CONFIG_OF_ENGINE = options(num_pages=30, page_size=8)


def batches():
    table = pages_for(CONFIG_OF_ENGINE, rows=3)
    first = step([(row, 0, tokens(row, 4 + 9 * row)) for row in range(3)], table)
    yield first
    yield dataclasses.replace(
        step([(row, 4 + 9 * row, tokens(50 + row, 2)) for row in range(3)], table), wanted=np.array([1, 4], np.int32)
    )


def alone(model, **changes):
    arithmetic = open_arithmetic(model, dataclasses.replace(CONFIG_OF_ENGINE, **changes))
    return [arithmetic.forward(batch) for batch in batches()]


def split_run(model, tensor=1, expert=1, **changes):
    """The first rank's logits, and every rank's bytes of weights."""
    config = dataclasses.replace(CONFIG_OF_ENGINE, tensor_parallel_size=tensor, expert_parallel_size=expert, **changes)
    parts, ranks, kernels = (
        lay_out(model.config, tensor=tensor, expert=expert),
        max(tensor, expert),
        load("auto", "auto"),
    )
    meeting = Meeting(ranks)

    def one(rank):
        shard = take_shard(model, parts, rank, kernels, config)
        arithmetic = ShardArithmetic(model, config, kernels, shard, parts, ThreadGroup(meeting, rank, ranks))
        return [arithmetic.forward(batch) for batch in batches()], arithmetic.counts()[0]["weight_bytes"]

    with ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(one, range(ranks)))
    return results[0][0], [held for _, held in results]


def equal(ones, others):
    return all(same(one, other) for one, other in zip(ones, others, strict=True))


@pytest.fixture(scope="module", params=MODELS, ids=list(MODELS))
def model(request):
    return model_of(MODELS[request.param])


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_any_number_of_ranks_gives_the_bits_of_one(model, ranks):
    found, held = split_run(model, tensor=ranks)
    assert equal(found, alone(model))
    whole = open_arithmetic(model, CONFIG_OF_ENGINE).counts()[0]["weight_bytes"]
    assert max(held) < whole  # nobody holds everything


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_order_of_free_follows_the_ranks(model, ranks):
    found, _ = split_run(model, tensor=ranks, arithmetic="free")
    again, _ = split_run(model, tensor=ranks, arithmetic="free")
    assert equal(found, again)
    assert not equal(found, alone(model, arithmetic="free"))
    np.testing.assert_allclose(found[0], alone(model)[0], rtol=0, atol=2e-4 * np.abs(found[0]).max())


@pytest.mark.parametrize(("tensor", "expert"), [(1, 2), (1, 4), (1, 3), (2, 2), (4, 4)])
def test_experts_over_ranks_give_the_bits_of_one(tensor, expert):
    moe = model_of(MOE_CONFIG)
    found, _ = split_run(moe, tensor=tensor, expert=expert)
    assert equal(found, alone(moe))


def test_adding_sub_trees_in_another_order_shows(monkeypatch):
    """Were T completed as a chain, these shapes would notice."""
    model = model_of(SMOLLM2)

    def chain(chunks, sums, add):
        total = None
        for span in sorted(sums, key=lambda span: span.begin):
            total = sums[span] if total is None else add(total, sums[span])
        return total

    monkeypatch.setattr("engines.bundled.parallel.shard.complete", chain)
    found, _ = split_run(model, tensor=3)
    assert not equal(found, alone(model))
    assert layout.complete is not chain
