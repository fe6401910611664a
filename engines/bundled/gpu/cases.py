"""Single operators run twice on the same data: by the GPU's kernels and by the CPU's. It judges nothing.

Rules: data comes from integer hashes, so that it is the same on every machine; kinds of data include subnormal numbers,
which is where a flushing machine shows itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from engines.bundled.arithmetic.rope import rope_table
from engines.bundled.config import Float32, Int32
from engines.bundled.gpu import operators
from engines.bundled.gpu.interface import Array, Launch, Machine, Shape
from engines.bundled.gpu.operators import Linear, Tuning
from engines.bundled.kernels.interface import Kernels, Pages, Rows
from engines.bundled.kernels.library import score_scale

Kind = Literal["uniform", "wide", "subnormal"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pair:
    """One operator's result by both."""

    name: str
    gpu: Float32
    cpu: Float32

    @property
    def differing(self) -> int:
        """Elements whose bits differ."""
        return int(np.count_nonzero(self.gpu.view(np.int32) != self.cpu.view(np.int32)))


def hashed(shape: tuple[int, ...], seed: int, kind: Kind = "uniform", scale: float = 1.0) -> Float32:
    """Numbers by splitmix64 of their index: uniform in [-scale, scale), of exponents -40 to 39, or subnormal."""
    count = int(np.prod(shape))
    with np.errstate(over="ignore"):
        z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed << 32)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    if kind == "uniform":
        unit = (z >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)
        return (unit * np.float32(scale)).reshape(shape)
    sign_mantissa = (z >> np.uint64(32)).astype(np.uint32) & np.uint32(0x807FFFFF)
    exponent = (z % np.uint64(80)).astype(np.uint32) + np.uint32(87) if kind == "wide" else np.uint32(0)
    return (sign_mantissa | exponent << np.uint32(23)).view(np.float32).reshape(shape)


