"""A layer of experts run twice on the same data, by the GPU's kernels and by the CPU's, as the start-up check asks.

It judges nothing. Rules: router ties, ids and weights included, are held by what the mix gives; few pairs and many
take different kernels, so both are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from engines.bundled.arithmetic.order import Order, portable_order
from engines.bundled.config import Float32, ModelConfig
from engines.bundled.gpu import operators
from engines.bundled.gpu.cases import Kind, Operators, Pair, hashed
from engines.bundled.gpu.experts import ExpertBuffers, GpuExperts, launches, matrix_words, sizes
from engines.bundled.gpu.interface import Launch
from engines.bundled.gpu.operators import Linear
from engines.bundled.kernels.interface import Kernels
from engines.bundled.moe import Experts, route, run_experts

MOST_EXPERTS, MOST_CHOSEN = 8, 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertWeights:
    """Of one layer: router (E, hidden), gate_up (E, 2 inner, hidden), down (E, hidden, inner)."""

    router: Float32
    gate_up: Float32
    down: Float32


def expert_pair(
    ops: Operators, kernels: Kernels, model: ModelConfig, rows: int, kind: Kind, order: Order | None = None
) -> Pair:
    """`rows` tokens through a layer of a few experts of the model's hidden size; two tokens are the same.

    Weights of `wide` data are made smaller by 2^48, so that gate times up stays finite: what comes of a NaN is not
    defined.
    """
    small = shrink(model)
    weights = ExpertWeights(
        router=hashed((small.num_experts, small.hidden_size), 31, kind),
        gate_up=hashed((small.num_experts, 2 * small.moe_intermediate_size, small.hidden_size), 32, kind)
        * np.float32(2.0**-48 if kind == "wide" else 1.0),
        down=hashed((small.num_experts, small.hidden_size, small.moe_intermediate_size), 33, kind),
    )
    weights.router[-1] = weights.router[0]  # a tie between two experts for every token
    x, hidden = hashed((rows, small.hidden_size), 34, kind), hashed((rows, small.hidden_size), 35, kind)
    x[-1] = x[0]
    order = order or portable_order(small)
    return Pair(
        name=f"experts of {rows} tokens on {kind} data",
        gpu=_on_gpu(ops, small, weights, order, x, hidden),
        cpu=_on_cpu(kernels, small, weights, order, x, hidden),
    )


def shrink(model: ModelConfig) -> ModelConfig:
    """The model with few, narrow experts: two whole chunks of their inner width and a short one, or less."""
    return replace(
        model,
        num_experts=min(model.num_experts, MOST_EXPERTS),
        num_experts_per_tok=min(model.num_experts_per_tok, MOST_CHOSEN),
        moe_intermediate_size=min(model.moe_intermediate_size, 2 * model.chunk_width + 16),
    )


def _on_cpu(
    kernels: Kernels, model: ModelConfig, weights: ExpertWeights, order: Order, x: Float32, hidden: Float32
) -> Float32:
    layer = Experts(
        router=kernels.pack(weights.router, 1),
        first=0,
        gate_up=tuple(kernels.pack(one, 1) for one in weights.gate_up),
        down=tuple(kernels.pack(one, 1) for one in weights.down),
        per_token=model.num_experts_per_tok,
    )
    routing = route(kernels, layer, x, order, 1)
    outputs = run_experts(kernels, layer, x, routing, order, 1)
    mixed: Float32 = hidden + kernels.combine(outputs, routing.weight, 1)
    return mixed


def _on_gpu(
    ops: Operators, model: ModelConfig, weights: ExpertWeights, order: Order, x: Float32, hidden: Float32
) -> Float32:
    rows, (count, double, size) = len(x), weights.gate_up.shape
    inner = double // 2
    strides = matrix_words(double, size), matrix_words(size, inner)
    layer = GpuExperts(
        router=ops.room(operators.padded(count) * size),
        gate_up=ops.room(count * strides[0]),
        down=ops.room(count * strides[1]),
    )
    packs = [operators.pack(ops.put(weights.router), layer.router, count, size)]
    for e in range(count):
        packs.append(operators.pack(ops.put(weights.gate_up[e]), layer.gate_up + 4 * e * strides[0], double, size))
        packs.append(operators.pack(ops.put(weights.down[e]), layer.down + 4 * e * strides[1], size, inner))
    buffers = ExpertBuffers(**{name: ops.room(words) for name, words in sizes(model, rows).items()})
    on_x, on_hidden = ops.put(x), ops.put(hidden)
    router = Linear(
        x=on_x, weight=layer.router, out=buffers.router, rows=rows, outputs=count, inputs=size, width=order.gate_up
    )
    run: list[Launch] = [
        *packs,
        operators.linear(router, ops.room(operators.PARTIAL_FLOATS), ops.linked),
        *launches(model, layer, buffers, order, on_x, on_hidden, rows),
    ]
    return ops.run(run, on_hidden, hidden.shape)
