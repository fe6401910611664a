"""`k_order=tree` in Triton's interpreter: chunk sums and T against a twin, and ranks against one process; no GPU."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from gpu_cases import family, step
from matrix_unit import VARIABLE, chain, import_interpreted
from presence import missing
from resized_model import resized

try:
    import_interpreted()
except ImportError:
    missing("triton", "Triton is not installed; the extra `test` brings it on Linux", module=True)

import torch

from engines.bundled.config import EngineConfig
from engines.bundled.errors import NotSupported
from engines.bundled.kernels.library import load
from engines.bundled.parallel.layout import Span, complete

CONFIG = EngineConfig(
    arithmetic="tensorcore", max_num_seqs=8, max_num_batched_tokens=64, page_size=8, num_pages=16, threads=1,
    isa="auto", compiler="auto", tuning=0, dtype="bfloat16", k_order="tree",
)  # fmt: skip
PROMPT = [(37 * i + 11) % 500 for i in range(19)]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")


def bits(tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.int16).numpy()


def normal(seed: int, *shape: int):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def twin(x, weight, width: int) -> torch.Tensor:
    """Chains over chunks of K, added by T in float32."""
    a, b = x.float().numpy(), weight.float().numpy()
    starts = range(0, a.shape[1], width)
    sums = {Span(i, i + 1): chain(a[:, k : k + width], b[:, k : k + width]) for i, k in enumerate(starts)}
    return torch.from_numpy(complete(len(starts), sums, np.add))


@pytest.mark.parametrize("columns", [16, 32, 40, 48, 64, 80, 96, 112, 128, 160, 13 * 16, 21 * 16])
def test_a_product_is_the_tree_over_chunk_sums_for_every_cut(columns):
    from engines.bundled.gpu.tensorcore.tiles import Tile
    from engines.bundled.gpu.tensorcore.tree import Cut, tree_product

    x, weight, width = normal(1, 5, columns), normal(2, 19, columns), 16
    expected = twin(x, weight, width)
    for held in (1, 2, 4, 8):
        found = tree_product(x, weight, width, Cut(Tile(16, 32, 16, 1, 4), held), torch.float32)
        assert (bits(found) == bits(expected)).all()
    wide = tree_product(x[:3], weight, width, Cut(Tile(16, 16, 32, 1, 4), 4), torch.bfloat16)  # a step past the chunk
    assert (bits(wide) == bits(expected[:3].to(torch.bfloat16))).all()


def test_the_tree_is_another_sum_than_a_left_fold_and_than_one_chain():
    x, weight = normal(3, 16, 96), normal(4, 16, 96)
    tree, whole = twin(x, weight, 16), torch.from_numpy(chain(x.float().numpy(), weight.float().numpy()))
    fold = sum(twin(x[:, k : k + 16], weight[:, k : k + 16], 16) for k in range(0, 96, 16))
    assert (bits(tree) != bits(whole)).any()
    assert (bits(tree) != bits(fold)).any()


@pytest.mark.parametrize(("kv", "chunks"), [(1, 1), (2, 2), (3, 3), (8, 8), (16, 8), (32, 8), (12, 6), (9, 9), (20, 5)])
def test_chunks_of_k_follow_the_kv_heads(kv, chunks):
    from engines.bundled.gpu.tensorcore.tree import chunk_count, chunk_width, held_of

    config = dataclasses.replace(family().config, num_key_value_heads=kv, num_attention_heads=2 * kv)
    assert chunk_count(config) == chunks
    assert chunk_width(2 * kv * 16, chunks) * chunks == 2 * kv * 16
    assert (chunk_width(176, 2), chunk_width(177, 2), chunk_width(100, 8)) == (88, 96, 16)
    assert [held_of(8, most) for most in (1, 2, 4, 8)] == [1, 2, 4, 8]
    assert (held_of(3, 4), held_of(3, 2), held_of(6, 4), held_of(12, 8), held_of(9, 8)) == (3, 1, 2, 4, 1)


STEPS = (
    step([(PROMPT[:15], 0, [0, 2, 9]), ([5, 6, 7], 0, [4])]),
    step([([8], 3, [4]), (PROMPT[15:17], 15, [0, 2, 9])]),
    step([(PROMPT[17:18], 17, [0, 2, 9])]),
)
SHAPES = {
    "three KV heads": {"num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 1},
    "four KV heads, biases": {"num_key_value_heads": 4, "qkv_bias": True, "num_hidden_layers": 1},
    "five KV heads, a short inner width": {
        "num_attention_heads": 5, "num_key_value_heads": 5, "intermediate_size": 50, "num_hidden_layers": 1,
    },
}  # fmt: skip


def arithmetic(monkeypatch, changes: dict, **options):
    from engines.bundled.gpu.tensorcore import forward, operators, tree
    from engines.bundled.gpu.tensorcore.tiles import Tile
    from engines.bundled.gpu.tensorcore.weights import from_model

    monkeypatch.setattr(forward, "KEYS", 16)
    monkeypatch.setattr(operators, "FORM", operators.FORM._replace(keys=16, step=8, rows=16))
    small = ((2, tree.Cut(Tile(16, 32, 32, 1, 4), 4)), (99, tree.Cut(Tile(32, 64, 16, 1, 4), 2)))
    monkeypatch.setattr(tree, "CUTS", small)
    model = resized(**changes)
    config = dataclasses.replace(CONFIG, **options)
    made = forward.TensorCoreArithmetic(
        model.config, config, from_model(model, "cpu"), load("auto", "auto"), "cpu", torch.bfloat16
    )
    if made.tree is not None:
        made.tree = tree.TreeLinear(made.tree.chunks, by_rows=True)
    return made


@pytest.mark.parametrize("name", SHAPES)
def test_ranks_give_the_bits_of_one_process(monkeypatch, name):
    from engines.bundled.gpu.tensorcore.parallel import EmulatedRanks

    whole = arithmetic(monkeypatch, SHAPES[name])
    expected = [whole.logits(one).clone() for one in STEPS[:2]]
    for ranks in (2, 4):
        emulated = EmulatedRanks(whole, ranks, 10)
        for one, logits in zip(STEPS[:2], expected, strict=True):
            assert (bits(emulated.logits(one)) == bits(logits)).all()
        held = [shard.bytes for shard in emulated.shards]
        assert sum(held) == EmulatedRanks(whole, 1, 10).shards[0].bytes
        assert all(len(shard.caches[0][0][0]) == shard.heads.kv for shard in emulated.shards)
    assert len({float(x) for x in expected[0][0]}) > 50


def test_ranks_that_round_before_they_add_do_not(monkeypatch):
    from engines.bundled.gpu.tensorcore.parallel import EmulatedRanks, join_sums, rounded

    whole = arithmetic(monkeypatch, {"num_key_value_heads": 4, "num_hidden_layers": 1})
    expected = whole.logits(STEPS[0]).clone()

    assert (bits(EmulatedRanks(whole, 4, 10, rounded(join_sums)).logits(STEPS[0])) != bits(expected)).any()


def test_a_lost_sum_is_an_error_and_another_arithmetic_has_no_ranks(monkeypatch):
    from engines.bundled.gpu.tensorcore.parallel import EmulatedRanks

    whole = arithmetic(monkeypatch, SHAPES["three KV heads"])
    with pytest.raises(KeyError, match="chunk 2 of 3: no rank summed it"):
        EmulatedRanks(whole, 2, 10, lambda sums, *_: dict(sums[0])).logits(STEPS[0])
    with pytest.raises(ValueError, match="k_order=tree alone"):
        EmulatedRanks(arithmetic(monkeypatch, SHAPES["three KV heads"], k_order="chain"), 2, 10)


def test_the_order_is_in_the_fingerprint_and_moves_bits(monkeypatch):
    tree, plain = (
        arithmetic(monkeypatch, {"num_key_value_heads": 4, "num_hidden_layers": 1}, k_order=order)
        for order in ("tree", "chain")
    )
    assert (tree.definition, plain.definition) == (4, 3)
    assert tree.describe()["chunk_width"].startswith("4 chunks of K in attention output and down projection")
    assert plain.describe()["chunk_width"] == "the whole of K"
    x, weight = normal(1, 8, 64).float(), tree.weights.layers[0].attention_out.float()  # float32: no rounding hides it
    by_tree, by_chain = (made.operators(1).shared(x, weight) for made in (tree, plain))
    assert (bits(by_tree) != bits(by_chain)).any()
    assert (bits(by_tree) == bits(twin(x, weight, 16))).all()
    free = arithmetic(monkeypatch, {"num_hidden_layers": 1}, arithmetic="free")
    assert (free.tree, free.definition) == (None, 0)


def test_logits_by_the_tree_do_not_depend_on_pieces_or_companions(monkeypatch):
    changes = SHAPES["three KV heads"]
    whole = arithmetic(monkeypatch, changes).logits(step([(PROMPT[:18], 0, [3, 1, 5])]))
    pieces = arithmetic(monkeypatch, changes)
    last = [pieces.logits(one) for one in STEPS][-1]
    assert (bits(last) == bits(whole)).all()


def test_the_start_up_test_takes_the_table_or_one_cut(monkeypatch):
    from engines.bundled.gpu.tensorcore import selftest, tree

    made = arithmetic(monkeypatch, {"num_key_value_heads": 4, "num_hidden_layers": 1})
    monkeypatch.setattr(tree, "ONE_CUT", tree.CUTS[0][1])
    monkeypatch.setattr(selftest, "row_sizes", lambda _: (1, 3))
    taken, facts = selftest.choose_tree(4, made.weights, 3)
    assert facts == {"gpu_tree": taken.name, "gpu_tree_test": "equal in 2 shapes, 4 products, 512 elements"}
    assert taken.name == "tree, cuts by rows"
    real = tree.tree_product
    monkeypatch.setattr(tree, "tree_product", lambda x, w, width, cut, dtype: real(
        x, w, width, cut, dtype) + (cut.held == 4))  # fmt: skip
    taken, facts = selftest.choose_tree(4, made.weights, 3)
    assert facts["gpu_tree"] == taken.name == "tree, one cut"
    assert "refused" in facts["gpu_tree_test"]


def test_ranks_in_processes_exchange_what_each_of_them_summed():
    from engines.bundled.gpu.tensorcore.exchange import RankExchange
    from engines.bundled.gpu.tensorcore.parallel import complete
    from engines.bundled.parallel.group import Group, find_store, open_store

    chunks, like = (Span(0, 3), Span(3, 5), Span(5, 5)), torch.zeros(2, 4)  # the third rank holds nothing
    total = torch.randn(5, 2, 4)
    store = open_store(0, 3, 60.0)

    def meet(rank: int) -> torch.Tensor:
        group = Group(store if rank == 0 else find_store(store.port, 3, 60.0), rank, 3, "gloo", 60.0)
        mine = [
            {Span(0, 2): total[0] + total[1], Span(2, 3): total[2]},
            {Span(3, 4): total[3], Span(4, 5): total[4]},
            {},
        ][rank]
        exchange = RankExchange(group, chunks)
        found = complete(5, exchange([mine], 5, like))
        assert exchange.bytes == 2 * 2 * 4 * 4
        group.close()
        return found

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(meet, range(3)))
    expected = ((total[0] + total[1]) + (total[2] + total[3])) + total[4]
    assert all(torch.equal(found, expected) for found in results)


class Lockstep:
    """A group of ranks in threads of this process: one computes at a time, for the interpreter knows no threads."""

    spans_cards = False
    lock = threading.Lock()

    def __init__(self, rank: int, ranks: int, given: dict, barrier: threading.Barrier) -> None:
        self.rank, self.ranks, self._given, self._barrier = rank, ranks, given, barrier

    def gather(self, part: np.ndarray) -> np.ndarray:
        self._given[self.rank] = part
        self.lock.release()
        self._barrier.wait(60)
        everyone = np.stack([self._given[rank] for rank in range(self.ranks)])
        self._barrier.wait(60)
        self.lock.acquire()
        return everyone


def test_ranks_that_load_their_part_alone_give_the_bits_of_one_process(monkeypatch):
    from engines.bundled.gpu.tensorcore.parallel import take_shard
    from engines.bundled.gpu.tensorcore.rank import RankArithmetic
    from engines.bundled.gpu.tensorcore.weights import from_model

    whole = arithmetic(monkeypatch, SHAPES["three KV heads"], num_pages=10)
    model = resized(**SHAPES["three KV heads"])
    expected = [whole.logits(one).clone() for one in STEPS[:2]]
    given, barrier = {}, threading.Barrier(2)
    free = dataclasses.replace(whole.engine, arithmetic="free")

    def one(rank: int):
        group = Lockstep(rank, 2, given, barrier)
        with group.lock:
            made = RankArithmetic(
                model.config, whole.engine, from_model(model, "cpu"), load("auto", "auto"), "cpu", group
            )
            shard = take_shard(whole, 3, made.mine, 10)
            assert torch.equal(made.weights.layers[0].qkv, shard.layers[0].qkv)
            assert torch.equal(made.weights.layers[0].down, shard.layers[0].down)
            (counts,) = made.counts()
            embedding = model.config.vocab_size * model.config.hidden_size * 2
            assert counts["weight_bytes"] == embedding + shard.bytes
            control = RankArithmetic(model.config, free, from_model(model, "cpu"), made.kernels, "cpu", group)
            return [made.logits(batch).clone() for batch in STEPS[:2]], control.logits(STEPS[0])

    with ThreadPoolExecutor(2) as pool:
        for found, control in pool.map(one, range(2)):
            assert all((bits(a) == bits(b)).all() for a, b in zip(found, expected, strict=True))
            assert (bits(control) != bits(expected[0])).any()


@pytest.mark.parametrize(
    ("changes", "device", "reason"),
    [
        ({"k_order": "chain"}, "cuda", "set k_order=tree"),
        ({"expert_parallel_size": 2}, "cuda", "experts are not split"),
        ({}, "cpu", "bfloat16 runs on an NVIDIA GPU alone"),
        ({"tensor_parallel_size": 3}, "cuda", "tensor_parallel_size 3: this model is split over 2 ranks at most"),
        ({"collectives": "nccl"}, "cuda", "2 ranks need a GPU each, 0 are here"),
        ({}, "cuda", "sees 0 GPUs"),
    ],
)
def test_ranks_that_cannot_be_had_are_refused(monkeypatch, changes, device, reason):
    from engines.bundled.parallel.ranks import open_parallel

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    config = dataclasses.replace(CONFIG, **{"tensor_parallel_size": 2, **changes})
    with pytest.raises(NotSupported, match=reason):
        open_parallel("tiny", family(), config, device=device)
