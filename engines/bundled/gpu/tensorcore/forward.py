"""Weights, KV pages and operators of one lifetime in bfloat16 behind `batch.Arithmetic`.

It does not know requests or sampling. Rules: the operators decide on orders of sums, `free`'s choice of them follows
the step; small steps are recorded once per padded size and replayed; log-softmax and candidates are the
written definition's, on the device where nobody asks for all logits; draws stay with the CPU kernels.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from engines.bundled.arithmetic.rope import model_rope_table
from engines.bundled.batch import StepBatch
from engines.bundled.config import EngineConfig, Float32, Model, ModelConfig
from engines.bundled.gpu.device_pages import DeviceLayer
from engines.bundled.gpu.interface import GpuMemoryError
from engines.bundled.gpu.memory import KV_FRACTION
from engines.bundled.gpu.steps import execution
from engines.bundled.gpu.tensorcore.decode import DecodeGraphs
from engines.bundled.gpu.tensorcore.layout import lay_out
from engines.bundled.gpu.tensorcore.linear import Linear, Split, Tiled
from engines.bundled.gpu.tensorcore.operators import KEYS, heads_of
from engines.bundled.gpu.tensorcore.pages import TorchPages
from engines.bundled.gpu.tensorcore.passes import Cache, Operators, TritonOperators, run_pass
from engines.bundled.gpu.tensorcore.plain import PlainOperators
from engines.bundled.gpu.tensorcore.prefill import MOST_TOKENS, PrefillGraphs
from engines.bundled.gpu.tensorcore.softmax import CardLogits
from engines.bundled.gpu.tensorcore.tree import TreeLinear, chunk_count
from engines.bundled.gpu.tensorcore.weights import Source, check_family, load_weights
from engines.bundled.kernels.interface import Kernels
from engines.bundled.logits import Asked, StepLogits

# By k_order; of the section on tensorcore in docs/numerics.md. 1 attended otherwise.
DEFINITIONS = {"chain": 3, "tree": 4}
Facts = dict[str, str | int | float | bool]


class TensorCoreArithmetic:
    """One model on one device. `linear` is what `tensorcore` multiplies with; the other two bring their own."""

    def __init__(
        self, config: ModelConfig, engine: EngineConfig, source: Source, kernels: Kernels, device: str,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        """Raises NotSupported for models these kernels are not for, GpuMemoryError when it does not fit."""
        check_family(config, engine)
        self.name, self.model, self.device, self.engine = engine.arithmetic, config, device, engine
        self.definition = DEFINITIONS[engine.k_order] if self.name == "tensorcore" else 0
        self.kernels = kernels
        self.linear: Linear = Tiled(by_rows=False)  # the self-test may choose faster ones
        self.tree: TreeLinear | None = None
        if self.definition == DEFINITIONS["tree"]:
            self.tree = TreeLinear(chunk_count(config), by_rows=False)
        self.facts: Facts = {}
        self.graphs: DecodeGraphs | None = None
        self.prefills: PrefillGraphs | None = None
        self.steps = self.graph_steps = 0
        self.can_report = False  # until a test has compared it with the CPU's kernels; never in `native`
        slots = engine.num_pages * engine.page_size
        spare = 1  # where rows of padding may write
        try:
            self.weights = load_weights(config, source)
            shape = (slots + spare, config.num_key_value_heads, config.head_dim)
            self.caches: list[Cache] = [
                (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
                for _ in range(config.num_hidden_layers)
            ]
        except torch.OutOfMemoryError as error:
            raise GpuMemoryError(
                f"the GPU is out of memory for weights and {engine.num_pages} KV pages ({error}); lower num_pages"
            ) from error
        positions = min(config.max_position_embeddings, slots)
        self.table = torch.tensor(model_rope_table(config, positions)).to(device)
        self.pitch = -(-positions // engine.page_size)

    def forward(self, batch: StepBatch) -> Float32:
        """One step, its logits on the host."""
        return self.logits(batch).float().cpu().numpy()

    def logits(self, batch: StepBatch) -> torch.Tensor:
        """Logits (W, vocab) of a step on the device; a step of decoding alone runs as a recorded one."""
        self.steps += 1
        with self._memory_errors(batch), torch.inference_mode():
            if self.graphs is not None and self.graphs.takes(batch):
                self.graph_steps += 1
                return self.graphs.run(batch)
            return self.prefill(batch)

    @contextmanager
    def _memory_errors(self, batch: StepBatch) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise GpuMemoryError(
                f"the GPU is out of memory in a step of {len(batch.token)} tokens ({error}); "
                "lower max_num_batched_tokens or num_pages"
            ) from error

    def prefill(self, batch: StepBatch) -> torch.Tensor:
        """The same without the seats of decoding: as a recorded step where it is small enough."""
        if self.prefills is not None and self.prefills.takes(batch):
            self.graph_steps += 1
            return self.prefills.run(batch)
        return self.logits_eager(batch)

    def logits_eager(self, batch: StepBatch) -> torch.Tensor:
        """The same, launched call by call."""
        ops = self.operators(int(batch.position.max()) + 1)
        rows, wanted = lay_out(batch, ops.heads, self.device, ops.linear.padded(len(batch.token)))
        return run_pass(self.weights, self.caches, ops, rows, wanted)

    def operators(self, longest: int) -> Operators:
        """The set of operators for a step whose longest sequence has `longest` keys."""
        eps, tuning = self.model.rms_norm_eps, self.engine.tuning
        keys = free_keys(longest, tuning) if self.name == "free" else KEYS
        heads = heads_of(self.model, self.engine.page_size, keys)
        if self.name == "native":
            return PlainOperators(heads=heads, table=self.table, eps=eps)
        linear = Split(tuning) if self.name == "free" else self.linear
        shared = self.tree if self.tree is not None and self.name == "tensorcore" else linear
        return TritonOperators(linear=linear, shared=shared, heads=heads, table=self.table, eps=eps)

    @property
    def pages(self) -> tuple[DeviceLayer, ...]:
        """KV pages by layer, as the prefix cache's store reads and writes them."""
        size = self.engine.page_size
        return tuple(
            DeviceLayer(
                keys=TorchPages(pool=keys, size=size, is_keys=True),
                values=TorchPages(pool=values, size=size, is_keys=False),
            )
            for keys, values in self.caches
        )

    def free_over_my_pages(self, model: Model) -> TensorCoreArithmetic:  # noqa: ARG002 - these weights are bfloat16
        """`free` with the same weights over the same pages, launched call by call."""
        other = copy.copy(self)
        other.name, other.definition, other.engine = "free", 0, replace(self.engine, arithmetic="free")
        other.graphs = other.prefills = None
        return other

    def _chunk_words(self) -> str:
        if self.tree is None:
            return "the whole of K"
        return f"{self.tree.chunks} chunks of K in attention output and down projection, else the whole of K"

    def _graph_words(self) -> str:
        if self.graphs is None:
            return "none"
        return "decode" if self.prefills is None else f"decode, and other steps of up to {MOST_TOKENS} tokens"

    def report(self, batch: StepBatch, asked: Asked) -> StepLogits:
        """One step whose logits stay on the device."""
        with self._memory_errors(batch):
            return CardLogits(self.logits(batch), asked, self.kernels)

    def log_softmax(self, logits: Float32) -> Float32:
        """By the written definition; torch's in `native`."""
        if self.name == "native":
            result: Float32 = torch.log_softmax(torch.from_numpy(logits), -1).numpy()
            return result
        return self.kernels.log_softmax(logits, self.engine.threads)

    def describe(self) -> Facts:
        """Resolved facts for the fingerprint."""
        fixed = self.name == "tensorcore"
        return {
            "arithmetic": self.name,
            "definition": self.definition,
            "device": "cuda",
            "dtype": "bfloat16",
            "backend": "torch" if self.name == "native" else "triton",
            "backend_reason": "device=cuda, dtype=bfloat16",
            "isa": self.kernels.isa,
            "compiler": self.kernels.compiler,
            "kernels_digest": self.kernels.digest,
            "threads": self.engine.threads,
            "threads_seen": self.kernels.threads_seen(),
            "chunk_width": self._chunk_words() if fixed else "follows the step",
            "key_chunk": KEYS if fixed else "follows the step",
            "tuning": self.engine.tuning,
            "kv_fraction": self.engine.kv_fraction or KV_FRACTION,
            "gpu_graphs": self._graph_words(),
            "execution": execution(self.steps, self.graph_steps),
            **self.facts,
        }


def free_keys(longest: int, tuning: int) -> int:
    """Keys of a chunk in `free`: grows with the longest row of the step, or by an autotuner's choice."""
    return (32, 64, 128)[(int(longest > 128) + int(longest > 512) + tuning) % 3]
