"""The forward pass on a GPU: `portable` in the order of the written definition, `free` in one that follows the step.

It does not know requests or sampling. Rules: the order of sums comes from an `Order` and from nothing else; kernels,
tiles, graphs and fused launches are chosen for speed and move no bit of `portable`; sampling stays with the CPU
kernels of the same definition.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engines.bundled.arithmetic.order import DEFINITION, Order, portable_order
from engines.bundled.arithmetic.rope import model_rope_table
from engines.bundled.batch import StepBatch
from engines.bundled.config import EngineConfig, Float32, Model, ModelConfig
from engines.bundled.gpu import experts, fused, operators, resident
from engines.bundled.gpu.experts import ExpertBuffers
from engines.bundled.gpu.interface import Launch, Machine, Recording, Shape
from engines.bundled.gpu.memory import KV_FRACTION
from engines.bundled.gpu.operators import Linear
from engines.bundled.gpu.order import free_order
from engines.bundled.gpu.steps import Step, attention_blocks, attention_words, execution, lay_out
from engines.bundled.gpu.weights import GpuLayer, GpuWeights, load_weights
from engines.bundled.kernels.interface import Kernels
from engines.bundled.kernels.library import score_scale

GRAPH_TOKENS = 64  # steps of at most so many tokens run as recorded graphs
MOST_GRAPHS = 64


def shape_of(config: ModelConfig, page: int, cluster: int) -> Shape:
    """The constants the kernels are compiled for."""
    shape = Shape(
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        dim=config.head_dim,
        width=config.chunk_width,
        page=page,
        cluster=cluster,
    )
    operators.check_shape(shape, config.moe_intermediate_size)
    return shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Addresses for up to `tokens` tokens that attend to up to `chunks` chunks of `key_chunk` keys."""

    tokens: int
    words: int
    wanted: int
    chunks: int
    key_chunk: int
    inputs: int
    hidden: int
    normed: int
    qkv: int
    attended: int
    gate_up: int
    gated: int
    logits: int
    logprobs: int
    scores: int
    maxima: int
    sums: int
    outputs: int
    experts: ExpertBuffers | None


