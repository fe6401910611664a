"""Ranks that compute with the GPU kernels, on the host's emulation of them, against one process on the CPU."""

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from arithmetic_cases import options, pages_for, same, step, tokens
from test_parallel_ranks import DENSE, MOE, alone, children_of, equal, opened, run
from test_parallel_shard import Meeting, ThreadGroup, model_of

from engines.bundled.arithmetic import open_arithmetic
from engines.bundled.config import RopeScaling
from engines.bundled.errors import NotSupported
from engines.bundled.gpu import EMULATED, why_not
from engines.bundled.gpu.emulated import EmulatedMachine
from engines.bundled.gpu.interface import GpuError
from engines.bundled.kernels.library import load
from engines.bundled.models.tiny import CONFIG
from engines.bundled.parallel.card_start import check_tree, open_card
from engines.bundled.parallel.layout import lay_out

# Nine heads in three groups; eight chunks of the inner width, the last one short. Kernels are compiled by shape.
NINE = dataclasses.replace(
    CONFIG, num_attention_heads=9, num_key_value_heads=3, head_dim=16, hidden_size=144, intermediate_size=368
)
MODELS = {
    "biases, no tie": dataclasses.replace(NINE, qkv_bias=True, tie_word_embeddings=False),
    "head norms, a window, another rope": dataclasses.replace(
        NINE, qk_norm=True, windows=(9, 0), rope_scaling=RopeScaling(kind="linear", factor=2.0)
    ),
}
ENGINE = options(num_pages=40, page_size=16)


def batches():
    """Prompts together, one longer than any recorded graph, then decodes that run the same graph again."""
    table = pages_for(ENGINE, rows=3)
    yield step([(row, 0, tokens(row, 4 + 9 * row)) for row in range(2)], table)
    yield step([(2, 0, tokens(2, 80))], table)
    for i in range(2):
        yield step([(row, length + i, tokens(50 + row, 1)) for row, length in enumerate((4, 13, 80))], table)
    yield dataclasses.replace(step([(0, 6, tokens(9, 2))], table), wanted=np.empty(0, np.int32))
    yield step([(0, 8, tokens(8, 1))], table)


class SpanlessGroup(ThreadGroup):
    """Ranks that meet in host memory."""

    spans_cards = False


EMPTY = 4  # the batch of which nothing is wanted


def differing(ones, others):
    """Batches whose logits differ; those of which nothing is wanted give none."""
    assert ones[EMPTY].shape == others[EMPTY].shape == (0, 512)
    return [i for i in range(6) if i != EMPTY and not same(ones[i], others[i])]


def split_run(model, ranks, **changes):
    """Every rank's logits of every batch, and what it counts."""
    config = dataclasses.replace(ENGINE, tensor_parallel_size=ranks, **changes)
    parts, meeting, kernels = lay_out(model.config, tensor=ranks, expert=1), Meeting(ranks), load("auto", "auto")
    cards = [open_card(model.config, config, part, EMULATED) for part in parts]

    def one(rank):
        arithmetic = cards[rank].join(model, config, kernels, parts, SpanlessGroup(meeting, rank, ranks))
        return [arithmetic.forward(batch) for batch in batches()], arithmetic.counts()[0], arithmetic.graph_steps

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_emulated_cards_give_the_bits_of_one_cpu_process(name, ranks):
    model = model_of(MODELS[name])
    cpu = open_arithmetic(model, ENGINE)
    expected = [cpu.forward(batch) for batch in batches()]
    for logits, counts, graphs in split_run(model, ranks):
        assert differing(logits, expected) == []
        assert (counts["steps"], graphs) == (6, 5)
        assert counts["weight_bytes"] < 0.6 * cpu.counts()[0]["weight_bytes"]


def test_four_ranks_share_three_groups_of_heads():
    held = [counts["kv_bytes"] for _, counts, _ in split_run(model_of(MODELS["biases, no tie"]), 4)]
    assert held == [2 * 2 * 16 * 16 * 40 * 4] * 3 + [0]


