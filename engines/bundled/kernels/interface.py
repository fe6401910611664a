"""What a set of kernels can do: the seam between the arithmetics, the sampler and whoever computes.

It does not know models, requests or schedules. Rules: every method gives the bits of `docs/numerics.md` whatever
computes it (own kernels of any instruction set, or the checked fallback); arrays are C-contiguous numpy; nothing
depends on the number of threads or on what else is in the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np  # noqa: TC002 - dataclass annotations are read by tools
import numpy.typing as npt  # noqa: TC002 - the same

from engines.bundled.config import Float32, Int32

Backend = Literal["kernels", "fallback"]


class KernelError(Exception):
    """Kernels that cannot be built, loaded or trusted here; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weight:
    """A weight matrix in the layout its kernels want; `data` means nothing to anybody else."""

    rows: int  # N, outputs
    columns: int  # K, inputs
    kind: int  # how `data` holds them; 0: float32
    data: npt.NDArray[np.float32] | npt.NDArray[np.uint8]
    scales: Float32  # of codes; empty for float32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pages:
    """One layer's pool of KV pages."""

    keys: Float32  # (num_pages, kv_heads, head_dim, page_size), after rope
    values: Float32  # (num_pages, kv_heads, page_size, head_dim)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Where each of T tokens stands: its row of the page table and its absolute position."""

    sequence: Int32  # (T,)
    position: Int32  # (T,)
    page_table: Int32  # (S, P)


class SamplerKernels(Protocol):
    """What the sampler needs. Ordering everywhere: value descending, id ascending, -0.0 equal to 0.0."""

    def exp(self, x: Float32) -> Float32:
        """exp of every element, same shape. Below -87 it is +0.0, above 88 it is exp(88), exp(NaN) is NaN."""

    def log(self, x: Float32) -> Float32:
        """Natural logarithm, same shape. log(+-0) is -inf, log(+inf) is +inf, log of a negative or NaN is NaN."""

    def log_softmax(self, logits: Float32, threads: int = 1) -> Float32:
        """(W, V) float32 log-probabilities; sums in chunks of 768 ids."""

    def check_finite(self, logits: Float32) -> int:
        """The first row of (W, V) that holds a NaN or an infinity, or -1."""

    def argmax(self, logits: Float32) -> Int32:
        """(W,) int32: the id of the largest value of each row of (W, V), the lowest id on ties."""

    def top_k(self, logits: Float32, k: int) -> Int32:
        """(W, k) int32 ids of the k largest values of each row of (W, V), in order.

        Raises:
            ValueError: k below 0 or above V.
        """

    def draw(
        self,
        logits: Float32,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        u: float,
    ) -> int:
        """The id drawn from one row (V,) float32 whose penalties, biases and masks are already applied.

        -inf marks a masked id. `temperature` is above 0; it, `top_p` and `min_p` are rounded to float32 once. `top_k`
        0, `top_p` 1.0 and `min_p` 0.0 are off. `u` is a float32 in [0, 1). A draw over 49,152 ids takes well under a
        millisecond.

        Raises:
            ValueError: temperature not above 0, another parameter out of range, or every id masked.
        """


class Kernels(SamplerKernels, Protocol):
    """Everything a forward pass and a sampler need, in one definition of float32 arithmetic."""

    @property
    def backend(self) -> Backend:
        """Own compiled kernels, or the checked fallback."""

    @property
    def isa(self) -> str:
        """One of "x86-64-v3", "x86-64-v4", "generic"; "none" for the fallback."""

    @property
    def compiler(self) -> str:
        """Program and version, or "none"."""

    @property
    def reason(self) -> str:
        """Why this backend and no other."""

    @property
    def digest(self) -> str:
        """SHA-256 over source, compiler version, flags and ISA; of the fallback: over its sources and torch."""

    def pack(self, weight: Float32, threads: int) -> Weight:
        """Brings (N, K) float32 into the kernels' own layout; done once in a lifetime."""

    def linear(self, x: Float32, weight: Weight, width: int, threads: int, out: Float32) -> None:
        """out (T, N) = x (T, K) times the weight transposed, in chunks of `width` along K added by the tree T."""

    def linear_add(self, x: Float32, weight: Weight, width: int, threads: int, out: Float32) -> None:
        """The same, added to what `out` (T, N) holds with one rounding: out + product."""

    def rms_norm(self, x: Float32, gain: Float32, eps: float, threads: int, out: Float32) -> None:
        """out (T, K) = (x / sqrt(mean of squares + eps)) * gain."""

    def swiglu(self, gate_up: Float32, threads: int, out: Float32) -> None:
        """out (T, I) from (T, 2 I), gate first: (gate / (1 + exp(-gate))) * up."""

    def rope_store(self, qkv: Float32, cos_sin: Float32, rows: Rows, pages: Pages, threads: int) -> None:
        """Rotates q and k of qkv (T, (heads + 2 kv_heads) head_dim) in place; writes k and v into their pages.

        `cos_sin` is (positions, head_dim): cosines, then sines, of head_dim / 2 angles.
        """

    def add_bias(self, y: Float32, bias: Float32, threads: int) -> None:
        """y (T, N) + bias (N,) in place, one rounding each."""

    def norm_heads(
        self, qkv: Float32, q_gain: Float32, k_gain: Float32, kv_heads: int, eps: float, threads: int
    ) -> None:
        """RMSNorm over each head of q and k of qkv (T, (heads + 2 kv_heads) head_dim) in place; gains (head_dim,)."""

    def attend(
        self,
        qkv: Float32,
        rows: Rows,
        pages: Pages,
        heads: int,
        key_chunk: int,
        window: int,
        threads: int,
        out: Float32,
    ) -> None:
        """out (T, heads head_dim): attention of rotated q over the newest `window` of the keys 0..position of its
        sequence, all of them if `window` is 0.

        `key_chunk` is the number of keys of a chunk, a multiple of 16; chunks are cut by absolute position.
        """

    def route(self, logits: Float32, k: int, threads: int) -> tuple[Int32, Float32]:
        """The k experts of each row of router logits (T, E): ids (T, k), ascending, and weights (T, k).

        Chosen by probability descending, id ascending; a row's weights are its probabilities divided by their sum.

        Raises:
            ValueError: k below 1 or above E.
        """

    def combine(self, outputs: Float32, weights: Float32, threads: int) -> Float32:
        """(T, N): per row a chain of fma(weight, output) over outputs (T, k, N) in order, from +0.0."""

    def threads_seen(self) -> int:
        """The most threads that worked on one call in this process; a thread works once as soon as it is started."""