class GpuArithmetic:
    """Weights, KV pages and kernels of one lifetime on one machine; implements `batch.Arithmetic`."""

    def __init__(self, model: Model, config: EngineConfig, machine: Machine, shape: Shape, kernels: Kernels) -> None:
        """Raises GpuMemoryError when weights and KV pages do not fit."""
        c = model.config
        self.name = config.arithmetic
        self.definition = DEFINITION if self.name == "portable" else 0
        self.machine, self.shape = machine, shape
        self.fused_steps = self.graph_steps = self.steps = 0
        self.use_fused = shape.cluster > 0 and self.name == "portable" and fused.model_fits(c)
        self.use_graphs = not config.enforce_eager
        self.use_device_softmax = True
        self._newest: Float32 | None = None
        self._seen: tuple[int, str | None] = (0, None)  # where the newest logits lay, and the device of that address
        self.pool_pages = config.num_pages
        self.model, self._config, self.kernels = c, config, kernels
        positions = min(c.max_position_embeddings, config.num_pages * config.page_size)
        self.pitch = -(-positions // config.page_size)
        self.weights = self._load(model, config.num_pages * config.page_size * c.num_key_value_heads * c.head_dim)
        table = model_rope_table(c, positions)
        self._cos_sin = machine.allocate(table.size)
        machine.upload(self._cos_sin, table)
        self.partial = machine.allocate(operators.PARTIAL_FLOATS)
        self._linked = shape.cluster > 0 or bool(machine.facts.get("gpu_linked", False))
        self._buffers: Buffers | None = None
        self._graphs: dict[tuple[object, ...], Recording] = {}
        sizes = fused.sizes(shape, c.num_hidden_layers) if shape.cluster else {}
        addresses = {name: machine.allocate(words) for name, words in sizes.items()}
        self._fused = fused.FusedBuffers(**addresses) if addresses else None
        if self._fused is not None:
            machine.upload(self._fused.counts, np.zeros(2 * c.num_hidden_layers, np.int32))
        self.has_resident = self.use_fused and resident.fits(machine, shape, c.num_hidden_layers)
        on_card = bool(machine.facts.get("gpu_linked", False))  # emulated, one launch is the slower way
        self.use_resident = self.has_resident and on_card
        self._resident = resident.new_buffers(machine, shape, self.weights) if self.has_resident else None

    def _load(self, model: Model, kv_floats: int) -> GpuWeights:
        """The weights on the device; one rank of several loads its part."""
        return load_weights(self.machine, model, kv_floats)

    def forward(self, batch: StepBatch) -> Float32:
        order = self._order(batch)
        step = lay_out(batch, self.shape, self.pitch, order.key_chunk)
        buffers = self.room(step, order)
        self.machine.upload(buffers.inputs, step.words)
        is_fused = self.use_fused and fused.step_fits(step, batch.position.tolist(), self.shape, self.model.windows)
        self._run(step, order, buffers, is_fused)
        logits = np.empty((step.wanted, self.model.vocab_size), np.float32)
        self.machine.download(buffers.logits, logits)
        self._note_device(buffers.logits)
        logits.flags.writeable = False  # it stands for what lies on the device (`log_softmax`)
        self._newest = logits
        self.steps += 1
        self.fused_steps += is_fused
        return logits

    def _note_device(self, address: int) -> None:
        if address != self._seen[0]:
            self._seen = (address, self.machine.device_of(address))

    def launches(self, step: Step, order: Order, is_fused: bool) -> list[Launch]:
        """All launches of a step whose words are uploaded."""
        buffers = self.room(step, order)
        if is_fused:
            return self._fused_launches(step, order, buffers)
        return self._separate_launches(step, order, buffers)

    def _run(self, step: Step, order: Order, buffers: Buffers, is_fused: bool) -> None:
        if not self.use_graphs or step.tokens > GRAPH_TOKENS:
            for launch in self.launches(step, order, is_fused):
                self.machine.launch(launch)
            return
        tiles = (step.chunks, len(step.tiles), step.tiles if not step.single else ())
        shape_key = (self._reach(step),) if is_fused else tiles
        key = (is_fused, step.tokens, step.wanted, buffers.inputs, buffers.logits, order, shape_key)
        graph = self._graphs.get(key)
        if graph is None:
            if len(self._graphs) >= MOST_GRAPHS:
                self._forget_graphs()
            graph = self._graphs[key] = self.machine.record(self.launches(step, order, is_fused))
        graph.replay()
        self.graph_steps += 1

    def _fused_in_words(self) -> str:
        """How fused decode runs."""
        if not self.use_fused:
            return "none"
        launches = "one launch" if self.use_resident else "two launches a layer"
        return f"{launches}, clusters of {self.shape.cluster}"

    def _reach(self, step: Step) -> str:
        """Which resident kernel runs a fused step; empty: none."""
        return resident.reach_of(step, self.shape) if self.use_resident else ""

    def _forget_graphs(self) -> None:
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()

    def _fused_launches(self, step: Step, order: Order, b: Buffers) -> list[Launch]:
        if self._fused is None:
            raise ValueError("fused launches: these kernels were compiled without them")
        inputs = fused.FusedInputs(
            token=b.inputs,
            sequence=b.inputs + 4 * step.tokens,
            position=b.inputs + 8 * step.tokens,
            wanted=b.inputs + 12 * step.tokens,
            table=b.inputs + 4 * step.table_offset,
            cos_sin=self._cos_sin,
            pitch=step.pitch,
            eps=self.model.rms_norm_eps,
            scale=score_scale(self.shape.dim),
        )
        out, head = (b.normed, [self._head(step, order, b)]) if step.wanted else (0, [])
        reach = self._reach(step)
        if self._resident is not None and reach:
            return [resident.launch(self.shape, self.weights, self._resident, inputs, step, out), *head]
        launches = fused.decode_launches(self.shape, self.weights, self._fused, inputs, step.tokens)
        if step.wanted:
            launches.append(fused.finish(self.shape, self.weights, self._fused, inputs, step.tokens, step.wanted, out))
        return [*launches, *head]

    def _separate_launches(self, step: Step, order: Order, b: Buffers) -> list[Launch]:
        launches = [operators.embed(self.weights.embedding, b.inputs, b.hidden, step.tokens)]
        for layer in self.weights.layers:
            launches += self._layer(step, order, b, layer)
        if step.wanted:
            eps, wanted = self.model.rms_norm_eps, b.inputs + 12 * step.tokens
            launches.append(
                operators.rms_norm(self.shape, b.hidden, self.weights.norm, b.normed, step.wanted, eps, wanted)
            )
            launches.append(self._head(step, order, b))
        return launches

    def _head(self, step: Step, order: Order, b: Buffers) -> Launch:
        return self._linear(
            b.normed, self.weights.head, b.logits, step.wanted, self.model.vocab_size, self.shape.hidden, order.head
        )

    def _layer(self, step: Step, order: Order, b: Buffers, layer: GpuLayer) -> list[Launch]:
        s, rows = self.shape, step.tokens
        return [
            *self._attend(step, order, b, layer),
            self._linear(
                b.attended, layer.attention_out, b.hidden, rows, s.hidden, s.heads * s.dim, order.attention_out,
                add=True,
            ),
            *self._mlp(step, order, b, layer),
        ]  # fmt: skip

    def _mlp(self, step: Step, order: Order, b: Buffers, layer: GpuLayer) -> list[Launch]:
        """From the residual stream to itself, with what the layer's MLP or its experts add."""
        s, rows = self.shape, step.tokens
        if layer.experts is None or b.experts is None:
            down = self._linear(b.gated, layer.down, b.hidden, rows, s.hidden, s.inner, order.down, add=True)
            return [*self._gate(step, order, b, layer), down]
        count, router = self.model.num_experts, layer.experts.router
        return [
            operators.rms_norm(s, b.hidden, layer.mlp_norm, b.normed, rows, self.model.rms_norm_eps),
            self._linear(b.normed, router, b.experts.router, rows, count, s.hidden, order.gate_up),
            *experts.launches(self.model, layer.experts, b.experts, order, b.normed, b.hidden, rows),
        ]

    def _attend(self, step: Step, order: Order, b: Buffers, layer: GpuLayer) -> list[Launch]:
        """From the residual stream to `attended`, before the output projection."""
        s, rows, qkv = self.shape, step.tokens, (self.shape.heads + 2 * self.shape.kv_heads) * self.shape.dim
        return [
            operators.rms_norm(s, b.hidden, layer.attention_norm, b.normed, rows, self.model.rms_norm_eps),
            self._linear(b.normed, layer.qkv, b.qkv, rows, qkv, s.hidden, order.qkv, bias=layer.qkv_bias),
            *self._norm_heads(step, b, layer),
            self._rope(step, b, layer),
            *self._attention(step, order, b, layer),
        ]

    def _gate(self, step: Step, order: Order, b: Buffers, layer: GpuLayer) -> list[Launch]:
        """From the residual stream to `gated`, before the down projection."""
        s, rows = self.shape, step.tokens
        return [
            operators.rms_norm(s, b.hidden, layer.mlp_norm, b.normed, rows, self.model.rms_norm_eps),
            self._linear(b.normed, layer.gate_up, b.gate_up, rows, 2 * s.inner, s.hidden, order.gate_up),
            operators.swiglu(s, b.gate_up, b.gated, rows),
        ]

    def _linear(
        self, x: int, weight: int, out: int, rows: int, outputs: int, inputs: int, width: int,
        *, bias: int = 0, add: bool = False,
    ) -> Launch:  # fmt: skip
        op = Linear(
            x=x, weight=weight, out=out, rows=rows, outputs=outputs, inputs=inputs, width=width, bias=bias, add=add
        )
        return operators.linear(op, self.partial, self._linked)

    def _rows(self, step: Step, b: Buffers) -> dict[str, int | float]:
        return {
            "table": b.inputs + 4 * step.table_offset,
            "sequence": b.inputs + 4 * step.tokens,
            "position": b.inputs + 8 * step.tokens,
            "pages": step.pitch,
        }

    def _norm_heads(self, step: Step, b: Buffers, layer: GpuLayer) -> list[Launch]:
        if not layer.q_norm:
            return []
        s, eps = self.shape, self.model.rms_norm_eps
        return [operators.norm_heads(s, b.qkv, layer.q_norm, layer.k_norm, step.tokens, eps)]

    def _rope(self, step: Step, b: Buffers, layer: GpuLayer) -> Launch:
        return Launch(
            kernel="rope_store", grid=(step.tokens, 1, 1), block=128, shared=0,
            arguments={**self._rows(step, b), "qkv": b.qkv, "cos_sin": self._cos_sin,
                       "keys": layer.keys, "values": layer.values},
        )  # fmt: skip

    def _attention(self, step: Step, order: Order, b: Buffers, layer: GpuLayer) -> list[Launch]:
        small = step.single and self.shape.heads // self.shape.kv_heads <= 4
        launches: list[Launch] = []
        for begin, end in attention_blocks(step, self.shape, order.key_chunk):
            first, (last, count) = step.tiles[begin][0], step.tiles[end - 1]
            tiles = b.inputs + 4 * (step.tile_offset + begin)
            arguments = {
                **self._rows(step, b), "qkv": b.qkv, "keys": layer.keys, "values": layer.values,
                "tile_row": tiles, "tile_count": tiles + 4 * len(step.tiles), "scores": b.scores,
                "maxima": b.maxima, "sums": b.sums, "outputs": b.outputs, "out": b.attended,
                "chunks": step.chunks, "key_chunk": order.key_chunk, "first_row": first,
                "window": layer.window, "scale": score_scale(self.shape.dim),
            }  # fmt: skip
            size = 4 if small else operators.QUERIES
            launches += operators.attend(self.shape, arguments, step.chunks, end - begin, last + count - first, size)
        return launches

    def room(self, step: Step, order: Order) -> Buffers:
        """Buffers that hold this step; larger ones replace them, and the graphs over the old ones are forgotten."""
        b = self._buffers
        attention = attention_words(step.tokens, self.shape, step.chunks, order.key_chunk) * step.chunks
        if (
            b is not None
            and step.tokens <= b.tokens
            and len(step.words) <= b.words
            and step.wanted <= b.wanted
            and order.key_chunk <= b.key_chunk
            and attention <= b.chunks
        ):
            return b
        self._forget_graphs()
        self._buffers = self._new_buffers(step, order, attention)
        return self._buffers

    def _new_buffers(self, step: Step, order: Order, attention: int) -> Buffers:
        s, old = self.shape, self._buffers
        most = min(self._config.max_num_batched_tokens, GRAPH_TOKENS)
        tokens = max(step.tokens, most, old.tokens if old else 0)
        words = max(len(step.words), 6 * most + self._config.max_num_seqs * self.pitch, old.words if old else 0)
        wanted = max(step.wanted, min(tokens, self._config.max_num_seqs), old.wanted if old else 0)
        units = max(attention, old.chunks if old else 0) * s.heads
        key_chunk = max(order.key_chunk, old.key_chunk if old else 0, 256)
        sizes = {
            "inputs": words,
            "hidden": tokens * s.hidden,
            "normed": tokens * s.hidden,
            "qkv": tokens * (s.heads + 2 * s.kv_heads) * s.dim,
            "attended": tokens * s.heads * s.dim,
            "gate_up": tokens * 2 * s.inner,
            "gated": tokens * s.inner,
            "logits": wanted * self.model.vocab_size,
            "logprobs": wanted * self.model.vocab_size,
            "scores": units * key_chunk,
            "maxima": units,
            "sums": units,
            "outputs": units * s.dim,
        }
        if old is not None:
            held = old.experts.addresses() if old.experts else ()
            for address in (*(getattr(old, name) for name in sizes), *held):
                self.machine.release(address)
        addresses = {name: self.machine.allocate(size) for name, size in sizes.items()}
        return Buffers(
            tokens=tokens, words=words, wanted=wanted, chunks=units // s.heads, key_chunk=key_chunk,
            experts=self._expert_buffers(tokens) if self.model.num_experts else None, **addresses,
        )  # fmt: skip

    def _expert_buffers(self, tokens: int) -> ExpertBuffers:
        words = experts.sizes(self.model, tokens)
        return ExpertBuffers(**{name: self.machine.allocate(count) for name, count in words.items()})

    def log_softmax(self, logits: Float32) -> Float32:
        """On the device for what `forward` returned last, whose logits are still there; by the CPU's kernels else."""
        if not self.use_device_softmax or logits is not self._newest or self._buffers is None or not len(logits):
            return self.kernels.log_softmax(logits, self._config.threads)
        b, found = self._buffers, np.empty_like(logits)
        self.machine.launch(operators.log_softmax(b.logits, b.logprobs, len(logits), self.model.vocab_size))
        self.machine.download(b.logprobs, found)
        return found

    def describe(self) -> dict[str, str | int | float | bool]:
        portable, order = self.name == "portable", portable_order(self.model)
        return {
            "arithmetic": self.name,
            "definition": self.definition,
            "device": "cuda",
            "backend": "gpu kernels",
            "backend_reason": "device=cuda",
            "execution": execution(self.steps, self.graph_steps),
            "isa": self.kernels.isa,
            "compiler": self.kernels.compiler,
            "kernels_digest": self.kernels.digest,
            "threads": self._config.threads,
            "threads_seen": self.kernels.threads_seen(),
            "chunk_width": order.qkv if portable else "follows the step",
            "key_chunk": order.key_chunk if portable else "follows the step",
            "tuning": self._config.tuning,
            "kv_fraction": self._config.kv_fraction or KV_FRACTION,
            "gpu_fused": self._fused_in_words(),
            "gpu_graphs": f"steps of up to {GRAPH_TOKENS} tokens" if self.use_graphs else "none",
            **({"logits_device": self._seen[1]} if self._seen[1] else {}),
            **self.machine.facts,
        }

    def _order(self, batch: StepBatch) -> Order:
        if self.name == "portable":
            return portable_order(self.model)
        longest = int(batch.position.max()) + 1
        return free_order(self.model, rows=len(batch.token), longest=longest, tuning=self._config.tuning)
