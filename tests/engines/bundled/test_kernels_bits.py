"""Every build of the kernels against the twin, bit for bit."""

import os
import subprocess
import sys

import numpy as np
import pytest
from arithmetic_cases import ALL_KERNELS, normal, same
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.bundled import twin
from engines.bundled.kernels.interface import Pages, Rows
from engines.bundled.kernels.selfcheck import SPREADS, values

ids = [f"{k.isa}-{k.compiler.split()[0].rstrip(':')}" for k in ALL_KERNELS]
every_build = pytest.mark.parametrize("kernels", ALL_KERNELS, ids=ids)


def product(kernels, x, weight, width, threads=1, add=None):
    out = np.full((len(x), len(weight)), np.nan, np.float32) if add is None else add.copy()
    call = kernels.linear if add is None else kernels.linear_add
    call(x, kernels.pack(weight, threads), width, threads, out)
    return out


def four_bit(seed, rows, columns, kind="nibbles"):
    """Weights as a 4-bit (scale, minimum) or 8-bit (scale) block format gives them."""
    r = np.random.default_rng(seed)
    blocks = (rows, columns // 32, 1)
    scale = r.uniform(0.001, 0.1, blocks).astype(np.float16).astype(np.float32)
    if kind == "bytes":
        q = r.integers(-127, 128, (rows, columns // 32, 32)).astype(np.float32)
        q[..., 0] = 127
        return (scale * q).reshape(rows, columns)
    low = r.uniform(-1, 0, blocks).astype(np.float16).astype(np.float32)
    q = r.integers(0, 16, (rows, columns // 32, 32)).astype(np.float32)
    q[..., 0], q[..., 1] = 0, 15
    return (scale * q + low).reshape(rows, columns)


@every_build
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(
    ("count", "outputs", "inputs", "width"),
    [(1, 47, 576, 192), (3, 100, 200, 64), (17, 5, 130, 512), (2, 49, 33, 1), (9, 16, 7, 3), (6, 96, 64, 64)],
)
def test_linear_equals_the_twin(kernels, spread, count, outputs, inputs, width):
    x, weight = values((count, inputs), 1, spread), values((outputs, inputs), 2, spread)
    expected = twin.linear(x, weight, width)
    assert same(product(kernels, x, weight, width), expected)
    assert same(product(kernels, x, weight, width, threads=2), expected)
    if spread == "subnormal":
        assert (np.abs(expected[expected != 0]) < 2.0**-126).any()


@every_build
def test_linear_has_no_limit_on_inputs(kernels):
    x, weight = normal(1, 2, 9001), normal(2, 3, 9001)
    assert same(product(kernels, x, weight, 16), twin.linear(x, weight, 16))


@every_build
def test_rows_do_not_depend_on_their_number(kernels):
    x, weight = normal(3, 40, 96), normal(4, 70, 96)
    alone = np.concatenate([product(kernels, x[i : i + 1], weight, 32) for i in range(40)])
    assert same(alone[:2], twin.linear(x[:2], weight, 32))
    for count in (*range(1, 20), 40):
        assert same(product(kernels, x[:count], weight, 32, threads=2), alone[:count])


@every_build
def test_negative_zero_survives(kernels):
    x, weight = np.full((1, 4), -1.0, np.float32), np.zeros((3, 4), np.float32)
    x[:, 2:], weight[1], weight[2] = 0.0, -0.0, 1.0
    assert same(product(kernels, x, weight, 2), twin.linear(x, weight, 2))
    held = np.full((1, 3), -0.0, np.float32)
    product_then_sum = held + twin.linear(x, weight, 2)
    assert same(product(kernels, x, weight, 2, add=held), product_then_sum)


@every_build
def test_a_short_last_chunk_is_not_padded(kernels):
    # Products that underflow leave -0.0 in a chain; one more fma with zeros would turn it into +0.0.
    x, weight = np.full((2, 5), -1e-30, np.float32), np.full((50, 5), 1e-30, np.float32)
    for width in (2, 4, 8):
        assert same(product(kernels, x, weight, width), np.full((2, 50), -0.0))


@every_build
@pytest.mark.parametrize("kind", ["nibbles", "bytes"])
def test_coded_weights_give_the_bits_of_their_floats(kernels, kind):
    weight = four_bit(7, 101, 192, kind)
    packed = kernels.pack(weight, 2)
    assert packed.kind == {"nibbles": 4, "bytes": 8}[kind]
    for count in (1, 4, 5, 30):
        x = normal(8, count, 192)
        for width in (64, 50):
            assert same(product(kernels, x, weight, width), twin.linear(x, weight, width))


@every_build
@pytest.mark.parametrize("where", [(0, 0), (50, 100), (100, 191)])
def test_a_weight_that_codes_cannot_give_back_stays_a_float(kernels, where):
    weight = four_bit(9, 101, 192)
    weight[where] = np.nextafter(weight[where], np.float32(np.inf))
    packed = kernels.pack(weight, 1)
    assert packed.kind == 0
    x = normal(10, 2, 192)
    assert same(product(kernels, x, weight, 64), twin.linear(x, weight, 64))


@every_build
@pytest.mark.parametrize("size", [1, 15, 16, 17, 64, 200])
@pytest.mark.parametrize("spread", SPREADS)
def test_rms_norm_equals_the_twin(kernels, size, spread):
    x, gain = values((5, size), 1, spread), normal(2, size)
    out = np.empty_like(x)
    for eps in (1e-5, 1e-40):
        kernels.rms_norm(x, gain, eps, 2, out)
        assert same(out, twin.rms_norm(x, gain, eps))


@every_build
def test_swiglu_equals_the_twin(kernels):
    x = normal(3, 4, 2 * 37, scale=30)
    x[0, :6] = [0.0, -0.0, 200.0, -200.0, 1e-40, -1e-40]
    out = np.empty((4, 37), np.float32)
    kernels.swiglu(x, 2, out)
    assert same(out, twin.swiglu(x[:, :37], x[:, 37:]))


def paged(page_size, kv_heads, dim, lengths, seed):
    """Rotated-looking K and V of several sequences in shuffled pages, and garbage with NaN in every other slot."""
    r = np.random.default_rng(seed)
    needed = [-(-n // page_size) for n in lengths]
    order = r.permutation(sum(needed) + 2).astype(np.int32)
    table = np.full((len(lengths), max(needed)), 2**30, np.int32)  # never read past a sequence's end
    pages = Pages(
        keys=np.full((len(order), kv_heads, dim, page_size), np.nan, np.float32),
        values=np.full((len(order), kv_heads, page_size, dim), np.nan, np.float32),
    )
    sequences = []
    for s, (n, used) in enumerate(zip(lengths, needed, strict=True)):
        table[s, :used], order = order[:used], order[used:]
        k, v = r.standard_normal((2, n, kv_heads, dim)).astype(np.float32)
        at = np.arange(n)
        pages.keys[table[s, at // page_size], :, :, at % page_size] = k
        pages.values[table[s, at // page_size], :, at % page_size] = v
        sequences.append((k, v))
    return pages, table, sequences


@every_build
@pytest.mark.parametrize(
    ("page_size", "heads", "kv_heads", "dim", "key_chunk", "window"),
    [
        (16, 3, 1, 64, 256, 0),
        (16, 3, 1, 64, 256, 300),  # reaches over the edge of a chunk
        (8, 4, 2, 16, 256, 0),
        (32, 5, 1, 24, 16, 0),
        (32, 5, 1, 24, 16, 21),  # more than a chunk, starting anywhere in one
        (5, 2, 2, 6, 48, 0),
        (5, 2, 2, 6, 48, 16),
        (1, 8, 2, 8, 256, 1),
        (4, 1, 1, 4, 32, 33),
    ],
)
def test_attention_equals_the_twin(kernels, page_size, heads, kv_heads, dim, key_chunk, window):
    lengths = [1, 2, 15, 16, 17, 40, 60, 130] if dim < 64 else [1, 255, 256, 257, 600]
    pages, table, sequences = paged(page_size, kv_heads, dim, lengths, seed=dim)
    qkv = normal(11, len(lengths), (heads + 2 * kv_heads) * dim)
    rows = Rows(
        sequence=np.arange(len(lengths), dtype=np.int32),
        position=np.array(lengths, np.int32) - 1,
        page_table=table,
    )
    group = heads // kv_heads
    expected = np.empty((len(lengths), heads * dim), np.float32)
    for s, (k, v) in enumerate(sequences):
        for h in range(kv_heads):
            q = qkv[s, h * group * dim : (h + 1) * group * dim].reshape(group, dim)
            part = twin.attention(q, k[:, h], v[:, h], key_chunk, window)
            expected[s, h * group * dim : (h + 1) * group * dim] = part.reshape(-1)
    for threads in (1, 2):
        out = np.full_like(expected, np.nan)
        kernels.attend(qkv, rows, pages, heads, key_chunk, window, threads, out)
        assert same(out, expected)


def test_a_window_is_attention_over_the_newest_keys_by_absolute_position():
    """In float64: what lies before the window has no weight, and what chunk it lies in does not matter."""
    q, keys, values = normal(1, 2, 8), normal(2, 50, 8), normal(3, 50, 8)
    for window in (1, 7, 16, 49, 50, 99):
        k, v = keys[-window:].astype(np.float64), values[-window:].astype(np.float64)
        weights = np.exp(q @ k.T / np.sqrt(8))
        expected = weights / weights.sum(1, keepdims=True) @ v
        assert np.abs(twin.attention(q, keys, values, 16, window) - expected).max() < 1e-6
    assert same(twin.attention(q, keys, values, 16, 50), twin.attention(q, keys, values, 16))


@every_build
def test_head_norms_and_biases_equal_the_twin(kernels):
    heads, kv_heads, dim = 3, 2, 24
    qkv, bias = normal(31, 9, (heads + 2 * kv_heads) * dim), normal(32, (heads + 2 * kv_heads) * dim)
    gains = normal(33, dim), normal(34, dim)
    expected = (qkv + bias).reshape(9, -1, dim)
    expected[:, :3] = twin.rms_norm(expected[:, :3], gains[0], 1e-6)
    expected[:, 3:5] = twin.rms_norm(expected[:, 3:5], gains[1], 1e-6)
    for threads in (1, 2):
        out = qkv.copy()
        kernels.add_bias(out, bias, threads)
        kernels.norm_heads(out, *gains, kv_heads, 1e-6, threads)
        assert same(out.reshape(9, -1, dim), expected)
    with pytest.raises(ValueError, match="expected whole heads of one gain's size, more than 8"):
        kernels.norm_heads(qkv, *gains, 4, 1e-6, 1)


@every_build
def test_rope_turns_and_stores(kernels):
    heads, kv_heads, dim, page_size = 3, 1, 6, 4
    qkv, angles = normal(12, 9, (heads + 2 * kv_heads) * dim), normal(13, 20, dim)
    rows = Rows(
        sequence=np.array([0] * 4 + [1] * 5, np.int32),
        position=np.array([7, 8, 9, 10, 0, 1, 2, 3, 4], np.int32),
        page_table=np.array([[6, 2, 4], [1, 5, 0]], np.int32),
    )
    pages = Pages(
        keys=np.zeros((7, 1, dim, page_size), np.float32), values=np.zeros((7, 1, page_size, dim), np.float32)
    )
    turned = qkv.reshape(9, -1, dim).copy()
    at = angles[rows.position][:, None]
    turned[:, :4] = twin.rotate(turned[:, :4], at[..., :3], at[..., 3:])
    kernels.rope_store(qkv, angles, rows, pages, 2)
    assert same(qkv.reshape(9, -1, dim), turned)
    page = rows.page_table[rows.sequence, rows.position // page_size]
    assert same(pages.keys[page, 0, :, rows.position % page_size], turned[:, 3])
    assert same(pages.values[page, 0, rows.position % page_size], turned[:, 4])
    assert np.count_nonzero(pages.keys) == np.count_nonzero(pages.values) == 9 * dim


SPECIAL = np.array(
    [
        0,
        -0.0,
        1,
        -87,
        np.nextafter(np.float32(-87), np.float32(-88)),
        88,
        89,
        1e38,
        -1e38,
        1e-40,
        np.inf,
        -np.inf,
        np.nan,
    ],
    np.float32,
)


@every_build
def test_exp_equals_the_twin(kernels):
    x = np.concatenate([SPECIAL, np.linspace(-90, 90, 40001, dtype=np.float32)])
    assert same(kernels.exp(x), twin.exp(x))
    assert kernels.exp(x)[:5].tolist() == [1, 1, twin.exp(np.float32([1]))[0], twin.exp(np.float32([-87]))[0], 0]


@every_build
def test_log_equals_the_twin(kernels):
    x = np.random.default_rng(0).integers(0, 2**31, 40000, dtype=np.uint32).view(np.float32)
    x = np.concatenate([SPECIAL, np.float32([-1]), x])
    assert same(kernels.log(x), twin.log(x))
    assert same(kernels.log(np.float32([1, 0, -0.0, np.inf])), np.float32([0, -np.inf, -np.inf, np.inf]))


@every_build
@pytest.mark.parametrize("size", [1, 15, 16, 768, 769, 5000])
def test_log_softmax_equals_the_twin(kernels, size):
    logits = normal(size, 60, size, scale=1)  # rows enough that a sum's last bit reaches the result in some
    logits[0] = -0.0
    logits[1, 0] = 200.0
    assert same(kernels.log_softmax(logits, 2), twin.log_softmax(logits))


@every_build
def test_check_finite_names_the_first_bad_row(kernels):
    logits = normal(1, 5, 33)
    assert kernels.check_finite(logits) == -1
    for bad in (np.nan, np.inf, -np.inf):
        wrong = logits.copy()
        wrong[4, 0] = wrong[2, 32] = bad
        assert kernels.check_finite(wrong) == 2


few_values = st.sampled_from([-3.5, -0.0, 0.0, 1e-40, 1.0, 2.0, 7.0, float("-inf")])


@settings(max_examples=60, deadline=None)
@given(st.lists(few_values, min_size=1, max_size=150), st.data())
def test_ranking_breaks_ties_by_id(row, data):
    logits = np.array([row], np.float32)
    k = data.draw(st.integers(0, len(row)))
    expected = sorted(range(len(row)), key=lambda i: (-(row[i] + 0.0), i))
    for kernels in ALL_KERNELS:
        assert kernels.top_k(logits, k)[0].tolist() == expected[:k]
        assert kernels.argmax(logits).tolist() == expected[:1]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(few_values, min_size=1, max_size=40).filter(lambda row: max(row) > -np.inf),
    st.sampled_from([0.01, 0.7, 1.0, 3.0, 1e30]),
    st.sampled_from([0, 1, 2, 10, 1000]),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-6]),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    st.sampled_from([0, 2**22, 2**23, 3 * 2**22]) | st.integers(0, 2**24 - 1),
)
def test_draw_equals_the_twin(row, temperature, top_k, top_p, min_p, word):
    logits, u = np.array(row, np.float32), word * 2.0**-24
    expected = twin.draw(logits, temperature, top_k, top_p, min_p, u)
    assert logits[expected] > -np.inf
    for kernels in ALL_KERNELS:
        assert kernels.draw(logits, temperature, top_k, top_p, min_p, u) == expected


def test_draw_over_a_whole_vocabulary():
    logits = normal(5, 49152, scale=3)
    for i, u in enumerate(np.random.default_rng(1).integers(0, 2**24, 6) * 2.0**-24):
        how = [(1.0, 0, 1.0, 0.0), (0.7, 50, 0.9, 0.0), (2.0, 0, 0.95, 0.01)][i % 3]
        expected = twin.draw(logits, *how, float(u))
        assert [kernels.draw(logits, *how, float(u)) for kernels in ALL_KERNELS] == [expected] * len(ALL_KERNELS)


def test_draw_follows_the_distribution():
    logits, count = normal(9, 6), 4000
    words = np.random.default_rng(3).integers(0, 2**24, count)
    drawn = [ALL_KERNELS[0].draw(logits, 1.3, 0, 1.0, 0.0, word * 2.0**-24) for word in words]
    p = np.exp(logits.astype(np.float64) / 1.3)
    expected = count * p / p.sum()
    chi_square = ((np.bincount(drawn, minlength=6) - expected) ** 2 / expected).sum()
    assert chi_square < 20.5  # 5 degrees of freedom, p = 0.001


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"u": 1.0}, "u:"),
        ({"logits": np.full(3, -np.inf, np.float32)}, "masked"),
        ({"logits": np.array([1, np.nan], np.float32)}, "NaN"),
    ],
)
def test_draw_refuses(change, word):
    good = {"logits": normal(1, 4), "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "u": 0.5}
    with pytest.raises(ValueError, match=word):
        ALL_KERNELS[0].draw(**(good | change))


def test_arrays_of_another_type_or_layout_are_refused():
    kernels = ALL_KERNELS[0]
    with pytest.raises(ValueError, match="contiguous float32"):
        kernels.exp(np.zeros((4, 4), np.float32).T[:, :2])
    with pytest.raises(ValueError, match="contiguous float32"):
        kernels.log_softmax(np.zeros((4, 4)))
    with pytest.raises(ValueError, match="k: expected 0 to 4"):
        kernels.top_k(np.zeros((1, 4), np.float32), 5)
    with pytest.raises(ValueError, match="out: expected shape"):
        kernels.rms_norm(np.zeros((2, 4), np.float32), np.zeros(4, np.float32), 1e-5, 1, np.zeros((2, 5), np.float32))


@every_build
def test_flushed_subnormals_outside_do_not_reach_the_kernels(kernels):
    import torch

    x, weight = values((4, 64), 1, "subnormal"), values((200, 64), 2, "subnormal")
    expected = twin.linear(x, weight, 32)
    try:
        assert torch.set_flush_denormal(True)
        found = product(kernels, x, weight, 32, threads=2)
        flushed = np.float32(1e-39) * np.float32(0.5)
    finally:
        torch.set_flush_denormal(False)
    assert flushed == 0.0  # the mode was on, and is left on by the kernels
    assert same(found, expected)


def test_threads_seen_counts_threads_that_worked():
    code = (
        "import sys, numpy as np; from engines.bundled.kernels.library import load\n"
        "kernels, x = load('auto', 'auto'), np.zeros((1, 8), np.float32)\n"
        "for threads in (1, 3, 2): kernels.log_softmax(x, threads); print(kernels.threads_seen())"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "3", "3"]
