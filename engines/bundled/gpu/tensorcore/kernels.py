"""The Triton kernels of `tensorcore`: matrix product, norm, rope with paged store, activation, argmax.

They know no model and no step. Rules: an element's expression names its own row and nothing of the batch; K is not
split and runs in ascending order. Which bits that gives is in docs/numerics.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=("rows",))
def linear_kernel(
    x, weight, out, rows, N, K, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out (rows, N) = x (rows, K) times weight (N, K), transposed; one chain over K per element, from +0.0."""
    tiles_m, tiles_n = tl.cdiv(rows, BM), tl.cdiv(N, BN)
    pid = tl.program_id(0)
    group = pid // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP, GROUP)
    m0 = (group * GROUP + (pid % (GROUP * tiles_n)) % height) * BM
    n0 = (pid % (GROUP * tiles_n)) // height * BN
    m, n, k = m0 + tl.arange(0, BM), n0 + tl.arange(0, BN), tl.arange(0, BK)
    a = x + (m % rows)[:, None].to(tl.int64) * K + k[None, :]
    b = weight + (n % N)[None, :].to(tl.int64) * K + k[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        if EVEN:
            left, right = tl.load(a), tl.load(b)
        else:
            inside = k < K - start
            left, right = tl.load(a, inside[None, :], other=0.0), tl.load(b, inside[:, None], other=0.0)
        acc = tl.dot(left, right, acc)
        a += BK
        b += BK
    at = out + m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), (m < rows)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=("rows", "width"))
def split_kernel(x, weight, partial, rows, width, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """partial (splits, rows, N): the product over `width` of K each. For `free` alone."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    first = tl.program_id(2) * width
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(tl.cdiv(width, BK)):
        at = first + step * BK + k
        inside = (at < K) & (step * BK + k < width)
        left = tl.load(x + (m % rows)[:, None].to(tl.int64) * K + at[None, :], inside[None, :], other=0.0)
        right = tl.load(weight + (n % N)[None, :].to(tl.int64) * K + at[:, None], inside[:, None], other=0.0)
        acc = tl.dot(left, right, acc)
    to = partial + (tl.program_id(2).to(tl.int64) * rows + m[:, None]) * N + n[None, :]
    tl.store(to, acc.to(partial.dtype.element_ty), (m < rows)[:, None] & (n < N)[None, :])


@triton.jit
def norm_kernel(hidden, update, gain, out, eps, K: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    """One row: hidden += update (rounded, stored), then out = RMSNorm(hidden) * gain."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < K
    x = tl.load(hidden + row * K + k, inside, other=0.0).to(tl.float32)
    if ADD:
        rounded = (x + tl.load(update + row * K + k, inside, other=0.0).to(tl.float32)).to(hidden.dtype.element_ty)
        tl.store(hidden + row * K + k, rounded, inside)
        x = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / K + eps)
    y = x * scale * tl.load(gain + k, inside, other=0.0).to(tl.float32)
    tl.store(out + row * K + k, y.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=("pitch",))
def rope_kernel(
    qkv, table, sequence, position, pages, keys, values, q_gain, k_gain, eps, pitch,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """One head of one token: q in place, k and v into its page. table (positions, DIM): cosines, then sines.

    A row at position -1 is padding: it is computed like position 0 and stored nowhere.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half = tl.arange(0, HALF)
    inside = half < DIM // 2
    at = qkv + token * ((HEADS + 2 * KV) * DIM) + head * DIM + half
    a, b = tl.load(at, inside, other=0.0), tl.load(at + DIM // 2, inside, other=0.0)
    place = tl.load(position + token)
    seen = tl.maximum(place, 0)
    page = tl.load(pages + tl.load(sequence + token).to(tl.int64) * pitch + seen // PAGE).to(tl.int64)
    where = page * PAGE + seen % PAGE
    stored = half < tl.where(place >= 0, DIM // 2, 0)
    if head >= HEADS + KV:
        to = values + (where * KV + (head - HEADS - KV)) * DIM + half
        tl.store(to, a, stored)
        tl.store(to + DIM // 2, b, stored)
    else:
        x, y = a.to(tl.float32), b.to(tl.float32)
        if NORM:
            gain = q_gain
            if head >= HEADS:
                gain = k_gain
            scale = 1.0 / tl.sqrt((tl.sum(x * x, 0) + tl.sum(y * y, 0)) / DIM + eps)
            x = x * scale * tl.load(gain + half, inside, other=0.0).to(tl.float32)
            y = y * scale * tl.load(gain + half + DIM // 2, inside, other=0.0).to(tl.float32)
        turn = table + seen.to(tl.int64) * DIM + half
        cosine, sine = tl.load(turn, inside, other=0.0), tl.load(turn + DIM // 2, inside, other=0.0)
        first = (x * cosine - y * sine).to(qkv.dtype.element_ty)
        second = (y * cosine + x * sine).to(qkv.dtype.element_ty)
        if head < HEADS:
            tl.store(at, first, inside)
            tl.store(at + DIM // 2, second, inside)
        else:
            to = keys + (where * KV + (head - HEADS)) * DIM + half
            tl.store(to, first, stored)
            tl.store(to + DIM // 2, second, stored)


@triton.jit
def swiglu_kernel(gate_up, out, INNER: tl.constexpr, BLOCK: tl.constexpr):
    """out = silu(gate) * up in float32, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < INNER
    gate = tl.load(gate_up + row * (2 * INNER) + k, inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * INNER) + INNER + k, inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp2(-gate * LOG2_E)) * up
    tl.store(out + row * INNER + k, y.to(out.dtype.element_ty), inside)


@triton.jit
def best_kernel(logits, best, where, bad, VOCAB: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit of one part of a row, its lowest id, and how many are no finite numbers."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * VOCAB + i, i < VOCAB, other=0.0).to(tl.float32)
    finite = (x == x) & (tl.abs(x) != float("inf"))
    candidate = tl.where((i < VOCAB) & finite, x, float("-inf"))
    top = tl.max(candidate, 0)
    to = row * PARTS + part
    tl.store(best + to, top)
    tl.store(where + to, tl.min(tl.where((candidate == top) & (i < VOCAB), i, VOCAB), 0))
    tl.store(bad + to, tl.sum(((i < VOCAB) & (finite == 0)).to(tl.int32), 0))


@triton.jit
def pick_kernel(
    best, where, bad, token, position,
    ADVANCE: tl.constexpr, VOCAB: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The row's argmax, the lowest id among equals; -1 if one of its logits is no finite number.

    ADVANCE moves the row's position on, so that the step can be replayed as it is; padding stays padding.
    """
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, BLOCK)
    x = tl.load(best + row * PARTS + p, p < PARTS, other=float("-inf"))
    top = tl.max(x, 0)
    ids = tl.load(where + row * PARTS + p, p < PARTS, other=VOCAB)
    found = tl.min(tl.where(x == top, ids, VOCAB), 0)
    wrong = tl.sum(tl.load(bad + row * PARTS + p, p < PARTS, other=0), 0)
    tl.store(token + row, tl.where(wrong > 0, -1, found))
    if ADVANCE:
        at = tl.load(position + row)
        tl.store(position + row, tl.where(at >= 0, at + 1, at))
