"""What one rank holds of a model: whatever is not split, and its pieces of what is, packed for the kernels.

It does not know steps or processes. Rules: a piece of K is a sub-tree of T, so that its product is that sub-tree's sum;
nothing that another rank holds is packed, and of what is sliced a copy is kept and not a view of the whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engines.bundled.arithmetic.weights import (
    GATE_UP,
    QKV,
    Layer,
    Mlp,
    Weights,
    dense,
    head_norms,
    join,
    join_bias,
    matrices,
    weight_bytes,
)
from engines.bundled.config import EngineConfig, Float32, Model, ModelConfig
from engines.bundled.kernels.interface import Kernels, Weight
from engines.bundled.models.tensors import EMBEDDING, FINAL_NORM, LM_HEAD
from engines.bundled.moe import Experts, pack_experts
from engines.bundled.parallel.layout import Part, SharedSum, Span, share_sum

_HELD_IN_PARTS = Weight(rows=0, columns=0, kind=0, data=np.empty(0, np.float32), scales=np.empty(0, np.float32))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitMatrix:
    """A matrix (N, K) whose K is split over the ranks, as this rank holds it: one piece per sub-tree of T."""

    shared: SharedSum
    pieces: tuple[Weight, ...]  # of this rank; in `free` one piece of all its columns

    @property
    def columns(self) -> int:
        """Columns of K that this rank holds."""
        return sum(piece.columns for piece in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """What one rank holds of a model: whatever is not split, and its pieces of what is."""

    local: ModelConfig  # heads and inner width as held here
    weights: Weights
    attention_out: tuple[SplitMatrix, ...]  # by layer; empty when nothing is split
    down: tuple[tuple[SplitMatrix, ...], ...]  # by layer: the MLP's, or that of each expert

    @property
    def bytes(self) -> int:
        """Bytes of weights this rank holds."""
        return weight_bytes(self.weights) + sum(piece.data.nbytes + piece.scales.nbytes for piece in self._pieces())

    def _pieces(self) -> Iterator[Weight]:
        for split in (*self.attention_out, *(matrix for layer in self.down for matrix in layer)):
            yield from split.pieces

    def matrices(self) -> Iterator[Weight]:
        """Every packed matrix this rank holds, whole or a piece."""
        yield from (matrix for matrix in matrices(self.weights) if matrix.columns)
        yield from self._pieces()


def local_config(config: ModelConfig, part: Part) -> ModelConfig:
    """The shape of what this rank computes alone."""
    return dataclasses.replace(
        config, num_attention_heads=len(part.heads), num_key_value_heads=len(part.kv_heads),
        intermediate_size=len(part.inner),
    )  # fmt: skip


def take_shard(model: Model, parts: tuple[Part, ...], rank: int, kernels: Kernels, config: EngineConfig) -> Shard:
    """Packs this rank's part of the model's weights and reads no other."""
    return _Packer(model, parts, parts[rank], kernels, config).pack()


def held_rows(model: Model, mine: Part, i: int) -> dict[str, Float32]:
    """Rows of a layer's matrices that are split by outputs, and of their biases, as one rank holds them."""
    dim, weights = model.config.head_dim, model.weights
    kv = slice(mine.kv_heads.begin * dim, mine.kv_heads.end * dim)
    rows = {
        "self_attn.q_proj": mine.attention_columns.slice, "self_attn.k_proj": kv, "self_attn.v_proj": kv,
        "mlp.gate_proj": mine.inner.slice, "mlp.up_proj": mine.inner.slice,
    }  # fmt: skip
    names = {f"model.layers.{i}.{name}.{kind}": where for name, where in rows.items() for kind in ("weight", "bias")}
    return {name: weights[name][where] for name, where in names.items() if name in weights}


