"""The rope table: correctly rounded, the same everywhere, by digest."""

import hashlib
import math

import numpy as np
import pytest
from arithmetic_cases import same

from engines.bundled.arithmetic import rope
from engines.bundled.arithmetic.rope import exact_cosine, exact_sine, inverse_frequencies, rope_table

DIGESTS = {
    (8192, 64, 10000.0): "6670eac42155f3cb37ba4df27467a049c55c8dcf393886e5cff7a623027e6181",
    (2048, 128, 500000.0): "52322290bc1f0818ccfe5fd41ecd0b4caa14aa3435901c3da657077287d65526",
    (1024, 16, 10000.0): "5a8e8fac1ac3bb9abf57c99c0313e913dd16523d65809d3d38703454dd501391",
}


@pytest.mark.parametrize("key", DIGESTS)
def test_digest(key):
    table = rope_table(*key)
    assert table.shape == key[:2]
    assert hashlib.sha256(table.astype("<f4").tobytes()).hexdigest() == DIGESTS[key]


def test_table_is_what_integers_say():
    table, frequency = rope_table(8192, 64, 10000.0), inverse_frequencies(64, 10000.0)
    random = np.random.default_rng(0)
    for position, i in zip(random.integers(0, 8192, 400), random.integers(0, 32, 400), strict=True):
        angle = float(np.float32(position) * frequency[i])
        assert same(table[position, i], exact_cosine(angle))
        assert same(table[position, 32 + i], exact_sine(angle))


def test_integers_decide_where_float64_cannot(monkeypatch):
    expected = rope_table(64, 16, 10000.0)
    monkeypatch.setattr(rope, "_RELATIVE", 2.0**-20)  # most elements now count as near a tie
    rope_table.cache_clear()
    assert same(rope_table(64, 16, 10000.0), expected)
    rope_table.cache_clear()


def test_exact_functions():
    for angle in (0.0, 0.5, 1.0, 1.5707963705062866, 3.0, 4.0, 5.5, 7.0, 8191.0, 131071.0):
        angle = float(np.float32(angle))
        assert abs(float(exact_cosine(angle)) - math.cos(angle)) < 1e-7
        assert abs(float(exact_sine(angle)) - math.sin(angle)) < 1e-7
    assert same(exact_cosine(1.5707963705062866), np.float32(-4.371139000186241e-08))


def test_frequencies_are_those_of_transformers():
    import torch

    for dim in (16, 32, 64, 128):
        theirs = 1.0 / (10000.0 ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
        assert np.abs(inverse_frequencies(dim, 10000.0) / theirs.numpy() - 1).max() < 2e-7


def test_the_table_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        rope_table(8, 16, 10000.0)[0, 0] = 2
