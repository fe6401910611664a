"""The operators of a model, from its shape: names, sizes, weights and rows made from a seed.

It knows no library. Rules: every product of matrices of the model is listed with its own K and N; what a model does
not have is said, not left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from engines.bundled.config import ModelConfig
from engines.ops.interface import AttentionFunction, Float32, Heads, Implementation, RowFunction

KEYS = 600  # of the token whose attention is looked at: three chunks of the portable definition
MOST_EXPERTS = 8  # experts that are really made; the router sees all


class RowOperator(NamedTuple):
    """An operator over rows of `columns` floats."""

    name: str
    shape: str
    columns: int
    scale: float
    build: Callable[[Implementation], RowFunction]


class AttentionOperator(NamedTuple):
    """Attention over one token's keys."""

    name: str
    shape: str
    build: Callable[[Implementation, int], AttentionFunction]  # with so many sequences


def row_operators(config: ModelConfig) -> list[RowOperator]:
    """All operators of the model that work on rows."""
    c = config
    heads = heads_of(c)
    q, inner = c.num_attention_heads * c.head_dim, c.intermediate_size
    matrices = {
        "linear qkv": (heads.columns, c.hidden_size), "linear attention_out": (c.hidden_size, q),
        "linear gate_up": (2 * inner, c.hidden_size), "linear down": (c.hidden_size, inner),
        "linear head": (c.vocab_size, c.hidden_size),
    }  # fmt: skip
    operators = [_linear(name, *shape) for name, shape in matrices.items()]
    gain = 1 + normal(1, c.hidden_size) * np.float32(0.1)
    operators += [
        RowOperator("rms_norm", f"{c.hidden_size}", c.hidden_size, 1.0,
                    lambda impl: impl.rms_norm(gain, c.rms_norm_eps)),
        RowOperator("swiglu", f"{inner}", 2 * inner, 1.0, lambda impl: impl.swiglu()),
        RowOperator("rope", f"{c.num_attention_heads} x {c.head_dim}", q, 1.0, lambda impl: impl.rope(heads, 777)),
        RowOperator("log_softmax", f"{c.vocab_size}", c.vocab_size, 3.0, lambda impl: impl.log_softmax()),
    ]  # fmt: skip
    return operators + ([_experts(c)] if c.num_experts else [])


def absent_operators(config: ModelConfig) -> dict[str, str]:
    """Operators this model does not have, each with the reason."""
    return {} if config.num_experts else {"moe": "the model has no experts"}


def attention_operator(config: ModelConfig) -> AttentionOperator:
    """Attention of the model's heads."""
    heads = heads_of(config)

    def build(implementation: Implementation, count: int) -> AttentionFunction:
        sequences: Sequence[Float32] = [normal(100 + i, 2 * KEYS, heads.columns) for i in range(count)]
        return implementation.attention(heads, sequences)

    return AttentionOperator("attention", f"{heads.heads}/{heads.kv_heads} x {heads.dim}, {KEYS} keys", build)


def heads_of(config: ModelConfig) -> Heads:
    """The shape of attention."""
    return Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)


def normal(seed: int, *shape: int) -> Float32:
    """Normal float32 values of a seed."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _linear(name: str, outputs: int, inputs: int) -> RowOperator:
    def build(implementation: Implementation) -> RowFunction:
        return implementation.linear(normal(2, outputs, inputs) * np.float32(inputs**-0.5))

    return RowOperator(name, f"{outputs} x {inputs}", inputs, 1.0, build)


def _experts(c: ModelConfig) -> RowOperator:
    count, inner = min(c.num_experts, MOST_EXPERTS), c.moe_intermediate_size

    def build(implementation: Implementation) -> RowFunction:
        scale = np.float32(c.hidden_size**-0.5)
        experts = [
            (normal(10 + i, 2 * inner, c.hidden_size) * scale, normal(200 + i, c.hidden_size, inner) * scale)
            for i in range(count)
        ]
        return implementation.experts(normal(3, count, c.hidden_size), experts, min(c.num_experts_per_tok, count))

    shape = f"{count} experts, {min(c.num_experts_per_tok, count)} a token, {inner} x {c.hidden_size}"
    return RowOperator("moe", shape, c.hidden_size, 1.0, build)
