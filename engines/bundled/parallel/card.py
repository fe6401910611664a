"""The forward pass of one rank on a GPU: as `shard`, over the GPU's kernels.

It does not know processes, or how what ranks give each other travels. Rules: those of `shard`; launches between two
meetings of the ranks are one recorded graph; a rank without heads, or without a part of an MLP, launches nothing for
it and still comes to every meeting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from engines.bundled.arithmetic.order import Order
from engines.bundled.arithmetic.portable import process_counts
from engines.bundled.batch import StepBatch
from engines.bundled.config import EngineConfig, Float32, Model, ModelConfig
from engines.bundled.gpu import operators
from engines.bundled.gpu.interface import Launch, Machine, Recording, Shape
from engines.bundled.gpu.operators import Linear
from engines.bundled.gpu.portable import GRAPH_TOKENS, Buffers, GpuArithmetic
from engines.bundled.gpu.ranks import complete_tree, take_columns
from engines.bundled.gpu.steps import Step, lay_out
from engines.bundled.gpu.weights import GpuWeights
from engines.bundled.kernels.interface import Kernels
from engines.bundled.parallel.card_weights import CardShard, Pieces, load_shard
from engines.bundled.parallel.exchange import Exchange
from engines.bundled.parallel.layout import Part

MOST_STEPS = 16  # kinds of steps whose graphs are kept


class Meeting(NamedTuple):
    """A place where all ranks exchange `words` each; `add`: they are summed in place, else gathered."""

    words: int
    add: bool


class Room(NamedTuple):
    """Addresses of what this rank gives, what all gave, and columns on their way into a product."""

    given: int
    everyone: int
    columns: int
    owner: int  # per token the row of `everyone` that holds its embedding


class CardArithmetic(GpuArithmetic):
    """`portable` or `free` for one rank of a group. Every rank runs every step."""

    def __init__(
        self, model: Model, config: EngineConfig, machine: Machine, shape: Shape, kernels: Kernels,
        parts: tuple[Part, ...], rank: int, exchange: Exchange,
    ) -> None:  # fmt: skip
        """`shape` is that of `card_config`. Raises GpuMemoryError when weights and KV pages do not fit."""
        self._whole, self._parts, self._rank, self._exchange = model, parts, rank, exchange
        self._mine = parts[rank]
        local = card_config(model.config, self._mine)
        super().__init__(replace(model, config=local, weights={}), config, machine, shape, kernels)
        self.use_fused = False
        self._room: Room | None = None
        self._sizes = Room(0, 0, 0, 0)
        self._segments: dict[tuple[object, ...], list[Recording | Meeting]] = {}

    def _load(self, model: Model, kv_floats: int) -> GpuWeights:
        by_tree = self._config.arithmetic == "portable"
        local, kv = model.config, kv_floats if self._mine.heads else 0
        self._shard: CardShard = load_shard(self.machine, self._whole, local, self._parts, self._rank, kv, by_tree)
        return self._shard.weights

    def forward(self, batch: StepBatch) -> Float32:
        order = self._order(batch)
        vocabulary = self._mine.vocabulary
        here = (batch.token >= vocabulary.begin) & (batch.token < vocabulary.end)
        token = np.where(here, batch.token - vocabulary.begin, 0).astype(np.int32)
        step = lay_out(replace(batch, token=token), self.shape, self.pitch, order.key_chunk)
        buffers, room = self.room(step, order), self._meeting_room(step)
        self.machine.upload(buffers.inputs, step.words)
        ends = np.array([part.vocabulary.end for part in self._parts])
        owner = np.searchsorted(ends, batch.token, side="right") * step.tokens + np.arange(step.tokens)
        self.machine.upload(room.owner, owner.astype(np.int32))
        self._walk(step, order, buffers, room)
        self.steps += 1
        return self._whole_logits(step, room)

    def _walk(self, step: Step, order: Order, buffers: Buffers, room: Room) -> None:
        """Runs all launches up to this rank's logits, meeting the others on the way."""
        if not self.use_graphs or step.tokens > GRAPH_TOKENS:
            for item in self._items(step, order, buffers, room):
                if isinstance(item, Meeting):
                    self._meet(item, room)
                else:
                    self.machine.launch(item)
            return
        tiles = step.tiles if not step.single else len(step.tiles)
        key = (step.tokens, step.wanted, buffers.inputs, room, order, step.chunks, tiles)
        if key not in self._segments:
            if len(self._segments) >= MOST_STEPS:
                self._forget_graphs()
            self._segments[key] = self._record(self._items(step, order, buffers, room))
        for segment in self._segments[key]:
            if isinstance(segment, Meeting):
                self._meet(segment, room)
            else:
                segment.replay()
        self.graph_steps += 1

    def _record(self, items: Iterator[Launch | Meeting]) -> list[Recording | Meeting]:
        segments: list[Recording | Meeting] = []
        launches: list[Launch] = []
        for item in items:
            if not isinstance(item, Meeting):
                launches.append(item)
                continue
            if launches:
                segments.append(self.machine.record(launches))
                launches = []
            segments.append(item)
        return [*segments, self.machine.record(launches)] if launches else segments

    def _meet(self, meeting: Meeting, room: Room) -> None:
        if meeting.add:
            self._exchange.add(room.given, meeting.words)
        else:
            self._exchange.gather(room.given, meeting.words, room.everyone)

    def _forget_graphs(self) -> None:
        super()._forget_graphs()
        for segments in self._segments.values():
            for segment in segments:
                if not isinstance(segment, Meeting):
                    segment.close()
        self._segments.clear()

    def _items(self, step: Step, order: Order, b: Buffers, room: Room) -> Iterator[Launch | Meeting]:
        rows, hidden = step.tokens, self.shape.hidden
        yield operators.embed(self.weights.embedding, b.inputs, room.given, rows)
        yield Meeting(rows * hidden, add=False)
        yield operators.embed(room.everyone, room.owner, b.hidden, rows)
        pieces = self._shard.attention_out, self._shard.down
        for layer, attention_out, down in zip(self.weights.layers, *pieces, strict=True):
            if self._mine.heads:
                yield from self._attend(step, order, b, layer)
            yield from self._add(attention_out, b.attended, order.attention_out, b.hidden, rows, room)
            if self._mine.inner:
                yield from self._gate(step, order, b, layer)
            yield from self._add(down, b.gated, order.down, b.hidden, rows, room)
        if step.wanted:
            eps, wanted = self.model.rms_norm_eps, b.inputs + 12 * rows
            yield operators.rms_norm(self.shape, b.hidden, self.weights.norm, b.normed, step.wanted, eps, wanted)
            yield self._linear(
                b.normed, self.weights.head, room.given, step.wanted, self.model.vocab_size, hidden, order.head
            )

    def _add(
        self, pieces: Pieces, x: int, width: int, hidden: int, rows: int, room: Room
    ) -> Iterator[Launch | Meeting]:
        """Adds x (T, K of this rank) times the matrix, summed over all ranks, to `hidden` (T, N)."""
        size = rows * self.shape.hidden
        for place, piece in enumerate(pieces.held):
            taken = x
            if piece.columns != pieces.columns:
                taken = room.columns
                yield take_columns(x, taken, rows=rows, stride=pieces.columns, begin=piece.begin, count=piece.columns)
            op = Linear(
                x=taken, weight=piece.weight, out=room.given + 4 * place * size, rows=rows, outputs=self.shape.hidden,
                inputs=piece.columns, width=width,
            )  # fmt: skip
            yield operators.linear(op, self.partial, self._linked)
        if self.name == "free":
            if not pieces.held:
                yield take_columns(self._shard.zeros, room.given, rows=rows, stride=0, begin=0, count=self.shape.hidden)
            yield Meeting(size, add=True)
            yield complete_tree(room.given, self._shard.alone, 1, hidden, size)
            return
        yield Meeting(pieces.widest * size, add=False)
        yield complete_tree(room.everyone, pieces.program, pieces.steps, hidden, size)

    def _whole_logits(self, step: Step, room: Room) -> Float32:
        """(W, vocabulary) from every rank's ids."""
        sizes = [len(part.vocabulary) for part in self._parts]
        if not step.wanted:
            return np.empty((0, sum(sizes)), np.float32)
        everyone = self._exchange.collect(room.given, step.wanted * max(sizes))
        self._note_device(room.given)
        logits = [
            given[: step.wanted * size].reshape(step.wanted, size) for given, size in zip(everyone, sizes, strict=True)
        ]
        return np.concatenate(logits, axis=1)

    def _meeting_room(self, step: Step) -> Room:
        """Room for the meetings of this step; larger room replaces it, and graphs over the old one are forgotten."""
        ranks, hidden, rows = len(self._parts), self.shape.hidden, step.tokens
        most = max(len(part.vocabulary) for part in self._parts)
        sums = rows * hidden * self._shard.widest
        needed = Room(
            given=max(sums, step.wanted * most), everyone=ranks * sums,
            columns=rows * max(self.shape.heads * self.shape.dim, self.shape.inner), owner=rows,
        )  # fmt: skip
        if self._room is not None and all(n <= s for n, s in zip(needed, self._sizes, strict=True)):
            return self._room
        self._forget_graphs()
        for address in self._room or ():
            self.machine.release(address)
        self._sizes = Room(*map(max, needed, self._sizes))
        self._room = Room(*map(self.machine.allocate, self._sizes))
        return self._room

    def counts(self) -> tuple[Mapping[str, int], ...]:
        """What this rank holds on its card and has done; see `batch.Ranked`."""
        return ({
            "weight_bytes": self._shard.bytes, "kv_bytes": self._shard.kv_bytes, "steps": self.steps,
            **process_counts(self.kernels),
        },)  # fmt: skip


def card_config(config: ModelConfig, part: Part) -> ModelConfig:
    """The shape one rank's kernels are compiled for: what it holds, and one KV group or chunk where it holds none."""
    group = config.num_attention_heads // config.num_key_value_heads
    kv_heads = max(len(part.kv_heads), 1)
    return replace(
        config, num_attention_heads=group * kv_heads, num_key_value_heads=kv_heads,
        intermediate_size=len(part.inner) or config.chunk_width, vocab_size=len(part.vocabulary),
    )  # fmt: skip