class Operators:
    """Operators of one shape on one machine beside the CPU's kernels."""

    def __init__(self, machine: Machine, shape: Shape, kernels: Kernels, threads: int = 1) -> None:
        self._machine, self._shape, self._kernels, self._threads = machine, shape, kernels, threads
        self._held: list[int] = []
        self.linked = shape.cluster > 0 or bool(machine.facts.get("gpu_linked", False))

    def linear(
        self, name: str, x: Float32, weight: Float32, width: int, tuning: Tuning | None = None, add: bool = False
    ) -> Pair:
        """x (M, K) times weight (N, K), or added to ones."""
        (rows, inputs), outputs = x.shape, len(weight)
        packed = self.room(operators.padded(outputs) * inputs)
        out = np.ones((rows, outputs), np.float32)
        operands = self.put(weight), self.put(x), self.put(out), self.room(operators.PARTIAL_FLOATS)
        op = Linear(x=operands[1], weight=packed, out=operands[2], rows=rows, outputs=outputs, inputs=inputs,
                    width=width, add=add)  # fmt: skip
        launches = [
            operators.pack(operands[0], packed, outputs, inputs),
            operators.linear(op, operands[3], self.linked, tuning),
        ]
        cpu = np.ones_like(out)
        multiply = self._kernels.linear_add if add else self._kernels.linear
        multiply(x, self._kernels.pack(weight, self._threads), width, self._threads, cpu)
        return Pair(name=name, gpu=self.run(launches, operands[2], out.shape), cpu=cpu)

    def rms_norm(self, name: str, x: Float32, gain: Float32, eps: float) -> Pair:
        """Rows of the model's hidden size."""
        out, cpu = self.room(x.size), np.empty_like(x)
        launch = operators.rms_norm(self._shape, self.put(x), self.put(gain), out, len(x), eps)
        self._kernels.rms_norm(x, gain, eps, self._threads, cpu)
        return Pair(name=name, gpu=self.run([launch], out, x.shape), cpu=cpu)

    def norm_heads(self, name: str, qkv: Float32, gains: tuple[Float32, Float32], eps: float) -> Pair:
        """Rows of q, k and v; the heads of q and of k are normed in place."""
        cpu, on_device = qkv.copy(), self.put(qkv)
        q_gain, k_gain = gains
        self._kernels.norm_heads(cpu, q_gain, k_gain, self._shape.kv_heads, eps, self._threads)
        on_gains = self.put(q_gain), self.put(k_gain)
        launch = operators.norm_heads(self._shape, on_device, on_gains[0], on_gains[1], len(qkv), eps)
        return Pair(name=name, gpu=self.run([launch], on_device, cpu.shape), cpu=cpu)

    def swiglu(self, name: str, gate_up: Float32) -> Pair:
        """Rows of twice the model's inner size."""
        cpu = np.empty((len(gate_up), self._shape.inner), np.float32)
        out = self.room(cpu.size)
        self._kernels.swiglu(gate_up, self._threads, cpu)
        launch = operators.swiglu(self._shape, self.put(gate_up), out, len(gate_up))
        return Pair(name=name, gpu=self.run([launch], out, cpu.shape), cpu=cpu)

    def exponential(self, name: str, x: Float32) -> Pair:
        """Any shape."""
        out = self.room(x.size)
        launch = operators.exponential(self.put(x), out, x.size)
        return Pair(name=name, gpu=self.run([launch], out, x.shape), cpu=self._kernels.exp(x))

    def log_softmax(self, name: str, logits: Float32) -> Pair:
        """Rows of any vocabulary."""
        out = self.room(logits.size)
        launch = operators.log_softmax(self.put(logits), out, *logits.shape)
        cpu = self._kernels.log_softmax(logits, self._threads)
        return Pair(name=name, gpu=self.run([launch], out, logits.shape), cpu=cpu)

    def attention(
        self, name: str, qkv: Float32, lengths: tuple[int, ...], theta: float, key_chunk: int, window: int = 0
    ) -> Pair:
        """Whole sequences of `lengths` tokens, rope and paged store included; pages in shuffled order."""
        s, tokens = self._shape, len(qkv)
        rows = paged_rows(lengths, s.page)
        count = int(rows.page_table.max()) + 1
        table = rope_table(max(lengths), s.dim, theta)
        cpu = self._cpu_attention(qkv.copy(), table, rows, count, key_chunk, window)
        step = lay_out_rows(rows, s, key_chunk)
        pool = count * s.page * s.kv_heads * s.dim
        names = {
            "qkv": self.put(qkv), "keys": self.room(pool), "values": self.room(pool),
            "table": self.put(rows.page_table), "sequence": self.put(rows.sequence),
            "position": self.put(rows.position), "pages": rows.page_table.shape[1],
        }  # fmt: skip
        rope = Launch(kernel="rope_store", grid=(tokens, 1, 1), block=128, shared=0,
                      arguments={**names, "cos_sin": self.put(table)})  # fmt: skip
        tiles = np.array(step.tiles, np.int32)
        units, out = tokens * s.heads * step.chunks, self.room(tokens * s.heads * s.dim)
        arguments = {
            **names, "tile_row": self.put(tiles[:, 0].copy()), "tile_count": self.put(tiles[:, 1].copy()),
            "scores": self.room(units * key_chunk), "maxima": self.room(units), "sums": self.room(units),
            "outputs": self.room(units * s.dim), "out": out, "chunks": step.chunks, "key_chunk": key_chunk,
            "first_row": 0, "window": window, "scale": score_scale(s.dim),
        }  # fmt: skip
        launches = [rope, *operators.attend(s, arguments, step.chunks, len(tiles), tokens, operators.QUERIES)]
        return Pair(name=name, gpu=self.run(launches, out, cpu.shape), cpu=cpu)

    def _cpu_attention(
        self, qkv: Float32, table: Float32, rows: Rows, count: int, key_chunk: int, window: int
    ) -> Float32:
        s = self._shape
        pages = Pages(
            keys=np.full((count, s.kv_heads, s.dim, s.page), np.nan, np.float32),
            values=np.full((count, s.kv_heads, s.page, s.dim), np.nan, np.float32),
        )
        out = np.empty((len(qkv), s.heads * s.dim), np.float32)
        self._kernels.rope_store(qkv, table, rows, pages, self._threads)
        self._kernels.attend(qkv, rows, pages, s.heads, key_chunk, window, self._threads, out)
        return out

    def run(self, launches: list[Launch], out: int, shape: tuple[int, ...]) -> Float32:
        """What lies at `out` after the launches; everything that was taken is given back."""
        for launch in launches:
            self._machine.launch(launch)
        result = np.full(shape, np.nan, np.float32)
        self._machine.download(out, result)
        for address in self._held:
            self._machine.release(address)
        self._held.clear()
        return result

    def room(self, count: int) -> int:
        """Address of `count` words, held until the next `run` ends."""
        self._held.append(self._machine.allocate(count))
        return self._held[-1]

    def put(self, array: Array) -> int:
        """Address of a copy of the array."""
        address = self.room(array.size)
        self._machine.upload(address, array)
        return address


def paged_rows(lengths: tuple[int, ...], page: int) -> Rows:
    """All tokens of sequences of these lengths, over pages dealt backwards."""
    needed = [-(-length // page) for length in lengths]
    table = np.zeros((len(lengths), max(needed)), np.int32)
    last = sum(needed)
    for row, count in zip(table, needed, strict=True):
        row[:count] = np.arange(last - 1, last - 1 - count, -1)
        last -= count
    return Rows(
        sequence=np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        position=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        page_table=table,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTiles:
    """Attention tiles of rows and the chunks of the longest."""

    tiles: tuple[tuple[int, int], ...]
    chunks: int


def lay_out_rows(rows: Rows, shape: Shape, key_chunk: int) -> RowTiles:
    """Tiles of whole sequences."""
    from engines.bundled.gpu.steps import cut_tiles

    sequence: Int32 = rows.sequence
    tiles = cut_tiles(sequence, operators.QUERIES // (shape.heads // shape.kv_heads))
    return RowTiles(tiles=tuple(tiles), chunks=int(rows.position.max()) // key_chunk + 1)