def test_free_follows_the_number_of_ranks():
    model = model_of(MODELS["biases, no tie"])
    three, again, four = (split_run(model, ranks, arithmetic="free")[0][0] for ranks in (3, 3, 4))
    assert differing(three, again) == []  # noise would be no control
    assert differing(three, four) == [0, 1, 2, 3, 5]
    cpu = open_arithmetic(model, ENGINE)  # a rank without a head adds nothing, not what it happened to hold
    assert all(np.allclose(one, cpu.forward(batch), atol=1e-3) for one, batch in zip(four, batches(), strict=True))


def test_two_processes_on_emulated_cards_give_the_bits_of_one_on_the_cpu():
    arithmetic = opened("tiny", DENSE, tensor_parallel_size=2, device=EMULATED)
    try:
        assert equal(run(arithmetic), alone(DENSE)) == [True] * 3
        facts, counts = arithmetic.describe(), arithmetic.counts()
    finally:
        arithmetic.close()
    assert (facts["device"], facts["gpu"]) == ("cuda", "emulated on the host")
    assert facts["collectives"].startswith("gloo of torch ")
    whole = open_arithmetic(DENSE, options(num_pages=40, page_size=16)).counts()[0]
    assert all(count["weight_bytes"] < 0.7 * whole["weight_bytes"] for count in counts)
    assert [count["kv_bytes"] for count in counts] == [whole["kv_bytes"] // 2] * 2


@pytest.mark.parametrize("collectives", ["gloo", "nccl"])
def test_two_ranks_on_gpus_give_the_bits_of_one_on_the_cpu_or_say_what_is_missing(collectives):
    """Over gloo one card will do."""
    before = children_of(os.getpid())
    if (reason := why_not()) is not None:
        missing = "no NVIDIA driver" if "driver" in reason else "."
        with pytest.raises(NotSupported, match=f"device=cuda: rank 0: .*{missing}"):
            opened("tiny", DENSE, tensor_parallel_size=2, device="cuda", collectives=collectives)
        assert children_of(os.getpid()) == before
        return
    from engines.bundled.gpu.driver import count_devices

    if collectives == "nccl" and count_devices() < 2:
        with pytest.raises(NotSupported, match="2 ranks need a GPU each, 1 are here; use collectives=gloo"):
            opened("tiny", DENSE, tensor_parallel_size=2, device="cuda", collectives=collectives)
        return
    arithmetic = opened("tiny", DENSE, tensor_parallel_size=2, device="cuda", collectives=collectives)
    try:
        assert equal(run(arithmetic), alone(DENSE)) == [True] * 3
    finally:
        arithmetic.close()


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (MOE, {"tensor_parallel_size": 2}, "device=cuda over several ranks: experts are split on CPUs alone"),
        (DENSE, {"tensor_parallel_size": 2, "dtype": "bfloat16", "arithmetic": "free"}, "set k_order=tree"),
        (DENSE, {"tensor_parallel_size": 2, "arithmetic": "tensorcore"}, "portable and free can be split"),
    ],
)
def test_what_is_not_split_on_gpus_is_refused_before_a_process_starts(model, changes, message):
    before = children_of(os.getpid())
    with pytest.raises(NotSupported, match=message):
        opened("tiny", model, device="cuda", **changes)
    assert children_of(os.getpid()) == before


class WrongTree(EmulatedMachine):
    """A machine that gives one element of a tree another last bit."""

    def download(self, address, array):
        super().download(address, array)
        array.reshape(-1).view(np.int32)[7] ^= 1


def test_a_machine_that_adds_otherwise_is_refused():
    shape = open_card(NINE, ENGINE, lay_out(NINE, tensor=3, expert=1)[0], EMULATED).shape
    check_tree(EmulatedMachine(shape))
    with pytest.raises(GpuError, match="the tree over ranks differs from the CPU's in 1 of 1000 elements"):
        check_tree(WrongTree(shape))
