"""A model's weights on the device: packed once, addresses only. It computes nothing.

Rules: q, k and v are one matrix, gate and up are one, as on the CPU; a missing or misshapen weight is one error.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engines.bundled.arithmetic.weights import GATE_UP, QKV, check_weights, head_norms, join, join_bias
from engines.bundled.config import Float32, Model
from engines.bundled.gpu.interface import Machine
from engines.bundled.gpu.operators import pack, padded


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLayer:
    """Addresses of one decoder layer; a bias or a norm of heads that the model does not have is 0."""

    attention_norm: int
    qkv: int
    qkv_bias: int
    q_norm: int
    k_norm: int
    attention_out: int
    mlp_norm: int
    gate_up: int
    down: int
    keys: int
    values: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuWeights:
    """Addresses of a whole model."""

    embedding: int
    norm: int
    head: int
    layers: tuple[GpuLayer, ...]


class WeightLoader:
    """Uploads and packs, with one staging buffer that is reused."""

    def __init__(self, machine: Machine, model: Model) -> None:
        self._machine, self._model = machine, model
        sizes = [array.size for array in model.weights.values() if array.ndim == 2]
        c = model.config
        joined = max((c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim, 2 * c.intermediate_size)
        self._staging = machine.allocate(max(*sizes, joined * c.hidden_size))

    def plain(self, array: Float32) -> int:
        """An array as it is."""
        address = self._machine.allocate(array.size)
        self._machine.upload(address, np.ascontiguousarray(array))
        return address

    def matrix(self, weight: Float32) -> int:
        """(N, K) in the packed layout."""
        outputs, inputs = weight.shape
        address = self._machine.allocate(padded(outputs) * inputs)
        self._machine.upload(self._staging, np.ascontiguousarray(weight))
        self._machine.launch(pack(self._staging, address, outputs, inputs))
        return address

    def layer(self, i: int, kv_floats: int) -> GpuLayer:
        """Layer i with `kv_floats` floats each for its keys and values."""
        w, prefix = self._model.weights, f"model.layers.{i}"
        bias, norms = join_bias(w, i, QKV), head_norms(w, i)
        return GpuLayer(
            attention_norm=self.plain(w[f"{prefix}.input_layernorm.weight"]),
            qkv=self.matrix(join(w, i, QKV)),
            qkv_bias=0 if bias is None else self.plain(bias),
            q_norm=0 if norms is None else self.plain(norms[0]),
            k_norm=0 if norms is None else self.plain(norms[1]),
            attention_out=self.matrix(w[f"{prefix}.self_attn.o_proj.weight"]),
            mlp_norm=self.plain(w[f"{prefix}.post_attention_layernorm.weight"]),
            gate_up=self.matrix(join(w, i, GATE_UP)),
            down=self.matrix(w[f"{prefix}.mlp.down_proj.weight"]),
            keys=self._machine.allocate(kv_floats),
            values=self._machine.allocate(kv_floats),
        )


def load_weights(machine: Machine, model: Model, kv_floats: int) -> GpuWeights:
    """Everything on the device, KV pages included. Raises ValueError (`check_weights`), GpuMemoryError."""
    check_weights(model)
    loader, w = WeightLoader(machine, model), model.weights
    embedding = w["model.embed_tokens.weight"]
    return GpuWeights(
        embedding=loader.plain(embedding),
        norm=loader.plain(w["model.norm.weight"]),
        head=loader.matrix(embedding if model.config.tie_word_embeddings else w["lm_head.weight"]),
        layers=tuple(loader.layer(i, kv_floats) for i in range(model.config.num_hidden_layers)),
    )
