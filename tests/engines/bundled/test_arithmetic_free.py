"""`free` must differ from itself under every control, at every model size, and be repeatable otherwise."""

import numpy as np
import pytest
from arithmetic_cases import bits, options, pages_for, same, step, tiny_model, tokens

from engines.bundled import twin
from engines.bundled.arithmetic import open_arithmetic
from engines.bundled.arithmetic.free import free_order, split_width

MODELS = {
    "hidden 64, 4/2": tiny_model(),
    "hidden 64, 3/1": tiny_model(heads=3, kv_heads=1, head_dim=32, inner=96, seed=1),
    "one layer of SmolLM2": tiny_model(heads=9, kv_heads=3, head_dim=64, hidden=576, inner=1536, layers=1, seed=2),
}
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def opened(model, **changes):
    return open_arithmetic(model, options(arithmetic="free", **changes))


def prefill_then_decode(model, chunk, companions=(), **changes):
    """Logits of 4 decoded positions of one sequence of 45 tokens, with companions of other lengths beside it."""
    arithmetic, table = opened(model, **changes), pages_for(options(), rows=4)
    ids = [tokens(7, 45), *(tokens(20 + i, n) for i, n in enumerate(companions))]
    for row, sequence in enumerate(ids):
        stop = len(sequence) - 4
        for start in range(0, stop, chunk):
            arithmetic.forward(step([(row, start, sequence[start : min(start + chunk, stop)])], table))
    return [
        arithmetic.forward(step([(r, len(s) - 4 + i, s[len(s) - 4 + i :][:1]) for r, s in enumerate(ids)], table))[0]
        for i in range(4)
    ]


CONTROLS = {
    "batch": {"companions": (30,)},
    "larger batch": {"companions": (30, 12, 44)},
    "longest row": {"companions": (340,)},
    "threads": {"threads": 2},
    "tuning": {"tuning": 1},
    "chunk": {"chunk": 16},
    "one token at a time": {"chunk": 1},
}


@every_model
def test_the_same_twice_is_the_same(model):
    first = prefill_then_decode(model, 64)
    assert same(np.stack(first), np.stack(prefill_then_decode(model, 64)))


@every_model
@pytest.mark.parametrize("control", CONTROLS)
def test_every_control_fires_at_every_position(model, control):
    reference = prefill_then_decode(model, 64)
    varied = prefill_then_decode(model, **({"chunk": 64} | CONTROLS[control]))
    for a, b in zip(reference, varied, strict=True):
        assert (bits(a) != bits(b)).any()
        assert np.abs(a - b).max() < 1e-3


@every_model
def test_the_longest_row_moves_attention_alone(model):
    orders = [free_order(model.config, rows=2, longest=n, threads=1, tuning=0) for n in (40, 340)]
    assert orders[0].qkv == orders[1].qkv
    assert orders[0].key_chunk < orders[1].key_chunk


@every_model
def test_free_computes_the_order_it_names(model):
    ids = tokens(3, 20)
    order = free_order(model.config, rows=20, longest=20, threads=2, tuning=1)
    found = opened(model, threads=2, tuning=1).forward(step([(0, 0, ids)], pages_for()))
    rows = slice(0, 20) if model.config.hidden_size == 64 else slice(0, 1)
    if model.config.hidden_size == 64:
        assert same(found[rows], twin.forward(model, ids, order))
    assert not same(found, open_arithmetic(model, options()).forward(step([(0, 0, ids)], pages_for())))


@pytest.mark.parametrize("columns", [64, 96, 576, 1536, 4096])
def test_widths_follow_rows_threads_and_tuning(columns):
    def width(rows=1, threads=1, tuning=0):
        return split_width(columns, rows=rows, threads=threads, tuning=tuning)

    for rows in (1, 2, 4, 8, 16, 64):
        assert 1 <= width(rows) <= columns
        assert width(rows) != width(2 * rows)
        assert len({width(rows, threads=n) for n in (1, 2, 4)}) == 3
        assert len({width(rows, tuning=n) for n in (0, 1, 2)}) == 3


def test_free_says_that_it_has_no_definition():
    facts = opened(MODELS["hidden 64, 4/2"]).describe()
    assert (facts["definition"], facts["arithmetic"], facts["chunk_width"]) == (0, "free", "follows the step")
