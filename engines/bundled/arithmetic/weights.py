"""A model's weights, packed for the kernels: what one layer needs and what surrounds the layers.

It does not know KV pages or steps. Rules: q, k and v are one matrix, gate and up are one; each matrix is packed once;
a missing or misshapen weight is one error that names it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from engines.bundled.config import Float32, Model
from engines.bundled.kernels.interface import Kernels, Weight
from engines.bundled.models.tensors import EMBEDDING, FINAL_NORM, LM_HEAD, tensor_shapes
from engines.bundled.moe import Experts, pack_experts

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mlp:
    """The matrices of an ordinary MLP."""

    gate_up: Weight
    down: Weight


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """One decoder layer. Biases and head norms are None where the model has none."""

    attention_norm: Float32
    qkv: Weight
    qkv_bias: Float32 | None
    qk_norm: tuple[Float32, Float32] | None  # gains (head_dim,) of q and of k
    window: int  # keys a token sees; 0: all
    attention_out: Weight
    mlp_norm: Float32
    mlp: Mlp | Experts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """A whole model: embedding (V, hidden), layers, final norm, output head."""

    embedding: Float32
    layers: tuple[Layer, ...]
    norm: Float32
    head: Weight


def check_weights(model: Model) -> None:
    """Raises ValueError naming every weight that is missing, unknown, misshapen or not float32."""
    wrong = []
    shapes = tensor_shapes(model.config)
    wrong += [f"{name}: not part of a model of this shape" for name in sorted(set(model.weights) - set(shapes))]
    for name, shape in sorted(shapes.items()):
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
    """Biases of several matrices of one layer, or None where they have none."""
    biases = [f"model.layers.{layer}.{name}.bias" for name in names]
    return np.concatenate([weights[name] for name in biases]) if biases[0] in weights else None


def head_norms(weights: Mapping[str, Float32], layer: int) -> tuple[Float32, Float32] | None:
    """Gains (head_dim,) of the norms of q and k heads of one layer, or None where it has none."""
    q, k = (f"model.layers.{layer}.self_attn.{part}_norm.weight" for part in "qk")
    return (dense(weights[q]), dense(weights[k])) if q in weights else None


def dense(array: Float32) -> Float32:
    """The array, C-contiguous."""
    return np.ascontiguousarray(array)


def pack_weights(model: Model, kernels: Kernels, threads: int) -> Weights:
    """Packs every matrix of the model, one after the other. Raises ValueError (`check_weights`)."""
    check_weights(model)
    embedding = dense(model.weights[EMBEDDING])
    head = embedding if model.config.tie_word_embeddings else dense(model.weights[LM_HEAD])
    return Weights(
        embedding=embedding,
        layers=tuple(_pack_layer(model, i, kernels, threads) for i in range(model.config.num_hidden_layers)),
        norm=dense(model.weights[FINAL_NORM]),
        head=kernels.pack(head, threads),
    )


def matrices(weights: Weights) -> Iterator[Weight]:
    """Every packed matrix."""
    yield weights.head
    for layer in weights.layers:
        yield from (layer.qkv, layer.attention_out)
        yield from (layer.mlp.gate_up, layer.mlp.down) if isinstance(layer.mlp, Mlp) else layer.mlp.matrices()


def weight_bytes(weights: Weights) -> int:
    """Bytes of everything held, packed or not."""
    norms = [norm for layer in weights.layers for norm in (layer.attention_norm, layer.mlp_norm)]
    plain = sum(array.nbytes for array in (weights.embedding, weights.norm, *norms))
    return plain + sum(matrix.data.nbytes + matrix.scales.nbytes for matrix in matrices(weights))


def storage(packed: Iterable[Weight]) -> str:
    """How many matrices are kept as exact 4-bit or 8-bit codes and how many as float32, in words."""
    kinds = Counter(matrix.kind for matrix in packed)
    return ", ".join(
        f"{count} x {kind}-bit codes" if kind else f"{count} x float32" for kind, count in sorted(kinds.items())
    )


def _pack_layer(model: Model, i: int, kernels: Kernels, threads: int) -> Layer:
    source, prefix = model.weights, f"model.layers.{i}"

    def pack(name: str) -> Weight:
        return kernels.pack(dense(source[f"{prefix}.{name}.weight"]), threads)

    return Layer(
        attention_norm=dense(source[f"{prefix}.input_layernorm.weight"]),
        qkv=kernels.pack(join(source, i, QKV), threads),
        qkv_bias=join_bias(source, i, QKV),
        qk_norm=head_norms(source, i),
        window=model.config.window(i),
        attention_out=pack("self_attn.o_proj"),
        mlp_norm=dense(source[f"{prefix}.post_attention_layernorm.weight"]),
        mlp=_pack_mlp(model, i, kernels, threads),
    )


def _pack_mlp(model: Model, i: int, kernels: Kernels, threads: int) -> Mlp | Experts:
    if model.config.has_experts(i):
        return pack_experts(model, i, range(model.config.num_experts), kernels, threads)
    down = kernels.pack(dense(model.weights[f"model.layers.{i}.mlp.down_proj.weight"]), threads)
    return Mlp(gate_up=kernels.pack(join(model.weights, i, GATE_UP), threads), down=down)
