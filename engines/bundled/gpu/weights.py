"""A model's weights on the device: packed once, addresses only. It computes nothing.

Rules: q, k and v are one matrix, gate and up are one, as on the CPU; a missing or misshapen weight is one error.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engines.bundled.arithmetic.weights import GATE_UP, QKV, check_weights, head_norms, join, join_bias
from engines.bundled.config import Float32, Model
from engines.bundled.gpu.experts import GpuExperts, matrix_words
from engines.bundled.gpu.interface import Machine
from engines.bundled.gpu.operators import pack, padded


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLayer:
    """Addresses of one decoder layer; what the model does not have is 0, and so is the MLP of a layer of experts."""

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
    window: int = 0  # keys a token sees, itself included; 0: all
    experts: GpuExperts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuWeights:
    """Addresses of a whole model."""

    embedding: int
    norm: int
    head: int
    layers: tuple[GpuLayer, ...]


class WeightLoader:
    """Uploads and packs, with one staging buffer that is reused."""

    def __init__(self, machine: Machine, model: Model, staging: int) -> None:
        """`staging` is the number of words of the largest matrix."""
        self._machine, self._model = machine, model
        self._staging = machine.allocate(staging)

    def plain(self, array: Float32) -> int:
        """An array as it is."""
        address = self._machine.allocate(array.size)
        self._machine.upload(address, np.ascontiguousarray(array))
        return address

    def matrix(self, weight: Float32) -> int:
        """(N, K) in the packed layout."""
        outputs, inputs = weight.shape
        address = self._machine.allocate(padded(outputs) * inputs)
        self._pack(weight, address)
        return address

    def _pack(self, weight: Float32, address: int) -> None:
        outputs, inputs = weight.shape
        self._machine.upload(self._staging, np.ascontiguousarray(weight))
        self._machine.launch(pack(self._staging, address, outputs, inputs))

    def experts(self, i: int) -> GpuExperts:
        """The router and all experts of layer i."""
        w, c, prefix = self._model.weights, self._model.config, f"model.layers.{i}.mlp"
        inner, hidden, count = c.moe_intermediate_size, c.hidden_size, c.num_experts
        strides = matrix_words(2 * inner, hidden), matrix_words(hidden, inner)
        gate_up, down = (self._machine.allocate(count * stride) for stride in strides)
        for e in range(count):
            parts = [w[f"{prefix}.experts.{e}.{name}.weight"] for name in ("gate_proj", "up_proj")]
            self._pack(np.concatenate(parts), gate_up + 4 * e * strides[0])
            self._pack(w[f"{prefix}.experts.{e}.down_proj.weight"], down + 4 * e * strides[1])
        return GpuExperts(router=self.matrix(w[f"{prefix}.gate.weight"]), gate_up=gate_up, down=down)

    def layer(self, i: int, kv_floats: int) -> GpuLayer:
        """Layer i with `kv_floats` floats each for its keys and values."""
        w, prefix = self._model.weights, f"model.layers.{i}"
        bias, norms, sparse = join_bias(w, i, QKV), head_norms(w, i), self._model.config.has_experts(i)
        return GpuLayer(
            attention_norm=self.plain(w[f"{prefix}.input_layernorm.weight"]),
            qkv=self.matrix(join(w, i, QKV)),
            qkv_bias=0 if bias is None else self.plain(bias),
            q_norm=0 if norms is None else self.plain(norms[0]),
            k_norm=0 if norms is None else self.plain(norms[1]),
            attention_out=self.matrix(w[f"{prefix}.self_attn.o_proj.weight"]),
            mlp_norm=self.plain(w[f"{prefix}.post_attention_layernorm.weight"]),
            gate_up=0 if sparse else self.matrix(join(w, i, GATE_UP)),
            down=0 if sparse else self.matrix(w[f"{prefix}.mlp.down_proj.weight"]),
            experts=self.experts(i) if sparse else None,
            window=self._model.config.window(i),
            keys=self._machine.allocate(kv_floats),
            values=self._machine.allocate(kv_floats),
        )


def largest_matrix(model: Model) -> int:
    """Words of the largest matrix, joined ones included."""
    c = model.config
    sizes = [array.size for array in model.weights.values() if array.ndim == 2]
    inner = max(c.intermediate_size, c.moe_intermediate_size)
    joined = max((c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim, 2 * inner)
    return max(*sizes, joined * c.hidden_size)


def load_weights(machine: Machine, model: Model, kv_floats: int) -> GpuWeights:
    """Everything on the device, KV pages included. Raises ValueError (`check_weights`), GpuMemoryError."""
    check_weights(model)
    loader, w = WeightLoader(machine, model, largest_matrix(model)), model.weights
    embedding = w["model.embed_tokens.weight"]
    return GpuWeights(
        embedding=loader.plain(embedding),
        norm=loader.plain(w["model.norm.weight"]),
        head=loader.matrix(embedding if model.config.tie_word_embeddings else w["lm_head.weight"]),
        layers=tuple(loader.layer(i, kv_floats) for i in range(model.config.num_hidden_layers)),
    )
