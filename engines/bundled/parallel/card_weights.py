"""What one rank holds of a model on a GPU: whatever is not split, and its pieces of what is. It computes nothing.

Rules: those of `pieces`: a piece of K is a sub-tree of T, and nothing that another rank holds is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engines.bundled.arithmetic.weights import GATE_UP, QKV, head_norms, join, join_bias
from engines.bundled.config import Float32, Model, ModelConfig
from engines.bundled.gpu.interface import Machine
from engines.bundled.gpu.operators import padded
from engines.bundled.gpu.ranks import ADD
from engines.bundled.gpu.weights import GpuLayer, GpuWeights, WeightLoader
from engines.bundled.models.tensors import EMBEDDING, FINAL_NORM, LM_HEAD
from engines.bundled.parallel.layout import Part, SharedSum, Span, additions, share_sum
from engines.bundled.parallel.pieces import held_rows


class Piece(NamedTuple):
    """Columns [begin, begin + columns) of what this rank holds of K, packed at `weight`."""

    weight: int
    begin: int
    columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """A matrix (N, K) whose K is split over the ranks, as this rank holds it."""

    held: tuple[Piece, ...]
    columns: int  # of K that this rank holds
    widest: int  # sub-trees of the rank that has most of them
    program: int  # address of the words of `complete_tree`
    steps: int  # how many


@dataclass(frozen=True, slots=True, kw_only=True)
class CardShard:
    """Addresses of what one rank holds. `weights` has neither output nor down projections: they are in pieces."""

    weights: GpuWeights
    attention_out: tuple[Pieces, ...]  # by layer
    down: tuple[Pieces, ...]
    zeros: int  # one row of the residual stream
    alone: int  # the program that takes one sum as it is
    bytes: int
    kv_bytes: int

    @property
    def widest(self) -> int:
        """Sub-trees that one rank gives in one meeting, at most."""
        return max(pieces.widest for pieces in (*self.attention_out, *self.down))


def load_shard(
    machine: Machine, model: Model, local: ModelConfig, parts: tuple[Part, ...], rank: int, kv_floats: int,
    by_tree: bool,
) -> CardShard:  # fmt: skip
    """Loads one rank's part, and takes `kv_floats` floats each for keys and values of a layer.

    `by_tree`: a matrix split along K is held as sub-trees of T, else in one piece. Raises GpuMemoryError.
    """
    return _Loader(machine, model, local, parts, rank, by_tree).load(kv_floats)


class _Loader(WeightLoader):
    """Loads matrix after matrix, and counts what stays."""

    def __init__(
        self,
        machine: Machine,
        model: Model,
        local: ModelConfig,
        parts: tuple[Part, ...],
        rank: int,
        by_tree: bool,
    ) -> None:
        c = local
        widest = max((c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim, 2 * c.intermediate_size)
        super().__init__(machine, model, max(widest, c.vocab_size) * c.hidden_size)
        self._parts, self._mine, self._by_tree = parts, parts[rank], by_tree
        self._bytes = 0
        self._programs: dict[SharedSum, tuple[int, int]] = {}

    def load(self, kv_floats: int) -> CardShard:
        w, layers = self._model.weights, range(self._model.config.num_hidden_layers)
        ids = self._mine.vocabulary.slice
        embedding = np.array(w[EMBEDDING][ids])
        head = embedding if self._model.config.tie_word_embeddings else w[LM_HEAD][ids]
        attention_columns, inner = ([getattr(p, name) for p in self._parts] for name in ("attention_columns", "inner"))
        return CardShard(
            weights=GpuWeights(
                embedding=self.plain(embedding), norm=self.plain(w[FINAL_NORM]), head=self.matrix(head),
                layers=tuple(self._layer(i, kv_floats) for i in layers),
            ),
            attention_out=tuple(self._pieces(i, "self_attn.o_proj", attention_columns) for i in layers),
            down=tuple(self._pieces(i, "mlp.down_proj", inner) for i in layers),
            zeros=self.plain(np.zeros(self._model.config.hidden_size, np.float32)),
            alone=self._words([0]),
            bytes=self._bytes,
            kv_bytes=8 * kv_floats * len(layers),
        )  # fmt: skip

    def plain(self, array: Float32) -> int:
        self._bytes += array.nbytes
        return super().plain(array)

    def matrix(self, weight: Float32) -> int:
        self._bytes += 4 * padded(weight.shape[0]) * weight.shape[1]
        return super().matrix(weight)

    def _layer(self, i: int, kv_floats: int) -> GpuLayer:
        w, prefix = self._model.weights, f"model.layers.{i}"
        held, norms = held_rows(self._model, self._mine, i), head_norms(w, i)
        bias = join_bias(held, i, QKV)
        heads = bool(self._mine.heads)
        return GpuLayer(
            attention_norm=self.plain(w[f"{prefix}.input_layernorm.weight"]),
            qkv=self.matrix(join(held, i, QKV)) if heads else 0,
            qkv_bias=self.plain(bias) if heads and bias is not None else 0,
            q_norm=0 if norms is None else self.plain(norms[0]),
            k_norm=0 if norms is None else self.plain(norms[1]),
            window=self._model.config.window(i),
            attention_out=0,
            mlp_norm=self.plain(w[f"{prefix}.post_attention_layernorm.weight"]),
            gate_up=self.matrix(join(held, i, GATE_UP)) if self._mine.inner else 0,
            down=0,
            keys=self._machine.allocate(kv_floats) if kv_floats else 0,
            values=self._machine.allocate(kv_floats) if kv_floats else 0,
        )

    def _pieces(self, i: int, name: str, columns: list[Span]) -> Pieces:
        weight = self._model.weights[f"model.layers.{i}.{name}.weight"]
        shared, mine = share_sum(weight.shape[1], self._model.config.chunk_width, columns), columns[self._mine.rank]
        spans = shared.pieces(self._mine.rank) if self._by_tree else (mine,)
        program, steps = self._program(shared)
        return Pieces(
            held=tuple(
                Piece(self.matrix(weight[:, span.slice]), span.begin - mine.begin, len(span)) for span in spans if span
            ),
            columns=len(mine), widest=shared.widest if self._by_tree else 1, program=program, steps=steps,
        )  # fmt: skip

    def _program(self, shared: SharedSum) -> tuple[int, int]:
        """Address and length of T as words of `complete_tree`, over sums that lie rank by rank, `widest` of each."""
        if shared not in self._programs:
            place = {
                span: rank * shared.widest + i
                for rank, spans in enumerate(shared.spans)
                for i, span in enumerate(spans)
            }
            words = [ADD if node is None else place[node] for node in additions(shared.chunks, place)]
            self._programs[shared] = self._words(words), len(words)
        return self._programs[shared]

    def _words(self, words: list[int]) -> int:
        address = self._machine.allocate(len(words))
        self._machine.upload(address, np.array(words, np.int32))
        return address
