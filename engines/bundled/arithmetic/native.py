"""What a user of plain torch gets: F.linear and scaled_dot_product_attention over gathered pages, in float32.

It does not know the written definition and keeps no promise about bits. Rules: sequences with one token are decoded
together, padded to the longest, as batched engines do; a longer piece of a prompt attends by itself.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from engines.bundled.arithmetic.rope import inverse_frequencies
from engines.bundled.arithmetic.weights import QKV, check_weights, head_norms, join, join_bias
from engines.bundled.batch import StepBatch
from engines.bundled.config import EngineConfig, Float32, Int32, Model

Tensor = torch.Tensor
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Mlp:
    """A gated MLP, or one of a mixture's experts."""

    gate_up: Tensor
    down: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = functional.linear(x, self.gate_up).chunk(2, -1)
        return functional.linear(functional.silu(gate) * up, self.down)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Experts:
    """A mixture of experts, one expert's rows after the other's."""

    router: Tensor
    experts: tuple[_Mlp, ...]
    per_token: int

    def __call__(self, x: Tensor) -> Tensor:
        probability = torch.softmax(functional.linear(x, self.router), -1)
        weight, chosen = torch.topk(probability, self.per_token, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for expert, mlp in enumerate(self.experts):
            row, slot = torch.where(chosen == expert)
            if len(row):
                out.index_add_(0, row, mlp(x[row]) * weight[row, slot, None])
        return out


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layer:
    """Torch tensors of one layer; `keys` and `values` are (num_pages, page_size, kv_heads, head_dim)."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: tuple[Tensor, Tensor] | None
    window: int
    attention_out: Tensor
    mlp_norm: Tensor
    mlp: _Mlp | _Experts
    keys: Tensor
    values: Tensor


def open_native(model: Model, config: EngineConfig, device: str = "cpu") -> NativeArithmetic:
    """Raises ValueError for weights that do not fit the model's shape. `device` is torch's name of one."""
    check_weights(model)
    torch.set_num_threads(config.threads)
    with torch.no_grad():
        return NativeArithmetic(model, config, device)


class NativeArithmetic:
    """Weights and KV pages as torch tensors."""

    name = "native"
    definition = 0

    def __init__(self, model: Model, config: EngineConfig, device: str = "cpu") -> None:
        self._config, self._shape, self._device = config, model.config, device
        self._logits_device = ""  # nothing was computed yet
        self._layers = tuple(self._layer(model, i) for i in range(model.config.num_hidden_layers))
        self._embedding = self._tensor(model.weights["model.embed_tokens.weight"])
        tied = model.config.tie_word_embeddings
        self._head = self._embedding if tied else self._tensor(model.weights["lm_head.weight"])
        self._norm = self._tensor(model.weights["model.norm.weight"])
        c = model.config
        self._frequency = self._tensor(inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling))

    def _tensor(self, array: Float32) -> Tensor:
        # A copy: torch must not write into the model's arrays, which may be read-only.
        return torch.tensor(array, device=self._device)

    def _index(self, array: Int32 | Indices) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)

    def _layer(self, model: Model, i: int) -> _Layer:
        c, w, prefix = model.config, model.weights, f"model.layers.{i}"
        pool = (self._config.num_pages, self._config.page_size, c.num_key_value_heads, c.head_dim)
        bias, norms = join_bias(w, i, QKV), head_norms(w, i)
        return _Layer(
            attention_norm=self._tensor(w[f"{prefix}.input_layernorm.weight"]),
            qkv=self._tensor(join(w, i, QKV)),
            qkv_bias=None if bias is None else self._tensor(bias),
            qk_norm=None if norms is None else (self._tensor(norms[0]), self._tensor(norms[1])),
            window=c.window(i),
            attention_out=self._tensor(w[f"{prefix}.self_attn.o_proj.weight"]),
            mlp_norm=self._tensor(w[f"{prefix}.post_attention_layernorm.weight"]),
            mlp=self._experts(model, i) if c.has_experts(i) else self._mlp(model, f"{prefix}.mlp"),
            keys=torch.zeros(pool, device=self._device),
            values=torch.zeros(pool, device=self._device),
        )

    def _mlp(self, model: Model, prefix: str) -> _Mlp:
        w = model.weights
        joined = np.concatenate([w[f"{prefix}.{part}_proj.weight"] for part in ("gate", "up")])
        return _Mlp(gate_up=self._tensor(joined), down=self._tensor(w[f"{prefix}.down_proj.weight"]))

    def _experts(self, model: Model, i: int) -> _Experts:
        prefix, c = f"model.layers.{i}.mlp", model.config
        return _Experts(
            router=self._tensor(model.weights[f"{prefix}.gate.weight"]),
            experts=tuple(self._mlp(model, f"{prefix}.experts.{expert}") for expert in range(c.num_experts)),
            per_token=c.num_experts_per_tok,
        )

    def forward(self, batch: StepBatch) -> Float32:
        c = self._shape
        f = functional
        with torch.no_grad():
            x = self._embedding[self._index(batch.token)]
            for layer in self._layers:
                normed = f.rms_norm(x, (c.hidden_size,), layer.attention_norm, c.rms_norm_eps)
                attended = self._attention(layer, f.linear(normed, layer.qkv, layer.qkv_bias), batch)
                x = x + f.linear(attended, layer.attention_out)
                normed = f.rms_norm(x, (c.hidden_size,), layer.mlp_norm, c.rms_norm_eps)
                x = x + layer.mlp(normed)
            wanted = x[self._index(batch.wanted)]
            normed = f.rms_norm(wanted, (c.hidden_size,), self._norm, c.rms_norm_eps)
            found = f.linear(normed, self._head)
            self._logits_device = str(found.device)
            logits: Float32 = found.cpu().numpy()
        return logits

    def _attention(self, layer: _Layer, qkv: Tensor, batch: StepBatch) -> Tensor:
        """(T, heads * head_dim) of a step; writes K and V of its tokens first."""
        c, size = self._shape, self._config.page_size
        position = self._index(batch.position)
        kv = c.num_key_value_heads
        q, k, v = torch.split(qkv.view(len(batch.token), -1, c.head_dim), [c.num_attention_heads, kv, kv], 1)
        if layer.qk_norm:
            q, k = (
                functional.rms_norm(heads, (c.head_dim,), gain, c.rms_norm_eps)
                for heads, gain in zip((q, k), layer.qk_norm, strict=True)
            )
        q, k = self._rotate(q, position), self._rotate(k, position)
        page = self._index(batch.page_table[batch.sequence, batch.position // size])
        layer.keys[page, position % size], layer.values[page, position % size] = k, v
        out = torch.empty_like(q)
        for tokens in self._groups(batch):
            at = self._index(tokens)
            out[at] = self._attend(layer, q[at], batch, tokens)
        return out.reshape(len(batch.token), -1)

    def _groups(self, batch: StepBatch) -> list[Indices]:
        """Token indices that attend together: all sequences with one token, then each longer piece alone."""
        _, first, count = np.unique(batch.sequence, return_index=True, return_counts=True)
        longer = [np.arange(f, f + n) for f, n in zip(first, count, strict=True) if n > 1]
        return ([first[count == 1]] if (count == 1).any() else []) + longer

    def _attend(self, layer: _Layer, q: Tensor, batch: StepBatch, tokens: Indices) -> Tensor:
        c = self._shape
        alone = len(np.unique(batch.sequence[tokens])) == 1
        rows = batch.sequence[tokens[:1]] if alone else batch.sequence[tokens]
        longest = int(batch.position[tokens].max()) + 1
        pages = self._index(batch.page_table[rows, : -(-longest // self._config.page_size)])
        position = self._index(batch.position[tokens])
        keys_at = torch.arange(longest, device=self._device)[None, :]
        seen = keys_at <= position[:, None]  # (tokens, keys)
        if layer.window:
            seen &= keys_at > position[:, None] - layer.window
        mask = seen[None, None] if alone else seen[:, None, None]
        used = mask.any(dim=2)[:, 0, :, None, None]  # stale pages may hold NaN, which a mask does not stop
        shape = (len(rows), -1, c.num_key_value_heads, c.head_dim)
        keys, values = (
            torch.where(used, pool[pages].reshape(shape)[:, :longest], 0.0).transpose(1, 2)
            for pool in (layer.keys, layer.values)
        )
        query = q[None].transpose(1, 2) if alone else q[:, :, None]
        out = functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1) if alone else out[:, :, 0]

    def _rotate(self, heads: Tensor, position: Tensor) -> Tensor:
        half = self._shape.head_dim // 2
        angle = (position[:, None].float() * self._frequency)[:, None]
        cosine, sine = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
        return heads * cosine + torch.cat([-heads[..., half:], heads[..., :half]], -1) * sine

    def log_softmax(self, logits: Float32) -> Float32:
        result: Float32 = torch.log_softmax(torch.from_numpy(logits), -1).numpy()
        return result

    def describe(self) -> dict[str, str | int | float | bool]:
        return {
            "arithmetic": self.name,
            "definition": self.definition,
            "backend": "torch",
            **({} if self._device == "cpu" else {"device": self._device}),
            "backend_reason": "arithmetic=native",
            "isa": torch.backends.cpu.get_cpu_capability(),
            "compiler": "none",
            "kernels_digest": f"torch {torch.__version__} on {platform.machine()}",
            "threads": self._config.threads,
            "threads_seen": torch.get_num_threads(),
            "chunk_width": "not defined",
            "key_chunk": "not defined",
            "tuning": self._config.tuning,
            **({"logits_device": self._logits_device} if self._logits_device else {}),
        }
