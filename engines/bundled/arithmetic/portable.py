"""The forward pass over the kernels: `portable` with its one fixed order, `free` with an order that follows the step.

It does not know requests or sampling. Rules: the order of sums comes from an `Order` chosen before the step and from
nothing else; K and V of all tokens of a layer are in their pages before any of them is attended to.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from engines.bundled.arithmetic.free import free_order
from engines.bundled.arithmetic.order import DEFINITION, Order, portable_order
from engines.bundled.arithmetic.rope import model_rope_table
from engines.bundled.arithmetic.weights import Layer, Mlp, Weights, matrices, pack_weights, storage, weight_bytes
from engines.bundled.batch import StepBatch
from engines.bundled.config import EngineConfig, Float32, Int32, Model
from engines.bundled.kernels.interface import Kernels, Pages, Rows
from engines.bundled.kernels.library import load
from engines.bundled.moe import Experts, route, run_experts


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
        self._cos_sin = model_rope_table(shape, positions)
        self._buffers = self._new_buffers(min(config.max_num_batched_tokens, 64))
        self._steps = 0

    def forward(self, batch: StepBatch) -> Float32:
        order, count = self._order(batch), len(batch.token)
        if count > self._buffers.capacity:
            self._buffers = self._new_buffers(count)
        hidden = self._buffers.hidden[:count]
        self._embed(batch.token, hidden)
        rows = Rows(sequence=batch.sequence, position=batch.position, page_table=batch.page_table)
        for index, layer in enumerate(self._weights.layers):
            self._attention(index, layer, rows, order, count)
            self._mlp(index, layer, order, count)
        self._steps += 1
        return self._logits(hidden[batch.wanted], order)

    def _embed(self, token: Int32, out: Float32) -> None:
        np.take(self._weights.embedding, token, axis=0, out=out)

    def _attention(self, index: int, layer: Layer, rows: Rows, order: Order, count: int) -> None:
        attended = self._attend(layer, self.pages[index], rows, order, count)
        self._kernels.linear_add(
            attended, layer.attention_out, order.attention_out, self._config.threads, self._buffers.hidden[:count]
        )

    def _attend(self, layer: Layer, pages: Pages, rows: Rows, order: Order, count: int) -> Float32:
        """(T, heads head_dim), before the output projection."""
        k, b, threads = self._kernels, self._buffers, self._config.threads
        normed, qkv, attended = b.normed[:count], b.qkv[:count], b.attended[:count]
        k.rms_norm(b.hidden[:count], layer.attention_norm, self._model.config.rms_norm_eps, threads, normed)
        k.linear(normed, layer.qkv, order.qkv, threads, qkv)
        if layer.qkv_bias is not None:
            k.add_bias(qkv, layer.qkv_bias, threads)
        if layer.qk_norm is not None:
            kv_heads, eps = self._model.config.num_key_value_heads, self._model.config.rms_norm_eps
            k.norm_heads(qkv, *layer.qk_norm, kv_heads, eps, threads)
        k.rope_store(qkv, self._cos_sin, rows, pages, threads)
        heads = self._model.config.num_attention_heads
        k.attend(qkv, rows, pages, heads, order.key_chunk, layer.window, threads, attended)
        return attended

    def _mlp(self, index: int, layer: Layer, order: Order, count: int) -> None:  # noqa: ARG002 - a shard asks for it
        k, b, threads = self._kernels, self._buffers, self._config.threads
        hidden, normed = b.hidden[:count], b.normed[:count]
        k.rms_norm(hidden, layer.mlp_norm, self._model.config.rms_norm_eps, threads, normed)
        if isinstance(layer.mlp, Experts):
            self._mix(layer.mlp, normed, order, hidden)
        else:
            k.linear_add(self._gate(layer.mlp, normed, order, count), layer.mlp.down, order.down, threads, hidden)

    def _gate(self, mlp: Mlp, normed: Float32, order: Order, count: int) -> Float32:
        """(T, inner), before the down projection."""
        k, b, threads = self._kernels, self._buffers, self._config.threads
        gate_up, gated = b.gate_up[:count], b.gated[:count]
        k.linear(normed, mlp.gate_up, order.gate_up, threads, gate_up)
        k.swiglu(gate_up, threads, gated)
        return gated

    def _mix(self, experts: Experts, normed: Float32, order: Order, hidden: Float32) -> None:
        """Adds what the experts say of each row to `hidden` (T, hidden)."""
        threads = self._config.threads
        routing = route(self._kernels, experts, normed, order, threads)
        outputs = run_experts(self._kernels, experts, normed, routing, order, threads)
        hidden += self._kernels.combine(outputs, routing.weight, threads)

    def _logits(self, hidden: Float32, order: Order) -> Float32:
        normed = np.empty_like(hidden)
        threads, eps = self._config.threads, self._model.config.rms_norm_eps
        self._kernels.rms_norm(hidden, self._weights.norm, eps, threads, normed)
        logits = np.empty((len(hidden), self._weights.head.rows), np.float32)
        self._kernels.linear(normed, self._weights.head, order.head, threads, logits)
        return logits

    def log_softmax(self, logits: Float32) -> Float32:
        return self._kernels.log_softmax(logits, self._config.threads)

    def counts(self) -> tuple[Mapping[str, int], ...]:
        """What this one process holds and has done; see `batch.Ranked`."""
        return ({
            "weight_bytes": self._weight_bytes(), "steps": self._steps,
            "kv_bytes": sum(pages.keys.nbytes + pages.values.nbytes for pages in self.pages),
            **process_counts(self._kernels),
        },)  # fmt: skip

    def _weight_bytes(self) -> int:
        return weight_bytes(self._weights)

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
            "logits_device": "cpu",
            "weights": storage(matrices(self._weights)),
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


def process_counts(kernels: Kernels) -> dict[str, int]:
    """What a rank says of its process; see `batch.Ranked`."""
    return {
        "pid": os.getpid(), "threads_seen": kernels.threads_seen(), "cores": len(os.sched_getaffinity(0)),
        "peak_memory_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }  # fmt: skip
