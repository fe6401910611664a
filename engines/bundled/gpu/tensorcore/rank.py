"""One rank in bfloat16 with k_order=tree in a process of its own: its card, its part of the weights, its steps.

It does not know processes. Rules: nothing that another rank holds stays on the card; every rank launches every step,
call by call; what a card lacks is said before weights are loaded, and the self-tests are those of one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from engines.bundled.arithmetic.portable import process_counts
from engines.bundled.batch import StepBatch
from engines.bundled.config import EngineConfig, Model, ModelConfig
from engines.bundled.errors import NotSupported
from engines.bundled.gpu.tensorcore.exchange import RankExchange
from engines.bundled.gpu.tensorcore.forward import TensorCoreArithmetic
from engines.bundled.gpu.tensorcore.layout import lay_out
from engines.bundled.gpu.tensorcore.parallel import Exchange, RankedPass, Shard, chunks_in, inner_of, rounded
from engines.bundled.gpu.tensorcore.passes import TritonOperators
from engines.bundled.gpu.tensorcore.prefill import PIECES, padded_tokens
from engines.bundled.gpu.tensorcore.selfcheck import check_forms
from engines.bundled.gpu.tensorcore.selftest import choose_linear, choose_tree
from engines.bundled.gpu.tensorcore.start import check_device, device_facts
from engines.bundled.gpu.tensorcore.tree import TreeLinear, chunk_count
from engines.bundled.gpu.tensorcore.weights import Source, check_family, open_weights
from engines.bundled.kernels.interface import Kernels
from engines.bundled.parallel.group import Group
from engines.bundled.parallel.layout import Part, Span, split

_SAME = ("gpu", "gpu_capability", "gpu_cuda", "gpu_compiler", "gpu_torch")  # at all ranks


class RankArithmetic(TensorCoreArithmetic):
    """`tensorcore`, or its control `free`, for one rank of a group. Every rank runs every step."""

    def __init__(
        self, whole: ModelConfig, engine: EngineConfig, source: Source, kernels: Kernels, device: str, group: Group
    ) -> None:
        """`source` gives the whole model's tensors. Raises as `TensorCoreArithmetic`."""
        chunks = split(chunk_count(whole), group.ranks)
        self.whole, self.mine = whole, chunks[group.rank]
        local = local_config(whole, self.mine)
        super().__init__(local, engine, part_of(source, whole, self.mine), kernels, device)
        self.tree = TreeLinear(chunk_count(whole), by_rows=False)
        exchange = RankExchange(group, chunks)
        self.exchange: Exchange = exchange if self.name == "tensorcore" else rounded(exchange)

    def logits_eager(self, batch: StepBatch) -> torch.Tensor:
        """Logits (W, vocab), the same at every rank."""
        ops = self.operators(int(batch.position.max()) + 1)
        if not isinstance(ops, TritonOperators) or self.tree is None:
            raise TypeError("ranks need Triton's operators and the tree")
        shard = Shard(
            chunks=self.mine, heads=ops.heads, layers=self.weights.layers, caches=tuple(self.caches)
        )  # fmt: skip
        rows, wanted = lay_out(batch, ops.heads, self.device, ops.linear.padded(len(batch.token)))
        return RankedPass(self.whole, self.weights, [shard], self.tree, self.exchange).run(ops, rows, wanted)

    def counts(self) -> tuple[Mapping[str, int], ...]:
        """What this rank holds on its card and has done; see `batch.Ranked`."""
        layers = [
            tensor for layer in self.weights.layers
            for tensor in (layer.qkv, layer.attention_out, layer.gate_up, layer.down) if tensor is not None
        ]  # fmt: skip
        w = self.weights
        held = [w.embedding, *layers, *(() if w.head is w.embedding else (w.head,))]
        caches = [tensor for pair in self.caches for tensor in pair]
        return ({
            "weight_bytes": sum(map(_bytes, held)), "kv_bytes": sum(map(_bytes, caches)), "steps": self.steps,
            **process_counts(self.kernels),
        },)  # fmt: skip


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def local_config(whole: ModelConfig, mine: Span) -> ModelConfig:
    """The shape of what the rank computes alone."""
    chunks = chunk_count(whole)
    kv = len(mine) * whole.num_key_value_heads // chunks
    return replace(
        whole, num_attention_heads=kv * (whole.num_attention_heads // whole.num_key_value_heads),
        num_key_value_heads=kv, intermediate_size=len(inner_of(whole.intermediate_size, chunks, mine)),
    )  # fmt: skip


def part_of(source: Source, whole: ModelConfig, mine: Span) -> Source:
    """The rank's rows of q, k, v, gate and up, its columns of what follows them, and everything else as it is."""
    chunks, inner = chunk_count(whole), whole.intermediate_size
    q, kv = whole.num_attention_heads * whole.head_dim, whole.num_key_value_heads * whole.head_dim
    of_q, of_kv = (mine.times(size // chunks, size) for size in (q, kv))
    of_inner = inner_of(inner, chunks, mine)
    parts = {
        "q_proj": (0, q, of_q), "k_proj": (0, kv, of_kv), "v_proj": (0, kv, of_kv), "o_proj": (1, q, of_q),
        "gate_proj": (0, inner, of_inner), "up_proj": (0, inner, of_inner), "down_proj": (1, inner, of_inner),
    }  # fmt: skip

    def take(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        part = parts.get(name.split(".")[-2])
        if part is None:
            return source(name, shape)
        axis, size, span = part
        full = (*shape[:axis], size, *shape[axis + 1 :])
        return source(name, full).narrow(axis, span.begin, len(span)).clone()

    return take


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCoreCard:
    """The card of one rank."""

    device: str
    rank: int

    @property
    def facts(self) -> Mapping[str, str]:
        """What must be the same at every rank."""
        named = {
            name.replace("_", " "): str(value) for name, value in device_facts(self.device).items() if name in _SAME
        }
        return {"device": "cuda", **named}

    def join(
        self, model: Model, config: EngineConfig, kernels: Kernels, _parts: tuple[Part, ...], group: Group
    ) -> RankArithmetic:
        """Loads the rank's part and runs the self-tests with the others. Raises GpuMemoryError, NotSupported."""
        torch.cuda.set_device(self.device)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        with torch.inference_mode():
            source = open_weights(model, self.device)
            made = RankArithmetic(model.config, config, source, kernels, self.device, group)
            made.facts = device_facts(self.device)
            if config.arithmetic != "tensorcore":
                return made
            most = padded_tokens(config.max_num_batched_tokens)
            made.linear, of_linear = choose_linear(made.weights, tokens=most, seats=PIECES[-1])
            tree, of_tree = choose_tree(len(made.mine), made.weights, most)
            made.tree = tree.over(chunk_count(model.config))
            made.facts |= {**of_linear, **of_tree}
            made.facts["gpu_forms_test"] = f"equal in {check_forms(made)} logits"
        made.steps = 0
        return made


def open_tensorcore_card(whole: ModelConfig, config: EngineConfig, rank: int) -> TensorCoreCard:
    """The card of a rank: over NCCL its own, over gloo the cards in turn.

    Raises NotSupported for sizes that cannot be split, and where there is no card for the rank.
    """
    check_family(whole, config)
    if whole.num_experts:
        raise NotSupported("dtype=bfloat16 over several ranks: a mixture of experts is not split; use float32 on CPUs")
    ranks, chunks = config.tensor_parallel_size, chunk_count(whole)
    most = min(chunks, chunks_in(whole.intermediate_size, chunks))
    if ranks > most:
        raise NotSupported(f"tensor_parallel_size {ranks}: this model is split over {most} ranks at most")
    cards = torch.cuda.device_count()
    if config.collectives == "nccl" and cards < ranks:
        raise NotSupported(f"collectives=nccl: {ranks} ranks need a GPU each, {cards} are here; use collectives=gloo")
    return TensorCoreCard(device=check_device(rank % max(cards, 1)), rank=rank)
