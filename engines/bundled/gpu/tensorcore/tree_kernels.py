"""Triton kernels of products whose K is cut into chunks: float32 sums of chunks, added by the tree of docs/numerics.md.

They know no model and no rank. Rules: a chunk's sum is one chain over its K, from +0.0, as in `kernels.linear_kernel`;
chunks of one program are added as a binary counter adds, which is T; a program never holds part of a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=("rows",))
def tree_linear_kernel(  # noqa: C901 - a binary counter written out
    x, weight, out, rows, N, K, x_stride, weight_stride, width,
    CHUNKS: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out (blocks, rows, N): T over the sums of CHUNKS chunks of `width` columns of K each, x (rows, K), weight (N, K).

    CHUNKS is a power of two, or as many as there are; 8 at most.
    """
    tiles_m, tiles_n = tl.cdiv(rows, BM), tl.cdiv(N, BN)
    pid = tl.program_id(0)
    group = pid // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP, GROUP)
    m0 = (group * GROUP + (pid % (GROUP * tiles_n)) % height) * BM
    n0 = (pid % (GROUP * tiles_n)) // height * BN
    m, n, k = m0 + tl.arange(0, BM), n0 + tl.arange(0, BN), tl.arange(0, BK)
    first = tl.program_id(1) * (CHUNKS * width)
    steps = tl.cdiv(width, BK)
    c, s = steps * 0, steps * 0  # the chunk, and the step inside it
    a = x + (m % rows)[:, None].to(tl.int64) * x_stride + (first + k)[None, :]
    b = weight + (n % N)[None, :].to(tl.int64) * weight_stride + (first + k)[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    level0, level1, level2 = acc, acc, acc  # sums of 1, 2 and 4 chunks that wait for as many more
    for _ in range(CHUNKS * steps):
        if EVEN:
            acc = tl.dot(tl.load(a), tl.load(b), acc)
            a += BK
            b += BK
        else:
            done = c * width + s * BK
            inside = (k + s * BK < width) & (first + done + k < K)
            left = tl.load(a + done, inside[None, :], other=0.0)
            acc = tl.dot(left, tl.load(b + done, inside[:, None], other=0.0), acc)
        s += 1
        if CHUNKS > 1:  # noqa: SIM102 - decided when it is compiled
            if s == steps:
                if c % 2 == 0:
                    level0 = acc
                else:
                    acc = level0 + acc
                    if CHUNKS > 2:
                        if c % 4 == 1:
                            level1 = acc
                        else:
                            acc = level1 + acc
                            if CHUNKS > 4:
                                if c % 8 == 3:
                                    level2 = acc
                                else:
                                    acc = level2 + acc
                if c < CHUNKS - 1:
                    acc = tl.zeros((BM, BN), tl.float32)
                c += 1
                s = steps * 0
    if CHUNKS % 4 == 3:  # what is left over joins, from the smallest on; `acc` is the last and smallest
        acc = level1 + acc
    if CHUNKS % 8 > 4:
        acc = level2 + acc
    at = out + (tl.program_id(1).to(tl.int64) * rows + m[:, None]) * N + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), (m < rows)[:, None] & (n < N)[None, :])


@triton.jit
def tree_sum_kernel(partial, out, size, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """out (size) = T over COUNT sums (COUNT, size) of float32; 32 at most."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    acc = tl.zeros((BLOCK,), tl.float32)
    level0, level1, level2, level3, level4 = acc, acc, acc, acc, acc
    at = partial + i
    for c in tl.static_range(COUNT):
        acc = tl.load(at, inside, other=0.0)
        at += size
        if c % 2 == 0:
            level0 = acc
        else:
            acc = level0 + acc
            if c % 4 == 1:
                level1 = acc
            else:
                acc = level1 + acc
                if c % 8 == 3:
                    level2 = acc
                else:
                    acc = level2 + acc
                    if c % 16 == 7:
                        level3 = acc
                    else:
                        acc = level3 + acc
                        if c % 32 == 15:
                            level4 = acc
                        else:
                            acc = level4 + acc
    if COUNT % 4 == 3:  # as above
        acc = level1 + acc
    if COUNT % 8 > 4:
        acc = level2 + acc
    if COUNT % 16 > 8:
        acc = level3 + acc
    if COUNT % 32 > 16:
        acc = level4 + acc
    tl.store(out + i, acc.to(out.dtype.element_ty), inside)
