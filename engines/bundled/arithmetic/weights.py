"""A model's weights, packed for the kernels: what one layer needs and what surrounds the layers.

It does not know KV pages or steps. Rules: q, k and v are one matrix, gate and up are one; each matrix is packed once;
a missing or misshapen weight is one error that names it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from engines.bundled.config import Float32, Model, ModelConfig
from engines.bundled.kernels.interface import Kernels, Weight

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """One decoder layer. Biases are None where the model has none."""

    attention_norm: Float32
    qkv: Weight
    qkv_bias: Float32 | None
    attention_out: Weight
    mlp_norm: Float32
    gate_up: Weight
    down: Weight


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """A whole model: embedding (V, hidden), layers, final norm, output head."""

    embedding: Float32
    layers: tuple[Layer, ...]
    norm: Float32
    head: Weight


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight a model of this shape must have, by name; biases are optional and not listed."""
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (vocab, hidden)
    for i in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def check_weights(model: Model) -> None:
    """Raises ValueError naming every weight that is missing, misshapen or not float32."""
    wrong = []
    for name, shape in sorted(expected_shapes(model.config).items()):
        found = model.weights.get(name)
        if found is None:
            wrong.append(f"{name}: missing, expected {shape}")
        elif found.shape != shape or found.dtype != np.float32:
            wrong.append(f"{name}: expected {shape} float32, got {found.shape} {found.dtype}")
    if wrong:
        raise ValueError(f"model {model.name}: " + "; ".join(wrong))


def join(weights: Mapping[str, Float32], layer: int, names: tuple[str, ...]) -> Float32:
    """Rows of several matrices of one layer, one below the other."""
    return np.concatenate([weights[f"model.layers.{layer}.{name}.weight"] for name in names])


def join_bias(weights: Mapping[str, Float32], layer: int, names: tuple[str, ...]) -> Float32 | None:
    """Biases of several matrices of one layer, or None when none of them has one."""
    found = [weights.get(f"model.layers.{layer}.{name}.bias") for name in names]
    if all(bias is None for bias in found):
        return None
    sizes = [len(weights[f"model.layers.{layer}.{name}.weight"]) for name in names]
    return np.concatenate([np.zeros(n, np.float32) if b is None else b for b, n in zip(found, sizes, strict=True)])


def pack_weights(model: Model, kernels: Kernels, threads: int) -> Weights:
    """Packs every matrix of the model. Raises ValueError (`check_weights`)."""
    check_weights(model)
    source = {name: np.ascontiguousarray(array) for name, array in sorted(model.weights.items())}
    embedding = source["model.embed_tokens.weight"]
    head = embedding if model.config.tie_word_embeddings else source["lm_head.weight"]
    return Weights(
        embedding=embedding,
        layers=tuple(_pack_layer(source, i, kernels, threads) for i in range(model.config.num_hidden_layers)),
        norm=source["model.norm.weight"],
        head=kernels.pack(head, threads),
    )


def storage(weights: Weights) -> str:
    """How many matrices are kept as exact 4-bit or 8-bit codes and how many as float32, in words."""
    layers = ((w.qkv, w.attention_out, w.gate_up, w.down) for w in weights.layers)
    kinds = Counter(matrix.kind for matrix in (weights.head, *(matrix for layer in layers for matrix in layer)))
    return ", ".join(
        f"{count} x {kind}-bit codes" if kind else f"{count} x float32" for kind, count in sorted(kinds.items())
    )


def _pack_layer(source: Mapping[str, Float32], i: int, kernels: Kernels, threads: int) -> Layer:
    prefix = f"model.layers.{i}"
    return Layer(
        attention_norm=source[f"{prefix}.input_layernorm.weight"],
        qkv=kernels.pack(join(source, i, QKV), threads),
        qkv_bias=join_bias(source, i, QKV),
        attention_out=kernels.pack(source[f"{prefix}.self_attn.o_proj.weight"], threads),
        mlp_norm=source[f"{prefix}.post_attention_layernorm.weight"],
        gate_up=kernels.pack(join(source, i, GATE_UP), threads),
        down=kernels.pack(source[f"{prefix}.mlp.down_proj.weight"], threads),
    )
