"""The encoder over the kernels: any images packed into one pass, one embedding per patch.

It does not know files or requests. Rules: a patch sees all patches of its own image and no others; `portable` takes the
order of sums from the model alone, `free` from the pass; keys and values live for one pass, a page table per image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engines.bundled.arithmetic.free import split_keys, split_width
from engines.bundled.arithmetic.order import KEY_CHUNK
from engines.bundled.arithmetic.rope import angle_table, inverse_frequencies
from engines.bundled.config import Float32, Int32
from engines.bundled.kernels.interface import Kernels, Pages, Rows, Weight
from engines.bundled.vision.config import VisionConfig, VisionModel
from engines.bundled.vision.picture import Patches

PAGE = 16


class Pass(NamedTuple):
    """What decides the order of sums of one pass."""

    rows: int
    longest: int


class _Layer(NamedTuple):
    attention_norm: Float32
    qkv: Weight
    attention_out: Weight
    ffn_norm: Float32
    gate_up: Weight
    down: Weight


def grid_table(config: VisionConfig, rows: int, columns: int) -> Float32:
    """(rows * columns, head_dim): cosines, then sines. The even frequencies turn by row, the odd ones by column."""
    frequency = inverse_frequencies(config.head_dim, config.rope_theta)
    row, column = np.divmod(np.arange(rows * columns), columns)
    by_row = row.astype(np.float32)[:, None] * frequency[None, 0::2]
    by_column = column.astype(np.float32)[:, None] * frequency[None, 1::2]
    return angle_table(np.concatenate([by_row, by_column], axis=1))


class Encoder:
    """Packed weights and kernels of one lifetime."""

    def __init__(self, model: VisionModel, kernels: Kernels, arithmetic: str, threads: int, tuning: int) -> None:
        """`arithmetic` is "portable" or "free"."""
        self.config, self.kernels = model.config, kernels
        self._free, self._threads, self._tuning = arithmetic == "free", threads, tuning
        weights = model.weights
        self._patches = kernels.pack(np.ascontiguousarray(weights["patch_conv.weight"]), threads)
        self._norm = weights["ln_pre.weight"]
        self._layers = tuple(self._pack(model, index) for index in range(model.config.num_hidden_layers))

    def _pack(self, model: VisionModel, index: int) -> _Layer:
        prefix = f"transformer.layers.{index}"

        def pack(*names: str) -> Weight:
            parts = [model.weights[f"{prefix}.{name}.weight"] for name in names]
            return self.kernels.pack(np.concatenate(parts), self._threads)

        return _Layer(
            attention_norm=model.weights[f"{prefix}.attention_norm.weight"],
            qkv=pack("attention.q_proj", "attention.k_proj", "attention.v_proj"),
            attention_out=pack("attention.o_proj"),
            ffn_norm=model.weights[f"{prefix}.ffn_norm.weight"],
            gate_up=pack("feed_forward.gate_proj", "feed_forward.up_proj"),
            down=pack("feed_forward.down_proj"),
        )

    def encode(self, images: Sequence[Patches]) -> list[Float32]:
        """The embeddings (patches, hidden) of each image; at least one image."""
        counts = [len(image.values) for image in images]
        step = Pass(sum(counts), max(counts))
        hidden = self._linear(np.concatenate([image.values for image in images]), self._patches, step)
        hidden = self._norm_rows(hidden, self._norm)
        tables = [grid_table(self.config, image.rows, image.columns) for image in images]
        for layer in self._layers:
            attended = self._attention(layer, hidden, counts, tables, step)
            self._add(attended, layer.attention_out, step, hidden)
            gate_up = self._linear(self._norm_rows(hidden, layer.ffn_norm), layer.gate_up, step)
            gated = np.empty((len(hidden), self.config.intermediate_size), np.float32)
            self.kernels.swiglu(gate_up, self._threads, gated)
            self._add(gated, layer.down, step, hidden)
        ends = np.cumsum(counts)
        return [hidden[end - count : end] for end, count in zip(ends, counts, strict=True)]

    def _attention(
        self, layer: _Layer, hidden: Float32, counts: list[int], tables: list[Float32], step: Pass
    ) -> Float32:
        c = self.config
        qkv = self._linear(self._norm_rows(hidden, layer.attention_norm), layer.qkv, step)
        pages, table = _fresh_pages(counts, c.num_attention_heads, c.head_dim)
        begin = 0
        for index, (count, angles) in enumerate(zip(counts, tables, strict=True)):
            place = np.arange(count, dtype=np.int32)
            rows = Rows(sequence=np.full(count, index, np.int32), position=place, page_table=table)
            self.kernels.rope_store(qkv[begin : begin + count], angles, rows, pages, self._threads)
            begin += count
        everywhere = Rows(  # each patch stands at the end of its image, and so sees all of it
            sequence=np.repeat(np.arange(len(counts), dtype=np.int32), counts),
            position=np.repeat(np.array(counts, np.int32) - 1, counts).astype(np.int32),
            page_table=table,
        )
        out = np.empty((len(hidden), c.num_attention_heads * c.head_dim), np.float32)
        chunk = split_keys(step.longest, tuning=self._tuning) if self._free else KEY_CHUNK
        self.kernels.attend(qkv, everywhere, pages, c.num_attention_heads, chunk, 0, self._threads, out)
        return out

    def _width(self, weight: Weight, step: Pass) -> int:
        if not self._free:
            return self.config.chunk_width
        return split_width(weight.columns, rows=step.rows, threads=self._threads, tuning=self._tuning)

    def _linear(self, x: Float32, weight: Weight, step: Pass) -> Float32:
        out = np.empty((len(x), weight.rows), np.float32)
        self.kernels.linear(x, weight, self._width(weight, step), self._threads, out)
        return out

    def _add(self, x: Float32, weight: Weight, step: Pass, hidden: Float32) -> None:
        self.kernels.linear_add(x, weight, self._width(weight, step), self._threads, hidden)

    def _norm_rows(self, x: Float32, gain: Float32) -> Float32:
        out = np.empty_like(x)
        self.kernels.rms_norm(x, gain, self.config.rms_norm_eps, self._threads, out)
        return out


def _fresh_pages(counts: list[int], heads: int, dim: int) -> tuple[Pages, Int32]:
    """Pages for all patches of all images, and which of them are whose."""
    each = [-(-count // PAGE) for count in counts]
    table = np.zeros((len(counts), max(each)), np.int32)
    for row, (count, end) in enumerate(zip(each, np.cumsum(each), strict=True)):
        table[row, :count] = np.arange(end - count, end)
    total = sum(each)
    pages = Pages(
        keys=np.zeros((total, heads, dim, PAGE), np.float32), values=np.zeros((total, heads, PAGE, dim), np.float32)
    )
    return pages, table