class _Packer:
    """Packs matrix after matrix."""

    def __init__(
        self, model: Model, parts: tuple[Part, ...], mine: Part, kernels: Kernels, config: EngineConfig
    ) -> None:
        self.model, self.parts, self.mine, self.kernels = model, parts, mine, kernels
        self.threads, self.by_tree = config.threads, config.arithmetic == "portable"
        self.width = model.config.chunk_width

    def pack(self) -> Shard:
        weights, layers = self.model.weights, range(self.model.config.num_hidden_layers)
        ids = self.mine.vocabulary.slice
        embedding = np.array(weights[EMBEDDING][ids])  # a copy: a view would keep the whole
        head = embedding if self.model.config.tie_word_embeddings else dense(weights[LM_HEAD][ids])
        split = self.mine.sharded
        return Shard(
            local=local_config(self.model.config, self.mine),
            weights=Weights(
                embedding=embedding,
                layers=tuple(map(self._layer, layers)),
                norm=dense(weights[FINAL_NORM]),
                head=self.kernels.pack(head, self.threads),
            ),
            attention_out=tuple(self._attention_out(i) for i in layers) if split else (),
            down=tuple(map(self._down, layers)),
        )

    def _layer(self, i: int) -> Layer:
        prefix, w = f"model.layers.{i}", self.model.weights
        held = held_rows(self.model, self.mine, i)
        out = _HELD_IN_PARTS if self.mine.sharded else self._matrix(i, "self_attn.o_proj")
        return Layer(
            attention_norm=dense(w[f"{prefix}.input_layernorm.weight"]),
            qkv=self.kernels.pack(join(held, i, QKV), self.threads) if len(self.mine.heads) else _HELD_IN_PARTS,
            qkv_bias=join_bias(held, i, QKV),
            qk_norm=head_norms(w, i),
            window=self.model.config.window(i),
            attention_out=out,
            mlp_norm=dense(w[f"{prefix}.post_attention_layernorm.weight"]),
            mlp=self._mlp(i, held),
        )

    def _mlp(self, i: int, held: dict[str, Float32]) -> Mlp | Experts:
        if self.model.config.has_experts(i):
            return self._experts(i)
        down = _HELD_IN_PARTS if self.mine.sharded else self._matrix(i, "mlp.down_proj")
        gate_up = self.kernels.pack(join(held, i, GATE_UP), self.threads) if len(self.mine.inner) else _HELD_IN_PARTS
        return Mlp(gate_up=gate_up, down=down)

    def _experts(self, i: int) -> Experts:
        experts = range(self.mine.experts.begin, self.mine.experts.end)
        if not self._splits_inside(i):
            return pack_experts(self.model, i, experts, self.kernels, self.threads)
        rows, prefix, w = self.mine.expert_inner.slice, f"model.layers.{i}.mlp", self.model.weights
        names = [[f"{prefix}.experts.{e}.{name}.weight" for name in ("gate_proj", "up_proj")] for e in experts]
        gate_up = [np.concatenate([w[name][rows] for name in pair]) for pair in names]
        return Experts(
            router=self.kernels.pack(dense(w[f"{prefix}.gate.weight"]), self.threads),
            first=0,
            gate_up=tuple(self.kernels.pack(both, self.threads) for both in gate_up if len(both)),
            down=(),  # held in parts
            per_token=self.model.config.num_experts_per_tok,
        )

    def _splits_inside(self, i: int) -> bool:
        """True where each expert of a layer is split, and not the list of them."""
        return self.mine.sharded and not self.mine.experts_split and self.model.config.has_experts(i)

    def _matrix(self, i: int, name: str) -> Weight:
        return self.kernels.pack(dense(self.model.weights[f"model.layers.{i}.{name}.weight"]), self.threads)

    def _attention_out(self, i: int) -> SplitMatrix:
        return self._split(i, "self_attn.o_proj", [part.attention_columns for part in self.parts])

    def _down(self, i: int) -> tuple[SplitMatrix, ...]:
        if self._splits_inside(i):
            columns = [part.expert_inner for part in self.parts]
            experts = range(self.model.config.num_experts)
            return tuple(self._split(i, f"mlp.experts.{expert}.down_proj", columns) for expert in experts)
        if not self.mine.sharded or self.model.config.has_experts(i):
            return ()
        return (self._split(i, "mlp.down_proj", [part.inner for part in self.parts]),)

    def _split(self, i: int, name: str, columns: list[Span]) -> SplitMatrix:
        weight = self.model.weights[f"model.layers.{i}.{name}.weight"]
        shared = share_sum(weight.shape[1], self.width, columns)
        pieces = shared.pieces(self.mine.rank) if self.by_tree else (columns[self.mine.rank],)
        return SplitMatrix(
            shared=shared,
            pieces=tuple(self.kernels.pack(dense(weight[:, p.slice]), self.threads) for p in pieces if len(p)),
        )
