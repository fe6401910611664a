"""Triton's interpreter with a matrix unit of a stated order: products of a chain over K, one rounded addition each.

The interpreter forms `tl.dot` by numpy's matmul, whose order follows the shapes, and takes bfloat16 for integers. Here
it is acc = acc + a[k] * b[k] in float32, k ascending: an order of its own, so that what the kernels add to it shows.
"""

from __future__ import annotations

import os
import sys

import numpy as np

KERNELS = "engines.bundled.gpu.tensorcore.kernels"
_chosen: list[str] = []  # empty until Triton was imported for the interpreter
VARIABLE = "TRITON_INTERPRET"  # read when Triton, and when a kernel's module, is imported


def import_interpreted() -> None:
    """Imports Triton and the kernels for the interpreter; this process cannot compile them any more.

    Raises ImportError without Triton, RuntimeError if this process imported it otherwise.
    """
    if _chosen:
        return
    if KERNELS in sys.modules or "triton" in sys.modules:
        raise RuntimeError("Triton or its kernels were imported before the interpreter was chosen: call this earlier")
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1"
    try:
        from triton.runtime.interpreter import InterpreterBuilder

        import engines.bundled.gpu.tensorcore.attention_kernels
        import engines.bundled.gpu.tensorcore.expert_kernels
        import engines.bundled.gpu.tensorcore.kernels
        import engines.bundled.gpu.tensorcore.softmax_kernels
        import engines.bundled.gpu.tensorcore.tree_kernels  # noqa: F401
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before
    _chosen.append(KERNELS)
    InterpreterBuilder.create_dot = _dot
    InterpreterBuilder.cast_impl = _rounding(InterpreterBuilder.cast_impl)


def _dot(self, a, b, d, *_):
    from triton.runtime.interpreter import TensorHandle

    left, right, acc = _floats(a), _floats(b), d.data.astype(np.float32).copy()
    for k in range(left.shape[-1]):
        acc += left[:, k, None] * right[None, k, :]
    return TensorHandle(acc, d.dtype.scalar)


def _rounding(cast):
    """float32 to bfloat16 to nearest even, as the device does it; the interpreter cuts off."""

    def cast_impl(self, source, to):
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        if source.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
            bits = source.data.view(np.uint32).astype(np.uint64)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            quiet = np.where(np.isnan(source.data), 0x7FC0, rounded)
            return TensorHandle(quiet.astype(np.uint16), to.scalar)
        return cast(self, source, to)

    return cast_impl


def _floats(handle) -> np.ndarray:
    import triton.language as tl

    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)


def chain(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The twin of a product: (T, K) by (N, K), a chain over the whole of K."""
    acc = np.zeros((len(x), len(weight)), np.float32)
    for k in range(x.shape[1]):
        acc += x[:, k, None] * weight[None, :, k]
    return acc


def fma(a: np.ndarray, b: np.float32, c: np.float32) -> np.ndarray:
    """a b + c, rounded once but for ties of float64."""
    return (a.astype(np.float64) * np.float64(b) + np.float64(c)).astype(np.float32)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, keys: int, step: int) -> np.ndarray:
    """The twin of one query (d,) over keys and values (n, d), by the text of docs/numerics.md.

    In float32, where no rounding hides an order.
    """
    c = np.float32(scale)
    merged = np.float32(-np.inf), np.float32(0), np.zeros(len(q), np.float32)
    for split in range(0, len(k), keys):
        m, total, out = np.float32(-np.inf), np.float32(0), np.zeros(len(q), np.float32)
        for start in range(split, min(split + keys, len(k)), step):
            part = slice(start, min(start + step, split + keys, len(k)))
            s = np.full(step, -np.inf, np.float32)
            s[: part.stop - start] = chain(q[None], k[part])[0]
            high = max(m, s.max())
            w, f = np.exp2(fma(s, c, -(high * c))), np.exp2(m * c - high * c)
            total, tree = total * f, w
            while len(tree) > 1:
                tree = tree[: len(tree) // 2] + tree[len(tree) // 2 :]
            total, out, m = total + tree[0], out * f, high
            for weight, value in zip(w, v[part], strict=False):
                out = out + weight * value
        high = max(merged[0], m)
        old, new = np.exp2(merged[0] * c - high * c), np.exp2(m * c - high * c)
        merged = high, merged[1] * old + total * new, merged[2] * old + out * new
    return merged[2] / merged[1] + np.float32(0)
