"""`tensorcore` in Triton's interpreter at small shapes, against a twin and against itself cut otherwise; no GPU."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
from gpu_cases import family, step
from matrix_unit import VARIABLE, attention, chain, import_interpreted
from presence import missing

try:
    import_interpreted()
except ImportError:
    missing("triton", "Triton is not installed; the extra `test` brings it on Linux", module=True)

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a folder up, where the engine's tests lie

from engine_cases import evidence, greedy, request, run_all

from engines.bundled.config import EngineConfig
from engines.bundled.kernels.library import load
from engines.bundled.models.tiny import TinySource

KEYS = 16  # of a split, here, so that short sequences have several
STEP = 8  # of them are scored at a time
MODEL = TinySource().model()
ONE_LAYER = dataclasses.replace(MODEL.config, num_hidden_layers=1)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")  # read at each launch, too


def bits(tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.int16).numpy()


def normal(seed: int, *shape: int, spread: float = 1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread).to(torch.bfloat16)


@pytest.mark.parametrize("tile", [(16, 16, 16), (16, 32, 64), (32, 16, 32)])
@pytest.mark.parametrize("rows", [1, 5, 18])
def test_a_product_is_one_chain_over_k_for_every_tile_and_number_of_rows(tile, rows):
    from engines.bundled.gpu.tensorcore.linear import multiply
    from engines.bundled.gpu.tensorcore.tiles import Tile

    x, weight = normal(1, 18, 72).float(), normal(2, 40, 72).float()  # float32 out: no rounding hides an order
    found = multiply(x[:rows], weight, Tile(*tile, 1, 4))
    twin = torch.from_numpy(chain(x.numpy(), weight.numpy()))
    assert (bits(found) == bits(twin[:rows])).all()
    rounded = multiply(x[:rows].to(torch.bfloat16), weight.to(torch.bfloat16), Tile(*tile, 1, 4))
    assert (bits(rounded) == bits(twin[:rows].to(torch.bfloat16))).all()


def test_free_splits_k_by_the_rows():
    from engines.bundled.gpu.tensorcore.linear import Split

    x, weight = normal(1, 24, 128), normal(2, 40, 128)
    whole, few = Split(0)(x, weight), Split(0)(x[:4], weight)
    assert (bits(few) != bits(whole[:4])).any()
    assert (bits(Split(3)(x[:4], weight)) != bits(few)).any()
    exact = x.double() @ weight.double().t()
    assert (whole.double() - exact).abs().max() < 0.01 * exact.abs().max()


def arithmetic(name: str = "tensorcore", monkeypatch=None, *, pages: int = 16, shape=ONE_LAYER, model=MODEL):
    from engines.bundled.gpu.tensorcore import forward, operators, tiles
    from engines.bundled.gpu.tensorcore.linear import Tiled
    from engines.bundled.gpu.tensorcore.weights import from_model

    if monkeypatch is not None:
        monkeypatch.setattr(forward, "KEYS", KEYS)
        monkeypatch.setattr(operators, "FORM", operators.FORM._replace(keys=KEYS, step=STEP, rows=16))
        monkeypatch.setattr(tiles, "NARROW", ((2, tiles.Tile(16, 32, 32, 1, 4)), (99, tiles.Tile(32, 64, 16, 1, 4))))
    config = EngineConfig(
        arithmetic=name, max_num_seqs=8, max_num_batched_tokens=64, page_size=8, num_pages=pages, threads=1, isa="auto",
        compiler="auto", tuning=0, dtype="bfloat16",
    )  # fmt: skip
    made = forward.TensorCoreArithmetic(shape, config, from_model(model, "cpu"), load("auto", "auto"), "cpu")
    made.linear = Tiled(by_rows=True)
    for keys, values in made.caches if name != "native" else ():  # what nobody wrote must not be read
        keys.fill_(float("nan"))
        values.fill_(float("nan"))
    return made


PROMPT = [(37 * i + 11) % 500 for i in range(21)]


def test_logits_do_not_depend_on_pieces_pages_or_companions(monkeypatch):
    whole = arithmetic(monkeypatch=monkeypatch).forward(step([(PROMPT, 0, [3, 1, 5])]))[0]
    pieces = arithmetic(monkeypatch=monkeypatch)
    pieces.forward(step([(PROMPT[:7], 0, [0, 2, 9]), ([5, 6, 7], 0, [4])]))
    pieces.forward(step([([8], 3, [4]), (PROMPT[7:18], 7, [0, 2, 9])]))
    last = pieces.forward(step([([9], 4, [4]), (PROMPT[18:], 18, [0, 2, 9]), ([1, 2], 0, [6])]))
    again = pieces.forward(step([(PROMPT[20:], 20, [0, 2, 9])]))[0]  # alone, as a step of decoding
    assert (last[1].view(np.int32) == whole.view(np.int32)).all()
    assert (again.view(np.int32) == whole.view(np.int32)).all()
    assert len(set(whole.tolist())) > 50


def test_logits_in_a_window_do_not_depend_on_pieces_and_are_not_those_of_all_keys(monkeypatch):
    shape = dataclasses.replace(ONE_LAYER, windows=(5,))  # of keys in two chunks, and in one
    whole = arithmetic(monkeypatch=monkeypatch, shape=shape).forward(step([(PROMPT, 0, [3, 1, 5])]))[0]
    pieces = arithmetic(monkeypatch=monkeypatch, shape=shape)
    pieces.forward(step([(PROMPT[:18], 0, [0, 2, 9])]))
    pieces.forward(step([(PROMPT[18:20], 18, [0, 2, 9]), ([5], 0, [4])]))
    again = pieces.forward(step([(PROMPT[20:], 20, [0, 2, 9])]))[0]  # alone, as a step of decoding
    assert (again.view(np.int32) == whole.view(np.int32)).all()
    plain = arithmetic("native", monkeypatch, shape=shape)
    native = plain.forward(step([(PROMPT, 0, [0, 2, 9])]))[0]
    alone = plain.forward(step([(PROMPT[20:], 20, [0, 2, 9])]))[0]
    everything = arithmetic("native", monkeypatch).forward(step([(PROMPT, 0, [0, 2, 9])]))[0]
    near = 0.08 * np.abs(native).max()
    assert np.abs(native - whole).max() < near
    assert np.abs(native - alone).max() < near
    assert np.abs(native - everything).max() > near


def test_experts_are_those_of_each_row_and_do_not_depend_on_company(monkeypatch):
    model = family(num_hidden_layers=1, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=48)
    kind = {"monkeypatch": monkeypatch, "shape": model.config, "model": model}
    whole = arithmetic(**kind).forward(step([(PROMPT[:6], 0, [3])]))[0]
    pieces = arithmetic(**kind)
    pieces.forward(step([(PROMPT[:5], 0, [3]), ([5, 6], 0, [4])]))
    last = pieces.forward(step([([8], 2, [4]), (PROMPT[5:6], 5, [3])]))[1]
    assert (last.view(np.int32) == whole.view(np.int32)).all()
    native = arithmetic("native", **kind).forward(step([(PROMPT[:6], 0, [3])]))[0]
    assert np.abs(native - whole).max() < 0.08 * np.abs(native).max()


def test_routing_takes_the_lower_id_among_equals_and_weighs_as_the_twin_does():
    from engines.bundled import twin
    from engines.bundled.gpu.tensorcore.experts import route

    logits = normal(11, 3, 7)
    logits[1, [2, 5, 6]] = 4.0  # equal, and the largest: two of them
    logits[2] = 1.0
    found = route(logits, 2)
    ids, weights = twin.route(logits.float().numpy(), 2)
    assert found.expert.tolist() == ids.tolist()
    assert found.expert[1:].tolist() == [[2, 5], [0, 1]]
    assert np.abs(found.weight.numpy() - weights).max() < 1e-6


def test_pages_are_read_and_written_in_the_shapes_of_the_cpu(monkeypatch):
    made, other = arithmetic(monkeypatch=monkeypatch), arithmetic(monkeypatch=monkeypatch)
    generator = torch.Generator().manual_seed(3)
    for pools in made.caches:
        for pool in pools:
            pool.copy_(torch.randn(pool.shape, generator=generator))
    for mine, theirs, (keys, values) in zip(made.pages, other.pages, made.caches, strict=True):
        assert mine.keys.shape == (16, 2, 16, 8)
        assert mine.values.shape == (16, 2, 8, 16)
        assert mine.keys[[3]][0, 1, 5, 2] == float(keys[3 * 8 + 2, 1, 5])
        assert mine.values[[3]][0, 1, 2, 5] == float(values[3 * 8 + 2, 1, 5])
        theirs.keys[[7, 2]], theirs.values[[7, 2]] = mine.keys[[3, 4]], mine.values[[3, 4]]
        assert np.array_equal(theirs.keys[[7, 2]], mine.keys[[3, 4]])
        assert np.array_equal(theirs.values[[2]], mine.values[[4]])


def test_an_engine_over_it_rolls_a_fast_path_back_and_gives_what_it_gives_without(monkeypatch):
    from engines.bundled.engine import Engine
    from engines.bundled.fast import open_fast_path

    def run(rollback: str):
        made = arithmetic(monkeypatch=monkeypatch)
        config = dataclasses.replace(made.engine, rollback=rollback, draft_length=2)
        kernels = load("auto", "auto")
        fast = open_fast_path(MODEL, config, kernels, made)
        engine = Engine(ONE_LAYER, config, made, kernels, str, fast=fast)
        asked = [request(f"r{i}", PROMPT[i : i + 4], greedy(max_tokens=3), logits_digest=True) for i in range(2)]
        return [evidence(sequence) for sequence in run_all(engine, asked)], fast

    (plain, _), (rolled, fast) = run("off"), run("all")
    assert rolled == plain
    assert fast.tokens > 0
    assert fast.arithmetic.name == "free"


def test_free_depends_on_pieces(monkeypatch):
    made = arithmetic("free", monkeypatch)
    whole = made.forward(step([(PROMPT[:4], 0, [3])]))
    made.forward(step([(PROMPT[:3], 0, [3])]))
    last = made.forward(step([(PROMPT[3:4], 3, [3])]))
    assert (whole.view(np.int32) != last.view(np.int32)).any()
    assert np.abs(whole - last).max() < 0.1 * np.abs(whole).max()


def test_the_three_arithmetics_agree_but_for_rounding(monkeypatch):
    batch = step([(PROMPT[:3], 0, [3]), ([4], 0, [7])])
    tensorcore, free, native = (
        arithmetic(name, monkeypatch).forward(batch) for name in ("tensorcore", "free", "native")
    )
    scale = np.abs(native).max()
    assert np.abs(tensorcore - native).max() < 0.08 * scale
    assert np.abs(free - native).max() < 0.08 * scale
    assert (tensorcore.argmax(1) == native.argmax(1)).all()


def test_rows_of_padding_change_nothing(monkeypatch):
    made = arithmetic(monkeypatch=monkeypatch)
    batch = step([(PROMPT[:4], 0, [3])])
    plain = made.forward(batch)
    before = [keys.clone() for keys, _ in made.caches]
    monkeypatch.setattr(type(made.linear), "padded", lambda self, rows: rows + 2)
    assert (made.forward(batch).view(np.int32) == plain.view(np.int32)).all()
    for (keys, _), old in zip(made.caches, before, strict=True):
        assert (bits(keys) == bits(old)).all()


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize(("step", "rows"), [(8, 32), (16, 64), (8, 16)])
def test_attention_is_softmax_over_the_own_keys_in_tiles_and_alone(window, step, rows):
    from engines.bundled.gpu.tensorcore.attention import attend
    from engines.bundled.gpu.tensorcore.layout import padded_chunks, padding_tiles
    from engines.bundled.gpu.tensorcore.operators import Heads, Rows
    from engines.bundled.gpu.tensorcore.tiles import FORM

    form = FORM._replace(step=step, rows=rows, merged=2)
    heads, count, padding = Heads(heads=3, kv=1, dim=16, page=4, keys=KEYS, form=form), 37, 2
    assert (heads.group, heads.tile_tokens) == (4, rows // 4)
    qkv, none = normal(5, count + padding, 5 * 16).float() * 1.1, torch.zeros(0, dtype=torch.int32)
    pages = torch.tensor([[4, 0, 3, 9, 1, 6, 2, 8, 5, 7]], dtype=torch.int32)
    slots = torch.stack([pages[0, i // 4] * 4 + i % 4 for i in range(count)]).long()
    cache = tuple(torch.full((40, 1, 16), float("nan")) for _ in range(2))
    for pool, first in zip(cache, (3 * 16, 4 * 16), strict=True):
        pool[slots] = qkv[:count, first : first + 16].view(count, 1, 16)
    index = torch.arange(count + padding, dtype=torch.int32)
    position = torch.where(index < count, index, -1)
    common = {"token": index, "sequence": torch.zeros_like(index), "position": position, "pages": pages, "pieces": ()}
    tiles = torch.from_numpy(np.concatenate([padding_tiles(0, count, rows // 4), padding_tiles(count, len(index), 4)]))
    first, of_tile = tiles[:, 0].contiguous(), tiles[:, 1].contiguous()
    tiled = attend(qkv, Rows(**common, alone=none, tile_token=first, tile_count=of_tile,
                             tile_sequence=torch.zeros_like(first), chunks=1), cache, heads, window)  # fmt: skip
    some = torch.cat([index[:KEYS], index[KEYS::5], index[count - 2 :]])
    alone = attend(qkv, Rows(**common, alone=some, tile_token=none, tile_count=none, tile_sequence=none,
                             chunks=padded_chunks(count, KEYS)), cache, heads, window)  # fmt: skip
    short = attend(qkv, Rows(**common, alone=index[:KEYS], tile_token=none, tile_count=none, tile_sequence=none,
                             chunks=1), cache, heads, window)  # fmt: skip
    assert (bits(tiled[some.long()]) == bits(alone[some.long()])).all()
    assert (bits(short[:KEYS]) == bits(alone[:KEYS])).all()
    assert (bits(tiled[count:]) == 0).all()  # of padding: +0.0
    if not window:
        q, k, v = (x.numpy() for x in qkv[:count].view(count, 5, 16).split([3, 1, 1], 1))
        for row in (0, 7, 8, 20, 36):
            found = tiled[row].view(3, 16).numpy()
            for head in range(3):
                twin = attention(q[row, head], k[: row + 1, 0], v[: row + 1, 0], heads.scale, KEYS, step)
                assert (found[head].view(np.int32) == twin.view(np.int32)).all()
    q, k, v = (x.double().transpose(0, 1) for x in qkv[:count].view(count, 5, 16).split([3, 1, 1], 1))
    k, v = k.repeat_interleave(3, 0), v.repeat_interleave(3, 0)
    seen = index[None, :count] <= index[:count, None]
    if window:
        seen &= index[None, :count] > index[:count, None] - window
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1)
    assert (tiled[:count].double() - exact.reshape(count, -1)).abs().max() < 1e-5


def test_the_pick_is_the_lowest_id_among_equals_and_moves_rows_on():
    from engines.bundled.gpu.tensorcore.operators import pick

    logits = normal(7, 4, 9000)
    logits[0, [17, 4097, 8999]] = 9.0
    logits[2, 5000] = float("nan")
    logits[3, 1] = float("inf")
    token = torch.zeros(4, dtype=torch.int32)
    position = torch.tensor([5, -1, 7, 8], dtype=torch.int32)
    pick(logits, token, position)
    assert token.tolist() == [17, int(logits[1].float().argmax()), -1, -1]
    assert position.tolist() == [6, -1, 8, 9]


def test_heads_are_normed_before_they_are_turned():
    from engines.bundled.gpu.tensorcore import operators
    from engines.bundled.gpu.tensorcore.operators import Heads, Rows

    heads, none = Heads(heads=2, kv=1, dim=16, page=4), torch.zeros(0, dtype=torch.int32)
    qkv, gains = normal(8, 1, 64, spread=3.0), (normal(9, 16), normal(10, 16))
    table = torch.zeros((4, 16))
    table[3, :8] = 1.0  # cosines of one, sines of zero
    rows = Rows(token=none, sequence=none.new_zeros(1), position=none.new_full((1,), 3), pages=none.new_zeros((1, 1)),
                alone=none, tile_token=none, tile_count=none, tile_sequence=none, pieces=(), chunks=1)  # fmt: skip
    cache = tuple(torch.zeros((5, 1, 16), dtype=torch.bfloat16) for _ in range(2))
    before = qkv.clone()
    operators.rope(qkv, table, rows, cache, heads, gains, 1e-6)
    expected = [torch.nn.functional.rms_norm(before[0, i * 16 : i * 16 + 16].float(), (16,), gains[i > 1].float(), 1e-6)
                for i in range(3)]  # fmt: skip
    assert (qkv[0, :32].float() - torch.cat(expected[:2])).abs().max() < 0.02
    assert (cache[0][3, 0].float() - expected[2]).abs().max() < 0.02
    assert (bits(cache[1][3, 0]) == bits(before[0, 48:])).all()
    assert (cache[0][4] == 0).all()
