"""The Triton kernels of a mixture of experts: routing, one expert's product for one pair, the mix.

They know no model and no step. Rules: those of `kernels.py`; the router's sum is over one row in one program, whose
shape follows the number of experts alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def route_kernel(logits, expert, weight, experts, k, BLOCK: tl.constexpr):
    """One row: the k experts of the largest probabilities, the lower id among equals, written in ascending id."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    real = i < experts
    x = tl.load(logits + row * experts + i, real, other=float("-inf")).to(tl.float32)
    w = tl.where(real, tl.exp2((x - tl.max(x, 0)) * LOG2_E), 0.0)
    p = w / tl.sum(w, 0)
    better = (p[None, :] > p[:, None]) | ((p[None, :] == p[:, None]) & (i[None, :] < i[:, None]))
    rank = tl.sum((better & real[None, :]).to(tl.int32), 1)
    chosen = (rank < k) & real
    total = tl.sum(tl.where(chosen, p, 0.0), 0)
    lower = (i[None, :] < i[:, None]) & chosen[None, :]
    slot = tl.sum(lower.to(tl.int32), 1)  # how many chosen ones have a lower id
    keep = chosen & (slot < k)
    tl.store(expert + row * k + slot, i, keep)
    tl.store(weight + row * k + slot, p / total, keep)


@triton.jit(do_not_specialize=("fan",))
def expert_kernel(x, weights, expert, out, N, K, fan, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """out (pairs, N): one pair's row of x times its expert's weights; one chain over K per element, from +0.0."""
    pair = tl.program_id(1).to(tl.int64)
    n, k, m = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK), tl.arange(0, BM)
    chosen = tl.load(expert + pair).to(tl.int64)
    a = x + (pair // fan) * K + m[:, None] * 0 + k[None, :]
    b = weights + chosen * N * K + (n % N)[None, :].to(tl.int64) * K + k[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        inside = k < K - start
        left = tl.load(a, inside[None, :] & (m[:, None] < BM), other=0.0)
        acc = tl.dot(left, tl.load(b, inside[:, None], other=0.0), acc)
        a += BK
        b += BK
    at = out + pair * N + n[None, :] + m[:, None] * 0
    tl.store(at, acc.to(out.dtype.element_ty), (m == 0)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=("k",))
def mix_kernel(said, weight, out, columns, k, BLOCK: tl.constexpr):
    """One row: the sum over its experts of weight times what the expert says, in ascending id, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in range(k):
        share = tl.load(weight + row * k + slot)
        y = tl.load(said + (row * k + slot) * columns + n, n < columns, other=0.0).to(tl.float32)
        total = total + share * y
    tl.store(out + row * columns + n, total.to(out.dtype.element_ty), n < columns)
