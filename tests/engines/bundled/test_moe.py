"""The mixture of experts: router, mixing and the whole model against the twin; batches do not matter."""

import numpy as np
import pytest
from arithmetic_cases import ALL_KERNELS, normal, options, pages_for, same, step, tokens

from engines.bundled import twin
from engines.bundled.arithmetic import open_arithmetic
from engines.bundled.kernels.library import load
from engines.bundled.models.catalogue import open_source

MODEL = open_source("tiny-moe").model()
EVERYTHING = (*ALL_KERNELS, load("auto", "none"))
NAMES = [f"{kernels.isa} {kernels.compiler.split(':')[0].split()[0]}" for kernels in EVERYTHING]


@pytest.fixture(params=EVERYTHING, ids=NAMES)
def kernels(request):
    return request.param


def router_logits(experts):
    logits = normal(7, 40, experts, scale=3.0)
    logits[0] = 1.0  # all the same
    logits[1, ::2] = logits[1, 0]  # some the same
    logits[2] = np.where(np.arange(experts) % 2, 0.0, -0.0)  # the same, in other bits
    logits[3] = -200.0
    logits[3, -1] = 0.0  # one takes all: the rest weigh zero
    return logits


@pytest.mark.parametrize(("experts", "k"), [(8, 4), (8, 8), (8, 1), (60, 4), (128, 8)])
def test_the_router_is_the_twins(kernels, experts, k):
    logits = router_logits(experts)
    ids, weights = kernels.route(logits, k, 2)
    expected_ids, expected_weights = twin.route(logits, k)
    assert (ids == expected_ids).all()
    assert same(weights, expected_weights)
    assert ids[0].tolist() == ids[2].tolist() == list(range(k))  # ties go to the lower ids
    assert (np.diff(ids, axis=1) > 0).all()


def test_weights_sum_to_one_and_follow_the_softmax():
    logits = router_logits(8)[4:]
    ids, weights = twin.route(logits, 4)
    wide = np.exp(logits.astype(np.float64))
    best = np.sort(np.argsort(-wide, axis=1)[:, :4], axis=1)
    chosen = np.take_along_axis(wide, best, axis=1)
    assert (ids == best).all()
    np.testing.assert_allclose(weights, chosen / chosen.sum(axis=1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("size", [1, 15, 64, 65])
def test_mixing_is_the_twins(kernels, size):
    outputs, weights = normal(1, 9, 4, size), normal(2, 9, 4)
    assert same(kernels.combine(outputs, weights, 2), twin.mix(outputs, weights))


def test_how_many_experts_is_checked(kernels):
    for k in (0, 9):
        with pytest.raises(ValueError, match=f"experts per token: expected 1 to 8, got {k}"):
            kernels.route(router_logits(8), k, 1)


def test_the_model_is_the_twins():
    ids = tokens(5, 21)
    assert same(open_arithmetic(MODEL, options()).forward(step([(0, 0, ids)], pages_for())), twin.forward(MODEL, ids))


def test_every_expert_answers_and_none_answers_always():
    """Else independence of the batch would show little."""
    hidden = MODEL.weights["model.embed_tokens.weight"][tokens(3, 200)]
    logits = twin.linear(hidden, MODEL.weights["model.layers.0.mlp.gate.weight"], 32)
    counts = np.bincount(twin.route(logits, 4)[0].reshape(-1), minlength=8)
    assert counts.min() > 20
    assert counts.max() < 180


@pytest.mark.parametrize("arithmetic", ["portable", "free"])
def test_who_else_an_expert_answers_moves_no_bit_of_portable(arithmetic):
    table = pages_for(rows=6)
    together = open_arithmetic(MODEL, options(arithmetic=arithmetic))
    batch = step([(row, 0, tokens(row, 3 + 5 * row)) for row in range(6)], table)
    found = np.split(together.forward(batch), np.cumsum([3 + 5 * row for row in range(6)])[:-1])
    alone = open_arithmetic(MODEL, options(arithmetic=arithmetic))
    equal = [same(alone.forward(step([(row, 0, tokens(row, 3 + 5 * row))], table)), found[row]) for row in range(6)]
    assert all(equal) is (arithmetic == "portable")


def test_the_fallback_without_a_compiler_is_the_same():
    ids = tokens(6, 9)
    arms = [open_arithmetic(MODEL, options(compiler=name)) for name in ("auto", "none")]
    assert same(*(arm.forward(step([(0, 0, ids)], pages_for())) for arm in arms))
