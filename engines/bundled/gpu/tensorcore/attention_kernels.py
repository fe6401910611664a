"""The Triton kernels of paged attention: decode by splits of keys, their merge, prefill.

They know no model and no step. Rules: keys are cut into splits of KEYS by absolute position; inside a split, steps of
STEP keys in ascending order go into one accumulator; splits are merged in ascending order; every form runs the same
functions; weights are summed by a tree that is written out, so that no tile or number of warps can reorder it. Which
bits that gives is in docs/numerics.md.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def slots_of(page, j, kv, KV: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr):
    """Where the head kv of keys begins in the pools: their pages, and their positions counted from any page's start."""
    return page.to(tl.int64) * (PAGE * KV * DIM) + (j % PAGE * KV + kv) * DIM


@triton.jit
def hide(s, j, rows_position, WINDOW: tl.constexpr):
    """-inf where a row does not see a key: it sees the newest WINDOW keys up to its own, all of them if that is 0."""
    seen = j[None, :] <= rows_position[:, None]
    if WINDOW:
        seen = seen & (j[None, :] > rows_position[:, None] - WINDOW)
    return tl.where(seen, s, float("-inf"))


@triton.jit
def tree_sum(w, LEVELS: tl.constexpr):
    """Sums of rows of 2^LEVELS by one binary tree: halves are added until a column is left. No layout reorders that."""
    for _ in tl.static_range(LEVELS):
        w = tl.sum(tl.reshape(w, (w.shape[0], 2, w.shape[1] // 2)), 1)
    return w


@triton.jit
def add_step(s, v, scale, top, total, out, LEVELS: tl.constexpr):
    """(maximum, sum, output) of a split with one more step of scores s and values v."""
    high = tl.maximum(top, tl.max(s, 1))
    safe = tl.where(high == float("-inf"), 0.0, high) * scale
    w = tl.exp2(tl.fma(s, scale, -safe[:, None]))
    old = tl.exp2(top * scale - safe)
    total = total * old[:, None] + tree_sum(w, LEVELS)
    return high, total, tl.dot(w.to(v.dtype), v, out * old[:, None])


@triton.jit
def weigh(top, top_c, scale):
    """The maximum of two splits, and the factors of their sums and outputs; one without a key changes no bit."""
    high = tl.maximum(top, top_c)
    safe = tl.where(high == float("-inf"), 0.0, high) * scale
    return high, tl.exp2(top * scale - safe), tl.exp2(top_c * scale - safe)


@triton.jit
def share(out, total):
    """out / total, never -0.0; zeros where there was no key, which is a row of padding: one key weighs 1."""
    return out / tl.where(total == 0.0, 1.0, total) + 0.0


@triton.jit(do_not_specialize=("pitch", "splits"))
def decode_kernel(
    qkv, token, sequence, position, pages, keys, values, tops, totals, outs, attended, scale, pitch, splits,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, BD: tl.constexpr, PAGE: tl.constexpr,
    KEYS: tl.constexpr, STEP: tl.constexpr, LEVELS: tl.constexpr, PADDED: tl.constexpr, WINDOW: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """One split of keys, one KV head, one token alone in its sequence; partial results to (rows, HEADS, splits).

    Nothing is written for a split of which the token sees no key. WHOLE: there is one split, and the result is final.
    """
    kv, c, i = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(token + i).to(tl.int64)
    at = tl.load(position + row)
    begin, end = c * KEYS, tl.minimum((c + 1) * KEYS, at + 1)
    if WINDOW:
        begin = tl.maximum(begin, tl.maximum(at + 1 - WINDOW, 0) // STEP * STEP)
    if (begin < end) | WHOLE:
        G: tl.constexpr = HEADS // KV
        g, d = tl.arange(0, PADDED), tl.arange(0, BD)
        own = pages + tl.load(sequence + row).to(tl.int64) * pitch
        source = qkv + row * ((HEADS + 2 * KV) * DIM) + (kv * G + g)[:, None] * DIM + d[None, :]
        q = tl.load(source, (g < G)[:, None] & (d < DIM)[None, :], other=0.0)
        top, total = tl.full((PADDED,), float("-inf"), tl.float32), tl.zeros((PADDED, 1), tl.float32)
        out = tl.zeros((PADDED, BD), tl.float32)
        jj = tl.arange(0, STEP)
        page = tl.load(own + (begin + jj) // PAGE, begin + jj < end, other=0)
        for start in range(begin, end, STEP):
            j = start + jj
            slot = slots_of(page, jj if STEP % PAGE == 0 else j, kv, KV, DIM, PAGE)
            k = tl.load(keys + slot[None, :] + d[:, None], (j < end)[None, :] & (d < DIM)[:, None], other=0.0)
            v = tl.load(values + slot[:, None] + d[None, :], (j < end)[:, None] & (d < DIM)[None, :], other=0.0)
            page = tl.load(own + (j + STEP) // PAGE, j + STEP < end, other=0)
            s = hide(tl.dot(q, k), j, tl.full((PADDED,), 0, tl.int32) + at, WINDOW)
            top, total, out = add_step(s, v, scale, top, total, out, LEVELS)
        summed = tl.max(total, 1)
        real = (g < G)[:, None] & (d < DIM)[None, :]
        if WHOLE:
            to = attended + (row * HEADS + kv * G + g)[:, None] * DIM + d[None, :]
            tl.store(to, share(out, summed[:, None]).to(attended.dtype.element_ty), real)
        else:
            to = (i.to(tl.int64) * HEADS + kv * G + g) * splits + c
            tl.store(tops + to, top, g < G)
            tl.store(totals + to, summed, g < G)
            tl.store(outs + to[:, None] * DIM + d[None, :], out, real)


@triton.jit(do_not_specialize=("splits",))
def decode_merge_kernel(
    token, position, tops, totals, outs, attended, scale, splits,
    HEADS: tl.constexpr, DIM: tl.constexpr, BD: tl.constexpr, KEYS: tl.constexpr, UNROLL: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Merges a head's splits in ascending order and divides by the sum; zeros for a row of padding."""
    head, i = tl.program_id(0), tl.program_id(1)
    row = tl.load(token + i).to(tl.int64)
    at = tl.load(position + row)
    d = tl.arange(0, BD)
    source = (i.to(tl.int64) * HEADS + head) * splits
    top, total, out = float("-inf"), 0.0, tl.zeros((BD,), tl.float32)
    count = tl.where(at < 0, 0, at // KEYS + 1)
    begin = at * 0
    if WINDOW:
        begin = tl.maximum(at + 1 - WINDOW, 0) // KEYS
    for block in range(begin, count, UNROLL):
        for i_split in tl.static_range(UNROLL):  # loads of several splits under way at once; absent ones are no-ops
            c = source + tl.minimum(block + i_split, count - 1)
            partial, live = tl.load(outs + c * DIM + d, d < DIM, other=0.0), block + i_split < count
            top_c, total_c = tl.where(live, tl.load(tops + c), float("-inf")), tl.load(totals + c)
            top, old, new = weigh(top, top_c, scale)
            total = total * old + total_c * new
            out = out * old + partial * new
    tl.store(attended + (row * HEADS + head) * DIM + d, share(out, total).to(attended.dtype.element_ty), d < DIM)


@triton.jit(do_not_specialize=("pitch", "tiles"))
def prefill_kernel(
    qkv, tile_token, tile_count, tile_sequence, position, pages, keys, values, attended, scale, pitch, tiles,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, BD: tl.constexpr, PAGE: tl.constexpr,
    KEYS: tl.constexpr, STEP: tl.constexpr, LEVELS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """A tile of consecutive tokens of one sequence, one KV head; PADDED rows per token, one per query head.

    The last tiles, which see the most keys, begin first. A tile whose first token is padding gets zeros.
    """
    kv, tile = tl.program_id(0) % KV, tiles - 1 - tl.program_id(0) // KV
    G: tl.constexpr = HEADS // KV
    r, d = tl.arange(0, ROWS), tl.arange(0, BD)
    head, index = kv * G + r % PADDED, r // PADDED
    token, count = tl.load(tile_token + tile), tl.load(tile_count + tile)
    first = tl.load(position + token)
    limit = tl.where((first < 0) | (count == 0), 0, first + count)
    used = (index < count) & (r % PADDED < G)
    row = (token + index).to(tl.int64)
    source = qkv + row[:, None] * ((HEADS + 2 * KV) * DIM) + head[:, None] * DIM + d[None, :]
    q = tl.load(source, used[:, None] & (d < DIM)[None, :], other=0.0)
    own = pages + tl.load(tile_sequence + tile).to(tl.int64) * pitch
    top, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, BD), tl.float32)
    jj = tl.arange(0, STEP)
    lowest = first * 0
    if WINDOW:
        lowest = tl.maximum(first + 1 - WINDOW, 0) // STEP * STEP
    for split in range(lowest // KEYS * KEYS, limit, KEYS):
        top_c, total_c = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS, 1), tl.float32)
        out_c = tl.zeros((ROWS, BD), tl.float32)
        begin, end = tl.maximum(split, lowest), tl.minimum(split + KEYS, limit)
        page = tl.load(own + (begin + jj) // PAGE, begin + jj < end, other=0)
        for start in range(begin, end, STEP):
            j = start + jj
            slot = slots_of(page, jj if STEP % PAGE == 0 else j, kv, KV, DIM, PAGE)
            k = tl.load(keys + slot[None, :] + d[:, None], (j < end)[None, :] & (d < DIM)[:, None], other=0.0)
            v = tl.load(values + slot[:, None] + d[None, :], (j < end)[:, None] & (d < DIM)[None, :], other=0.0)
            page = tl.load(own + (j + STEP) // PAGE, j + STEP < end, other=0)
            s = tl.dot(q, k)
            if (WINDOW > 0) | (start + STEP > first + 1):  # elsewhere every row sees every key
                s = hide(s, j, first + index, WINDOW)
            top_c, total_c, out_c = add_step(s, v, scale, top_c, total_c, out_c, LEVELS)
        top, old, new = weigh(top, top_c, scale)
        total = total * old + tl.max(total_c, 1) * new
        out = out * old[:, None] + out_c * new[:, None]
    to = attended + (row * HEADS + head)[:, None] * DIM + d[None, :]
    tl.store(to, share(out, total[:, None]).to(attended.dtype.element_ty), used[:, None] & (d < DIM)[None, :])
