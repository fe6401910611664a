"""The forward pass of one rank: its heads, its chunks, its ids, its experts; the rest comes from the others.

It does not know processes. Rules: every rank computes the residual stream whole and with the same bits; in `portable`
partial sums are gathered as the sub-trees of T that they are and added in T's order at every rank; `free` leaves that
order to the library's all-reduce; embeddings, expert outputs and logits are gathered, never added.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from engines.bundled.arithmetic.free import free_order
from engines.bundled.arithmetic.order import Order, portable_order
from engines.bundled.arithmetic.portable import KernelArithmetic
from engines.bundled.arithmetic.weights import Layer, storage
from engines.bundled.batch import StepBatch
from engines.bundled.config import EngineConfig, Float32, Int32, Model
from engines.bundled.kernels.interface import Kernels, Rows
from engines.bundled.moe import Experts, gate, route, run_experts
from engines.bundled.parallel.layout import Part, complete
from engines.bundled.parallel.pieces import Shard, SplitMatrix

if TYPE_CHECKING:  # it imports torch
    from engines.bundled.parallel.group import Group


class ShardArithmetic(KernelArithmetic):
    """`portable` or `free` for one rank of a group. Every rank runs every step."""

    def __init__(
        self, model: Model, config: EngineConfig, kernels: Kernels, shard: Shard, parts: tuple[Part, ...], group: Group
    ) -> None:
        """`model` gives the whole shape; its weights are not looked at."""
        self._whole, self._shard, self._parts, self._group = model.config, shard, parts, group
        self._mine = parts[group.rank]
        super().__init__(dataclasses.replace(model, config=shard.local, weights={}), config, kernels, shard.weights)

    def _weight_bytes(self) -> int:
        return self._shard.bytes

    def _embed(self, token: Int32, out: Float32) -> None:
        if not self._mine.sharded:
            super()._embed(token, out)
            return
        mine = self._mine.vocabulary
        here = (token >= mine.begin) & (token < mine.end)
        rows = np.zeros_like(out)
        rows[here] = self._weights.embedding[token[here] - mine.begin]
        ends = np.array([part.vocabulary.end for part in self._parts])
        owner = np.searchsorted(ends, token, side="right")
        out[...] = self._group.gather(rows)[owner, np.arange(len(token))]

    def _attention(self, index: int, layer: Layer, rows: Rows, order: Order, count: int) -> None:
        if not self._mine.sharded:
            super()._attention(index, layer, rows, order, count)
            return
        empty = self._buffers.attended[:count]
        attended = self._attend(layer, self.pages[index], rows, order, count) if len(self._mine.heads) else empty
        self._add(self._shard.attention_out[index], attended, order.attention_out, self._buffers.hidden[:count])

    def _mlp(self, index: int, layer: Layer, order: Order, count: int) -> None:
        matrices = self._shard.down[index]
        if not matrices:
            super()._mlp(index, layer, order, count)
            return
        hidden, normed = self._buffers.hidden[:count], self._buffers.normed[:count]
        self._kernels.rms_norm(hidden, layer.mlp_norm, self._model.config.rms_norm_eps, self._config.threads, normed)
        if isinstance(layer.mlp, Experts):
            self._mix_parts(layer.mlp, matrices, normed, order, hidden)
            return
        held = matrices[0].columns > 0
        gated = self._gate(layer.mlp, normed, order, count) if held else self._buffers.gated[:count]
        self._add(matrices[0], gated, order.down, hidden)

    def _mix(self, experts: Experts, normed: Float32, order: Order, hidden: Float32) -> None:
        if not self._mine.experts_split:
            super()._mix(experts, normed, order, hidden)
            return
        threads = self._config.threads
        routing = route(self._kernels, experts, normed, order, threads)
        outputs = run_experts(self._kernels, experts, normed, routing, order, threads)
        if self.name == "free":
            mine = experts.holds(routing.expert)
            outputs[~mine] = 0.0
            hidden += self._group.all_reduce(self._kernels.combine(outputs, routing.weight * mine, threads))
            return
        self._exchange(outputs, routing.expert)
        hidden += self._kernels.combine(outputs, routing.weight, threads)

    def _mix_parts(
        self, experts: Experts, down: tuple[SplitMatrix, ...], normed: Float32, order: Order, hidden: Float32
    ) -> None:
        """As `_mix`, where every expert is split over the ranks by its inner width."""
        routing = route(self._kernels, experts, normed, order, self._config.threads)
        most = 1 if self.name == "free" else down[0].shared.widest
        sums = np.zeros((most, *routing.expert.shape, hidden.shape[1]), np.float32)
        for expert, (gate_up, matrix) in enumerate(zip(experts.gate_up, down, strict=False)):
            rows, slots = np.nonzero(routing.expert == expert)
            if len(rows):
                gated = gate(self._kernels, gate_up, normed[rows], order, self._config.threads)
                room = np.zeros((most, len(rows), hidden.shape[1]), np.float32)
                sums[:, rows, slots] = self._products(matrix, gated, order.expert_down, room)
        if self.name == "free":
            hidden += self._group.all_reduce(self._kernels.combine(sums[0], routing.weight, self._config.threads))
        else:
            hidden += self._kernels.combine(self._meet(down[0], sums), routing.weight, self._config.threads)

    def _exchange(self, outputs: Float32, expert: Int32) -> None:
        """Fills the slots of outputs (T, k, hidden) whose experts other ranks hold."""
        slots = [(expert >= part.experts.begin) & (expert < part.experts.end) for part in self._parts]
        most = max(int(slot.sum()) for slot in slots)
        said = np.zeros((most, outputs.shape[-1]), np.float32)
        mine = slots[self._group.rank]
        said[: mine.sum()] = outputs[mine]
        for slot, theirs in zip(slots, self._group.gather(said), strict=True):
            outputs[slot] = theirs[: slot.sum()]

    def _add(self, matrix: SplitMatrix, x: Float32, width: int, hidden: Float32) -> None:
        """Adds x (T, K of this rank) times the matrix, summed over all ranks, to `hidden` (T, N)."""
        shape = (len(hidden), hidden.shape[1])
        if self.name == "free":
            sums = self._products(matrix, x, width, np.zeros((1, *shape), np.float32))
            hidden += self._group.all_reduce(sums[0])
            return
        hidden += self._meet(
            matrix, self._products(matrix, x, width, np.zeros((matrix.shared.widest, *shape), np.float32))
        )

    def _meet(self, matrix: SplitMatrix, sums: Float32) -> Float32:
        """T over all chunks from every rank's sums (widest, ...) of sub-trees."""
        everyone = self._group.gather(sums)
        shared = matrix.shared
        found = {span: everyone[rank, i] for rank, spans in enumerate(shared.spans) for i, span in enumerate(spans)}
        return complete(shared.chunks, found, np.add)

    def _products(self, matrix: SplitMatrix, x: Float32, width: int, out: Float32) -> Float32:
        """One product per piece of the matrix into out (pieces or more, T, N)."""
        begin = 0
        for piece, product in zip(matrix.pieces, out, strict=False):
            columns = np.ascontiguousarray(x[:, begin : begin + piece.columns])
            self._kernels.linear(columns, piece, width, self._config.threads, product)
            begin += piece.columns
        return out

    def _logits(self, hidden: Float32, order: Order) -> Float32:
        columns = len(self._mine.vocabulary)
        if not self._mine.sharded:
            return super()._logits(hidden, order) if self._group.rank == 0 else np.empty((0, columns), np.float32)
        most = max(len(part.vocabulary) for part in self._parts)
        mine = np.zeros((len(hidden), most), np.float32)
        if len(hidden):
            mine[:, :columns] = super()._logits(hidden, order)
        everyone = self._group.gather(mine)
        return np.concatenate([e[:, : len(p.vocabulary)] for e, p in zip(everyone, self._parts, strict=True)], axis=1)

    def describe(self) -> dict[str, str | int | float | bool]:
        """As of one process, with the pieces this rank holds."""
        return {**super().describe(), "weights": storage(self._shard.matrices())}

    def _order(self, batch: StepBatch) -> Order:
        if self.name == "portable":
            return portable_order(self._whole)
        longest, rows = int(batch.position.max()) + 1, len(batch.token)
        local = dataclasses.replace(self._shard.local, moe_intermediate_size=self._whole.moe_intermediate_size)
        return free_order(local, rows=rows, longest=longest, threads=self._config.threads, tuning=self._config.tuning)
