"""The forward pass over the kernels: `portable` with its one fixed order, `free` with an order that follows the step.

It does not know requests or sampling. Rules: the order of sums comes from an `Order` chosen before the step and from
nothing else; K and V of all tokens of a layer are in their pages before any of them is attended to.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engines.bundled.arithmetic.free import free_order
from engines.bundled.arithmetic.order import DEFINITION, Order, portable_order
from engines.bundled.arithmetic.rope import rope_table
from engines.bundled.arithmetic.weights import Layer, Weights, pack_weights, storage
from engines.bundled.batch import StepBatch
from engines.bundled.config import EngineConfig, Float32, Model
from engines.bundled.kernels.interface import Kernels, Pages, Rows
from engines.bundled.kernels.library import load


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """Arrays for up to `capacity` tokens, reused from layer to layer and from step to step."""

    capacity: int
    hidden: Float32
    normed: Float32
    qkv: Float32
    attended: Float32
    gate_up: Float32
    gated: Float32


def open_kernel_arithmetic(model: Model, config: EngineConfig) -> KernelArithmetic:
    """`portable` or `free` for this model; see `open_arithmetic`."""
    kernels = load(config.isa, config.compiler)
    return KernelArithmetic(model, config, kernels, pack_weights(model, kernels, config.threads))


class KernelArithmetic:
    """Weights, KV pages and kernels of one lifetime."""

    def __init__(self, model: Model, config: EngineConfig, kernels: Kernels, weights: Weights) -> None:
        shape = model.config
        self.name = config.arithmetic
        self.definition = DEFINITION if config.arithmetic == "portable" else 0
        self.pages = tuple(_new_pages(model, config) for _ in range(shape.num_hidden_layers))
        self._model, self._config, self._kernels, self._weights = model, config, kernels, weights
        positions = min(shape.max_position_embeddings, config.num_pages * config.page_size)
        self._cos_sin = rope_table(positions, shape.head_dim, shape.rope_theta)
        self._buffers = self._new_buffers(min(config.max_num_batched_tokens, 64))

    def forward(self, batch: StepBatch) -> Float32:
        order, count = self._order(batch), len(batch.token)
        if count > self._buffers.capacity:
            self._buffers = self._new_buffers(count)
        b = self._buffers
        hidden = b.hidden[:count]
        np.take(self._weights.embedding, batch.token, axis=0, out=hidden)
        rows = Rows(sequence=batch.sequence, position=batch.position, page_table=batch.page_table)
        for layer, pages in zip(self._weights.layers, self.pages, strict=True):
            self._attention(layer, pages, rows, order, count)
            self._mlp(layer, order, count)
        return self._logits(hidden[batch.wanted], order)

    def _attention(self, layer: Layer, pages: Pages, rows: Rows, order: Order, count: int) -> None:
        k, b, threads = self._kernels, self._buffers, self._config.threads
        normed, qkv, attended = b.normed[:count], b.qkv[:count], b.attended[:count]
        k.rms_norm(b.hidden[:count], layer.attention_norm, self._model.config.rms_norm_eps, threads, normed)
        k.linear(normed, layer.qkv, order.qkv, threads, qkv)
        if layer.qkv_bias is not None:
            qkv += layer.qkv_bias
        k.rope_store(qkv, self._cos_sin, rows, pages, threads)
        heads = self._model.config.num_attention_heads
        k.attend(qkv, rows, pages, heads, order.key_chunk, threads, attended)
        k.linear_add(attended, layer.attention_out, order.attention_out, threads, b.hidden[:count])

    def _mlp(self, layer: Layer, order: Order, count: int) -> None:
        k, b, threads = self._kernels, self._buffers, self._config.threads
        normed, gate_up, gated = b.normed[:count], b.gate_up[:count], b.gated[:count]
        k.rms_norm(b.hidden[:count], layer.mlp_norm, self._model.config.rms_norm_eps, threads, normed)
        k.linear(normed, layer.gate_up, order.gate_up, threads, gate_up)
        k.swiglu(gate_up, threads, gated)
        k.linear_add(gated, layer.down, order.down, threads, b.hidden[:count])

    def _logits(self, hidden: Float32, order: Order) -> Float32:
        normed = np.empty_like(hidden)
        threads, eps = self._config.threads, self._model.config.rms_norm_eps
        self._kernels.rms_norm(hidden, self._weights.norm, eps, threads, normed)
        logits = np.empty((len(hidden), self._model.config.vocab_size), np.float32)
        self._kernels.linear(normed, self._weights.head, order.head, threads, logits)
        return logits

    def log_softmax(self, logits: Float32) -> Float32:
        return self._kernels.log_softmax(logits, self._config.threads)

    def describe(self) -> dict[str, str | int | float | bool]:
        kernels, portable = self._kernels, self.name == "portable"
        order = portable_order(self._model.config)
        return {
            "arithmetic": self.name,
            "definition": self.definition,
            "backend": kernels.backend,
            "backend_reason": kernels.reason,
            "isa": kernels.isa,
            "compiler": kernels.compiler,
            "kernels_digest": kernels.digest,
            "threads": self._config.threads,
            "threads_seen": kernels.threads_seen(),
            "chunk_width": order.qkv if portable else "follows the step",
            "key_chunk": order.key_chunk if portable else "follows the step",
            "tuning": self._config.tuning,
            "weights": storage(self._weights),
        }

    def _order(self, batch: StepBatch) -> Order:
        if self.name == "portable":
            return portable_order(self._model.config)
        longest = int(batch.position.max()) + 1
        return free_order(
            self._model.config,
            rows=len(batch.token),
            longest=longest,
            threads=self._config.threads,
            tuning=self._config.tuning,
        )

    def _new_buffers(self, capacity: int) -> Buffers:
        c = self._model.config
        q, kv, inner = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim, c.intermediate_size
        widths = (c.hidden_size, c.hidden_size, q + 2 * kv, q, 2 * inner, inner)
        return Buffers(capacity, *(np.empty((capacity, width), np.float32) for width in widths))


def _new_pages(model: Model, config: EngineConfig) -> Pages:
    heads, dim = model.config.num_key_value_heads, model.config.head_dim
    return Pages(
        keys=np.zeros((config.num_pages, heads, dim, config.page_size), np.float32),
        values=np.zeros((config.num_pages, heads, config.page_size, dim), np.float32),
    )
