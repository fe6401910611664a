"""Kernels without a compiler: torch.bmm over chunks and the tree T where that is exact, the twin everywhere else.

It does not know models or requests. Rules: torch promises no order of sums, so each shape of product is compared with
the twin in full, bit for bit, before torch computes it; where one bit differs the twin computes that shape, slowly.
Rows always go in tiles of one size, because matrix libraries choose their kernels by the number of rows.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch

from engines.bundled import twin
from engines.bundled.config import Float32, Int32
from engines.bundled.kernels import selfcheck
from engines.bundled.kernels.interface import Backend, Pages, Rows, Weight
from engines.bundled.kernels.parameters import check_draw, check_experts, check_heads, check_top_k

_TILE = 8  # rows of one product


def open_fallback(reason: str) -> FallbackKernels:
    """The fallback, after its self-check.

    Raises:
        KernelError: numpy does not compute by IEEE 754 here, for example because subnormals are flushed to zero.
    """
    selfcheck.check_environment()
    return FallbackKernels(reason)


class FallbackKernels:
    """The definition's bits without own kernels."""

    backend: Backend = "fallback"
    isa = "none"
    compiler = "none"

    def __init__(self, reason: str) -> None:
        self.digest = _digest(str(torch.__version__))
        self.reason = f"{reason}; torch.bmm where it equals the twin, the twin elsewhere"
        self._exact: dict[tuple[int, ...], bool] = {}  # (N, K, width, threads): does torch.bmm give the twin's bits?

    def exact_shapes(self) -> tuple[int, int]:
        """How many of the shapes of product seen so far torch computes exactly, and how many were seen."""
        return sum(self._exact.values()), len(self._exact)

    def pack(self, weight: Float32, threads: int) -> Weight:  # noqa: ARG002 - nothing to spread over threads
        rows, columns = weight.shape
        return Weight(rows=rows, columns=columns, kind=0, data=weight, scales=np.empty(0, np.float32))

    def linear(self, x: Float32, weight: Weight, width: int, threads: int, out: Float32) -> None:
        out[...] = self._product(x, weight, width, threads)

    def linear_add(self, x: Float32, weight: Weight, width: int, threads: int, out: Float32) -> None:
        out += self._product(x, weight, width, threads)

    def _product(self, x: Float32, weight: Weight, width: int, threads: int) -> Float32:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        data = np.asarray(weight.data, np.float32)
        shape = (*data.shape, width, threads)
        if shape not in self._exact:
            self._exact[shape] = selfcheck.agrees(self.bmm_product, data, width, _TILE)
        if not self._exact[shape]:
            return twin.linear(x, data, width)
        tiles = [self.bmm_product(x[m : m + _TILE], data, width) for m in range(0, len(x), _TILE)]
        return np.concatenate(tiles)

    def bmm_product(self, x: Float32, weight: Float32, width: int) -> Float32:
        """(T, N) from (T, K) and (N, K), T at most a tile: torch.bmm over whole chunks, a short last one apart, T."""
        count, columns = x.shape
        rows = np.zeros((_TILE, columns), np.float32)
        rows[:count] = x
        whole = columns // width
        chunks = list(self._bmm(rows[:, : whole * width], weight[:, : whole * width], whole)) if whole else []
        if columns % width:
            chunks += list(self._bmm(rows[:, whole * width :], weight[:, whole * width :], 1))
        return np.ascontiguousarray(twin.tree(chunks)[:count])

    def _bmm(self, x: Float32, weight: Float32, chunks: int) -> Float32:
        a = torch.from_numpy(np.ascontiguousarray(x)).view(len(x), chunks, -1).transpose(0, 1)
        b = torch.tensor(weight).view(len(weight), chunks, -1).permute(1, 2, 0)
        product: Float32 = torch.bmm(a, b).numpy()
        return product

    def rms_norm(self, x: Float32, gain: Float32, eps: float, threads: int, out: Float32) -> None:  # noqa: ARG002
        out[...] = twin.rms_norm(x, gain, eps)

    def swiglu(self, gate_up: Float32, threads: int, out: Float32) -> None:  # noqa: ARG002
        half = gate_up.shape[1] // 2
        out[...] = twin.swiglu(gate_up[:, :half], gate_up[:, half:])

    def add_bias(self, y: Float32, bias: Float32, threads: int) -> None:  # noqa: ARG002
        y += bias

    def norm_heads(
        self,
        qkv: Float32,
        q_gain: Float32,
        k_gain: Float32,
        kv_heads: int,
        eps: float,
        threads: int,  # noqa: ARG002
    ) -> None:
        heads = check_heads(qkv, q_gain, k_gain, kv_heads)
        parts = qkv.reshape(len(qkv), -1, len(q_gain))
        parts[:, :heads] = twin.rms_norm(parts[:, :heads], q_gain, eps)
        parts[:, heads : heads + kv_heads] = twin.rms_norm(parts[:, heads : heads + kv_heads], k_gain, eps)

    def rope_store(self, qkv: Float32, cos_sin: Float32, rows: Rows, pages: Pages, threads: int) -> None:  # noqa: ARG002
        _, kv_heads, dim, page_size = pages.keys.shape
        heads = qkv.reshape(len(qkv), -1, dim)
        angles = cos_sin[rows.position][:, None, :]
        turned = heads.shape[1] - kv_heads
        heads[:, :turned] = twin.rotate(heads[:, :turned], angles[..., : dim // 2], angles[..., dim // 2 :])
        page = rows.page_table[rows.sequence, rows.position // page_size]
        slot = rows.position % page_size
        pages.keys[page, :, :, slot] = heads[:, turned - kv_heads : turned]
        pages.values[page, :, slot, :] = heads[:, turned:]

    def attend(
        self,
        qkv: Float32,
        rows: Rows,
        pages: Pages,
        heads: int,
        key_chunk: int,
        window: int,
        threads: int,  # noqa: ARG002
        out: Float32,
    ) -> None:
        _, kv_heads, dim, page_size = pages.keys.shape
        group = heads // kv_heads
        q = qkv.reshape(len(qkv), -1, dim)[:, :heads].reshape(len(qkv), kv_heads, group, dim)
        result = out.reshape(len(qkv), kv_heads, group, dim)
        for t, (sequence, position) in enumerate(zip(rows.sequence, rows.position, strict=True)):
            table = rows.page_table[sequence, : position // page_size + 1]
            keys = pages.keys[table].transpose(1, 0, 3, 2).reshape(kv_heads, -1, dim)[:, : position + 1]
            values = pages.values[table].transpose(1, 0, 2, 3).reshape(kv_heads, -1, dim)[:, : position + 1]
            for h in range(kv_heads):
                result[t, h] = twin.attention(q[t, h], keys[h], values[h], key_chunk, window)

    def route(self, logits: Float32, k: int, threads: int) -> tuple[Int32, Float32]:  # noqa: ARG002
        check_experts(k, logits.shape[1])
        return twin.route(logits, k)

    def combine(self, outputs: Float32, weights: Float32, threads: int) -> Float32:  # noqa: ARG002
        return twin.mix(outputs, weights)

    def exp(self, x: Float32) -> Float32:
        return twin.exp(x)

    def log(self, x: Float32) -> Float32:
        return twin.log(x)

    def log_softmax(self, logits: Float32, threads: int = 1) -> Float32:  # noqa: ARG002
        return twin.log_softmax(logits)

    def check_finite(self, logits: Float32) -> int:
        bad = ~np.isfinite(logits).all(axis=1)
        return int(np.argmax(bad)) if bad.any() else -1

    def argmax(self, logits: Float32) -> Int32:
        return self.top_k(logits, 1).reshape(-1)

    def top_k(self, logits: Float32, k: int) -> Int32:
        check_top_k(k, logits.shape[1])
        return np.array([twin.ranking(row)[:k] for row in logits], np.int32).reshape(len(logits), k)

    def draw(self, logits: Float32, temperature: float, top_k: int, top_p: float, min_p: float, u: float) -> int:
        check_draw(logits, temperature, top_k, top_p, min_p, u)
        return twin.draw(logits, temperature, top_k, top_p, min_p, u)

    def threads_seen(self) -> int:
        return int(torch.get_num_threads())


def _digest(torch_version: str) -> str:
    sources = (__file__, str(twin.__file__), str(selfcheck.__file__))
    text = b"".join(Path(source).read_bytes() for source in sources)
    return hashlib.sha256(torch_version.encode() + b"\0" + text).hexdigest()
