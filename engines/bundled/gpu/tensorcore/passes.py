"""The forward pass over a step's rows with a set of operators: Llama and its kin. No batches, no requests.

It does not know where rows come from. Rules: hidden states are bfloat16 between operators, rounded once each; the set
of operators alone decides on orders of sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from engines.bundled.gpu.tensorcore import operators
from engines.bundled.gpu.tensorcore.attention import attend
from engines.bundled.gpu.tensorcore.experts import ExpertWeights, run_experts
from engines.bundled.gpu.tensorcore.linear import Linear
from engines.bundled.gpu.tensorcore.operators import Heads, Rows
from engines.bundled.gpu.tensorcore.weights import Layer, Weights

Tensor = torch.Tensor
Cache = tuple[Tensor, Tensor]  # keys and values of a layer, each (slots, kv heads, dim)


class Operators(Protocol):
    """What a layer is made of."""

    @property
    def linear(self) -> Linear:
        """The matrix product."""

    @property
    def shared(self) -> Linear:
        """The product over a K that ranks may share: attention output and down projection."""

    @property
    def heads(self) -> Heads:
        """The attention shape."""

    def norm(self, hidden: Tensor, gain: Tensor, update: Tensor | None = None) -> Tensor:
        """RMSNorm of hidden, to which `update` is added in place before."""

    def attention(self, qkv: Tensor, rows: Rows, cache: Cache, layer: Layer) -> Tensor:
        """Rope, the paged store and attention."""

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """The gated activation."""

    def experts(self, x: Tensor, weights: ExpertWeights) -> Tensor:
        """What a mixture's experts say of each row."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TritonOperators:
    """Our kernels around a way to multiply. `heads` is the attention shape, its chunk of keys included."""

    linear: Linear
    shared: Linear
    heads: Heads
    table: Tensor
    eps: float

    def norm(self, hidden: Tensor, gain: Tensor, update: Tensor | None = None) -> Tensor:
        """By our kernel."""
        return operators.norm(hidden, gain, self.eps, update)

    def attention(self, qkv: Tensor, rows: Rows, cache: Cache, layer: Layer) -> Tensor:
        """By our kernels."""
        operators.rope(qkv, self.table, rows, cache, self.heads, layer.head_norms, self.eps)
        return attend(qkv, rows, cache, self.heads, layer.window)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """By our kernel."""
        return operators.swiglu(gate_up)

    def experts(self, x: Tensor, weights: ExpertWeights) -> Tensor:
        """By our kernels; the router is a product as any other."""
        return run_experts(x, self.linear(x, weights.router), weights)


def _mlp(ops: Operators, normed: Tensor, layer: Layer) -> Tensor:
    if layer.experts is not None:
        return ops.experts(normed, layer.experts)
    if layer.gate_up is None or layer.down is None:
        raise ValueError("a layer without an MLP")
    return ops.shared(ops.swiglu(ops.linear(normed, layer.gate_up)), layer.down)


def run_pass(weights: Weights, caches: list[Cache], ops: Operators, rows: Rows, wanted: Tensor | None) -> Tensor:
    """Logits (W, vocab) in the weights' type; `wanted` None: of every row."""
    hidden = torch.index_select(weights.embedding, 0, rows.token)
    update: Tensor | None = None
    for layer, cache in zip(weights.layers, caches, strict=True):
        normed = ops.norm(hidden, layer.attention_norm, update)
        qkv = ops.linear(normed, layer.qkv)
        if layer.qkv_bias is not None:
            qkv += layer.qkv_bias
        update = ops.shared(ops.attention(qkv, rows, cache, layer), layer.attention_out)
        normed = ops.norm(hidden, layer.mlp_norm, update)
        update = _mlp(ops, normed, layer)
    if update is None:
        raise ValueError("a model without layers")
    if wanted is None:
        return ops.linear(ops.norm(hidden, weights.norm, update), weights.head)
    last = hidden.index_select(0, wanted)
    return ops.linear(ops.norm(last, weights.norm, update.index_select(0, wanted)), weights.head)
