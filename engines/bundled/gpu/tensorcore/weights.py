"""A model's weights as bfloat16 tensors on the device: from a model's arrays, or random from a seed.

It computes nothing. Rules: q, k and v are one matrix, gate and up are one; a random model is named by its seed and a
checksum over every element as it lies on the device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from engines.bundled.config import EngineConfig, Model, ModelConfig
from engines.bundled.errors import NotSupported
from engines.bundled.gpu.tensorcore.experts import ExpertWeights
from engines.bundled.models.random_8b import WIDTH, SeededWeights
from engines.bundled.models.tiny import GOLDEN

Tensor = torch.Tensor
Source = Callable[[str, tuple[int, ...]], Tensor]  # name and shape to a tensor on the device
SPREAD = 0.02  # standard deviation of random weights
PIECE = 1 << 26  # elements made at a time
K_ORDERS = ("chain", "tree")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """One decoder layer; None where the model has none."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    head_norms: tuple[Tensor, Tensor] | None  # of each head of q and of k
    attention_out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor | None
    down: Tensor | None
    experts: ExpertWeights | None = None  # instead of gate_up and down
    window: int = 0  # keys a token sees, itself included; 0: all


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """A whole model."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor


def check_family(config: ModelConfig, engine: EngineConfig) -> None:
    """Raises NotSupported for what these kernels do not compute, and ValueError for a `k_order` there is not."""
    if engine.k_order not in K_ORDERS:
        raise ValueError(f"k_order: expected one of {', '.join(K_ORDERS)}, got {engine.k_order!r}")
    if engine.k_order == "tree" and config.num_experts and engine.arithmetic == "tensorcore":
        raise NotSupported("k_order=tree: a mixture of experts is not summed in chunks of K here; set k_order=chain")
    reasons = {
        f"a head dimension of {config.head_dim} (16 to 256, even)": config.head_dim % 2
        or not 16 <= config.head_dim <= 256,
        "more than 16 query heads per KV head": config.num_attention_heads > 16 * config.num_key_value_heads,
    }
    for what, refused in reasons.items():
        if refused:
            raise NotSupported(f"dtype=bfloat16 on device=cuda: {what} not supported; use dtype=float32 on device=cpu")


def load_weights(config: ModelConfig, take: Source) -> Weights:
    """All weights; `take` is asked for each tensor by its Hugging Face name, in the order of use."""
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    embedding = take("model.embed_tokens.weight", (vocab, hidden))
    return Weights(
        embedding=embedding,
        layers=tuple(_load_layer(config, take, i, inner) for i in range(config.num_hidden_layers)),
        norm=take("model.norm.weight", (hidden,)),
        head=embedding if config.tie_word_embeddings else take("lm_head.weight", (vocab, hidden)),
    )


def _load_layer(config: ModelConfig, take: Source, index: int, inner: int) -> Layer:
    hidden, dim, prefix = config.hidden_size, config.head_dim, f"model.layers.{index}"
    q, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
    sparse = config.has_experts(index)

    def matrix(name: str, rows: int, columns: int) -> Tensor:
        return take(f"{prefix}.{name}.weight", (rows, columns))

    attention = (("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv))
    return Layer(
        attention_norm=take(f"{prefix}.input_layernorm.weight", (hidden,)),
        qkv=torch.cat([matrix(name, rows, hidden) for name, rows in attention]),
        qkv_bias=(
            torch.cat([take(f"{prefix}.{name}.bias", (rows,)) for name, rows in attention]) if config.qkv_bias else None
        ),
        head_norms=(
            (take(f"{prefix}.self_attn.q_norm.weight", (dim,)), take(f"{prefix}.self_attn.k_norm.weight", (dim,)))
            if config.qk_norm
            else None
        ),
        attention_out=matrix("self_attn.o_proj", hidden, q),
        mlp_norm=take(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        gate_up=(
            None
            if sparse
            else torch.cat([matrix("mlp.gate_proj", inner, hidden), matrix("mlp.up_proj", inner, hidden)])
        ),
        down=None if sparse else matrix("mlp.down_proj", hidden, inner),
        experts=_load_experts(config, matrix) if sparse else None,
        window=config.window(index),
    )


def _load_experts(config: ModelConfig, matrix: Callable[[str, int, int], Tensor]) -> ExpertWeights:
    hidden, inner = config.hidden_size, config.moe_intermediate_size

    def of(expert: int, *names: str) -> Tensor:
        return torch.cat([matrix(f"mlp.experts.{expert}.{name}_proj", inner, hidden) for name in names])

    every = range(config.num_experts)
    return ExpertWeights(
        router=matrix("mlp.gate", config.num_experts, hidden),
        gate_up=torch.stack([of(expert, "gate", "up") for expert in every]),
        down=torch.stack([matrix(f"mlp.experts.{expert}.down_proj", hidden, inner) for expert in every]),
        per_token=config.num_experts_per_tok,
    )


def from_model(model: Model, device: str, dtype: torch.dtype = torch.bfloat16) -> Source:
    """A model's float32 arrays, rounded to nearest even; asking for a missing or misshapen one is a ValueError."""

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        array = model.weights.get(name)
        if array is None or array.shape != shape:
            found = "none" if array is None else f"shape {array.shape}"
            raise ValueError(f"weight {name!r}: expected shape {shape}, found {found}")
        return torch.tensor(array).to(device=device, dtype=dtype)

    return take


