"""Triton kernels of what is reported of a row of logits: its order, its log-softmax by the written definition.

They know no requests. Rules: exp, log and orders of sums are those of docs/numerics.md, in float32, each operation
rounded once and every fused one named, so that the bits are those of the CPU's kernels; nothing follows from the number
of rows. They are compiled without contraction.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = tl.constexpr(768)  # ids whose exponentials are added in 16 lanes
LANES = tl.constexpr(16)


@triton.jit
def exp1(x):
    """exp of the definition, of finite numbers."""
    c = tl.maximum(tl.minimum(x, 88.0), -87.0)
    n = tl.fma(c, 1.44269504, 12582912.0)
    i = n.to(tl.int32, bitcast=True)
    n = n - 12582912.0
    r = tl.fma(n, 2.12194440e-4, tl.fma(n, -0.693359375, c))
    p = tl.fma(r, 1.9875691500e-4, 1.3981999507e-3)
    p = tl.fma(p, r, 8.3334519073e-3)
    p = tl.fma(p, r, 4.1665795894e-2)
    p = tl.fma(p, r, 1.6666665459e-1)
    p = tl.fma(p, r, 5.0000001201e-1)
    p = tl.fma(p, r * r, r) + 1.0
    return tl.where(x < -87.0, 0.0, p * ((i + 127) << 23).to(tl.float32, bitcast=True))


@triton.jit
def log1(x):
    """log of the definition, of positive numbers that are not subnormal."""
    b = x.to(tl.int32, bitcast=True)
    m = ((b & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    low = m < 0.707106781186547524
    f = ((b >> 23) - 126 - low.to(tl.int32)).to(tl.float32)
    m = tl.where(low, m + m, m) - 1.0
    z = m * m
    p = tl.fma(m, 7.0376836292e-2, -1.1514610310e-1)
    p = tl.fma(p, m, 1.1676998740e-1)
    p = tl.fma(p, m, -1.2420140846e-1)
    p = tl.fma(p, m, 1.4249322787e-1)
    p = tl.fma(p, m, -1.6668057665e-1)
    p = tl.fma(p, m, 2.0000714765e-1)
    p = tl.fma(p, m, -2.4999993993e-1)
    p = tl.fma(p, m, 3.3333331174e-1)
    y = tl.fma(f, -2.12194440e-4, (m * z) * p)
    y = tl.fma(z, -0.5, y)
    return tl.fma(f, 0.693359375, m + y)


@triton.jit
def key_kernel(logits, keys, bad, VOCAB: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """keys (W, VOCAB) int64: the order of a row, value descending and id ascending, as integers that all differ.

    The upper word is the value's bits in the order of the numbers, -0.0 as 0.0; the lower one the id, turned over.
    bad (W, PARTS): how many of a part are no finite numbers.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * VOCAB + i, i < VOCAB, other=0.0).to(tl.float32) + 0.0
    bits = x.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    tl.store(keys + row * VOCAB + i, (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - i).to(tl.int64), i < VOCAB)
    wrong = (i < VOCAB) & ((bits & 0x7F800000) == 0x7F800000)
    tl.store(bad + row * PARTS + part, tl.sum(wrong.to(tl.int32), 0))


@triton.jit
def chunk_sum_kernel(logits, top, sums, VOCAB: tl.constexpr, CHUNKS: tl.constexpr, HELD: tl.constexpr):
    """sums (W, CHUNKS): of exp(x - top) over each chunk of ids, in lanes that are folded by halves; HELD a program."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * HELD + tl.arange(0, HELD)
    most = tl.load(top + row)
    first = chunk[:, None] * CHUNK + tl.arange(0, LANES)[None, :]
    lanes = tl.zeros((HELD, LANES), tl.float32)
    for step in tl.static_range(CHUNK // LANES):
        i = first + step * LANES
        x = tl.load(logits + row * VOCAB + i, i < VOCAB, other=0.0).to(tl.float32)
        lanes = lanes + tl.where(i < VOCAB, exp1(x - most), 0.0)  # an absent id: +0.0 to a sum that is not -0.0
    lanes = tl.sum(tl.reshape(lanes, (HELD, 2, 8)), 1)
    lanes = tl.sum(tl.reshape(lanes, (HELD, 2, 4)), 1)
    lanes = tl.sum(tl.reshape(lanes, (HELD, 2, 2)), 1)
    tl.store(sums + row * CHUNKS + chunk, tl.sum(lanes, 1), chunk < CHUNKS)


@triton.jit
def log_sum_kernel(sums, out, CHUNKS: tl.constexpr, LEVELS: tl.constexpr):
    """out (W,): log of T over a row's chunk sums, 2^LEVELS of them or fewer.

    Neighbours pair up, which is T; what is absent adds +0.0 to sums that are not negative.
    """
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, 1 << LEVELS)
    tree = tl.load(sums + row * CHUNKS + c, c < CHUNKS, other=0.0)
    for level in tl.static_range(LEVELS):
        tree = tl.sum(tl.reshape(tree, (1 << (LEVELS - 1 - level), 2)), 1)
    tl.store(out + row + tl.arange(0, 1), log1(tree))