def open_weights(model: Model, device: str) -> Source:
    """A model's own weights, read or made."""
    weights = model.weights
    return from_seed(weights, device) if isinstance(weights, SeededWeights) else from_model(model, device)


def random_normal(seed: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Source:
    """Matrices of N(0, 0.02), norms of ones; each tensor from a generator of its own, made on the device."""

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=device)
        number = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big")
        generator = torch.Generator(device).manual_seed(number)
        return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, SPREAD, generator=generator)

    return take


def from_seed(weights: SeededWeights, device: str, dtype: torch.dtype = torch.bfloat16) -> Source:
    """Matrices that follow from a seed (`models.random_8b`), norms of ones; each tensor is made on the device."""

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=device)
        out = torch.empty(math.prod(shape), dtype=dtype, device=device)
        for piece in torch.split(out, PIECE):
            begin = int(piece.storage_offset())
            index = torch.arange(begin + 1, begin + 1 + len(piece), dtype=torch.int64, device=device)
            bits = _shift(_mix(index * _signed(int(GOLDEN)) + weights.start_of(name)), 40)
            piece.copy_((bits.float() * 2.0**-24 - 0.5) * float(WIDTH))
        return out.view(shape)

    return take


def _mix(z: Tensor) -> Tensor:
    """splitmix64's finaliser on the bits of int64."""
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, count: int) -> Tensor:
    """A shift to the right that brings in zeros."""
    return (z >> count) & ((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    """The int64 of these 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def checksum(weights: Weights) -> str:
    """SHA-256 over an order-dependent 64-bit sum of every tensor's bit patterns: names what lies on the device."""
    digest = hashlib.sha256()
    tensors = [weights.embedding, weights.norm, weights.head]
    for layer in weights.layers:
        for field in fields(layer):
            value = getattr(layer, field.name)
            if isinstance(value, ExpertWeights):
                value = (value.router, value.gate_up, value.down)
            tensors += value if isinstance(value, tuple) else [value] if isinstance(value, torch.Tensor) else []
    for tensor in tensors:
        bits = tensor.reshape(-1).view(torch.int16)
        total = 0
        for piece in torch.split(bits, 1 << 24):
            place = torch.arange(1, len(piece) + 1, device=bits.device)
            total = (total * 31 + int((piece.long() * place).sum())) % (1 << 64)
        digest.update(f"{tuple(tensor.shape)} {total};".encode())
    return digest.hexdigest()
