"""A bfloat16 model over ranks, in the arithmetic `k_order=tree`: what each rank holds and the pass they take together.

It does not know processes: ranks that live in one process run one after another, and an `Exchange` brings the sums of
all. Rules: a rank holds whole chunks of K, so whole KV heads, and contributes the float32 sums of the maximal sub-trees
of T inside them; T is completed over chunks and rounded once; embedding, norms and head are whole in every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from engines.bundled.batch import StepBatch
from engines.bundled.config import ModelConfig
from engines.bundled.gpu.tensorcore.forward import TensorCoreArithmetic
from engines.bundled.gpu.tensorcore.layout import lay_out
from engines.bundled.gpu.tensorcore.operators import Heads, Rows
from engines.bundled.gpu.tensorcore.passes import Cache, TritonOperators
from engines.bundled.gpu.tensorcore.tree import TreeLinear, chunk_width
from engines.bundled.gpu.tensorcore.weights import Layer, Weights
from engines.bundled.parallel.layout import Span, additions, split, subtrees

Tensor = torch.Tensor
Sums = Mapping[Span, Tensor]  # sub-trees of T over the chunks of K, each (T, hidden) float32
# The sums of this process's ranks, how many chunks K has, and a tensor (T, hidden): to the sums of all ranks.
Exchange = Callable[[Sequence[Sums], int, Tensor], Sums]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """What one rank holds; `chunks` is its part of the model's chunks of K, empty for a rank that holds nothing."""

    chunks: Span
    heads: Heads
    layers: tuple[Layer, ...]
    caches: tuple[Cache, ...]

    @property
    def bytes(self) -> int:
        """Of its parts of matrices that are split."""
        matrices = [(layer.qkv, layer.attention_out, layer.gate_up, layer.down) for layer in self.layers]
        return sum(m.numel() * m.element_size() for layer in matrices for m in layer if m is not None)


def take_shards(arithmetic: TensorCoreArithmetic, ranks: int, pages: int) -> tuple[Shard, ...]:
    """Copies of every rank's part, with `pages` empty pages of its own. Raises ValueError for another arithmetic."""
    chunks = tree_of(arithmetic).chunks
    return tuple(take_shard(arithmetic, chunks, span, pages) for span in split(chunks, ranks))


def tree_of(arithmetic: TensorCoreArithmetic) -> TreeLinear:
    """The product that ranks share. Raises ValueError for an arithmetic without one."""
    if arithmetic.tree is None:
        raise ValueError("ranks share sums in arithmetic tensorcore with k_order=tree alone")
    return arithmetic.tree


def take_shard(arithmetic: TensorCoreArithmetic, chunks: int, mine: Span, pages: int) -> Shard:
    """The part of the rank that holds the chunks `mine` of `chunks`."""
    config, heads = arithmetic.model, arithmetic.operators(1).heads
    kv = len(mine) * heads.kv // chunks
    pool, slots = arithmetic.caches[0][0], pages * heads.page
    caches = [tuple(pool.new_zeros((slots, kv, heads.dim)) for _ in range(2)) for _ in arithmetic.caches]
    return Shard(
        chunks=mine,
        heads=replace(heads, heads=kv * (heads.heads // heads.kv), kv=kv),
        layers=tuple(take_layer(layer, config, chunks, mine) for layer in arithmetic.weights.layers),
        caches=tuple((keys, values) for keys, values in caches),
    )


def take_layer(layer: Layer, config: ModelConfig, chunks: int, mine: Span) -> Layer:
    """The rank's rows of what makes q, k, v, gate and up, and its columns of what follows them."""
    if layer.gate_up is None or layer.down is None:
        raise ValueError("a mixture of experts is not split along K")
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    inner = inner_of(config.intermediate_size, chunks, mine)

    def own(joined: Tensor) -> Tensor:
        return torch.cat([p[mine.times(len(p) // chunks, len(p)).slice] for p in torch.split(joined, [q, kv, kv])])

    return replace(
        layer,
        qkv=own(layer.qkv),
        qkv_bias=None if layer.qkv_bias is None else own(layer.qkv_bias),
        attention_out=layer.attention_out[:, mine.times(q // chunks, q).slice].contiguous(),
        gate_up=torch.cat([half[inner.slice] for half in layer.gate_up.chunk(2)]),
        down=layer.down[:, inner.slice].contiguous(),
    )


def inner_of(inner: int, chunks: int, mine: Span) -> Span:
    """The range of the inner width that lies in the chunks `mine`."""
    return mine.times(chunk_width(inner, chunks), inner)


def sub_sums(tree: TreeLinear, x: Tensor, weight: Tensor, whole: int, mine: Span) -> Sums:
    """What a rank contributes to a product over `whole` columns: x (T, k), weight (N, k) hold its k columns of them."""
    width, held = chunk_width(whole, tree.chunks), clip(mine, count := chunks_in(whole, tree.chunks))
    found = {}
    for node in subtrees(count, held):
        columns = node.times(width, whole)
        own = slice(columns.begin - held.begin * width, columns.end - held.begin * width)
        found[node] = tree.sums(x[:, own], weight[:, own], width)
    return found


def chunks_in(whole: int, chunks: int) -> int:
    """Chunks that `whole` columns have: `chunks`, or fewer where their width was rounded up."""
    return -(-whole // chunk_width(whole, chunks))


def clip(mine: Span, count: int) -> Span:
    """The part of a rank's chunks that there are."""
    return Span(min(mine.begin, count), min(mine.end, count))


def complete(count: int, sums: Sums) -> Tensor:
    """T over `count` chunks, in float32, from the sub-trees of all ranks. Raises KeyError for a chunk nobody summed."""
    stack: list[Tensor] = []
    for node in additions(count, sums):
        if node is not None:
            stack.append(sums[node])
        else:
            right = stack.pop()
            stack.append(stack.pop() + right)
    return stack[0]


def join_sums(sums: Sequence[Sums], _count: int, _like: Tensor) -> Sums:
    """The exchange of ranks that all live in one process."""
    return {span: total for one in sums for span, total in one.items()}


def rounded(exchange: Exchange) -> Exchange:
    """What ranks in `free` do: each rounds its sums before they are added, as an all-reduce in bfloat16 does."""

    def meet(sums: Sequence[Sums], count: int, like: Tensor) -> Sums:
        return {span: one.to(like.dtype).float() for span, one in exchange(sums, count, like).items()}

    return meet


class RankedPass:
    """The forward pass of the ranks of this process, all of them or one."""

    def __init__(
        self, config: ModelConfig, weights: Weights, shards: Sequence[Shard], tree: TreeLinear, exchange: Exchange
    ) -> None:
        """Of `weights`, embedding, norm and head are used; layers are the shards'."""
        self.config, self.weights, self.shards, self.tree = config, weights, shards, tree
        self.exchange = exchange

    def run(self, ops: TritonOperators, rows: Rows, wanted: Tensor) -> Tensor:
        """Logits (W, vocab). `ops` has the whole model's heads."""
        c, hidden = self.config, torch.index_select(self.weights.embedding, 0, rows.token)
        update: Tensor | None = None
        for index, layer in enumerate(self.shards[0].layers):
            normed = ops.norm(hidden, layer.attention_norm, update)
            attended = [self._attend(shard, index, ops, normed, rows) for shard in self.shards]
            update = self._complete(c.num_attention_heads * c.head_dim, attended, hidden)
            normed = ops.norm(hidden, layer.mlp_norm, update)
            said = [self._mlp(shard, index, ops, normed) for shard in self.shards]
            update = self._complete(c.intermediate_size, said, hidden)
        if update is None:
            raise ValueError("a model without layers")
        last = hidden.index_select(0, wanted)
        return ops.linear(ops.norm(last, self.weights.norm, update.index_select(0, wanted)), self.weights.head)

    def _attend(self, shard: Shard, index: int, ops: TritonOperators, normed: Tensor, rows: Rows) -> Sums:
        if not shard.chunks:
            return {}
        layer = shard.layers[index]
        qkv = ops.linear(normed, layer.qkv)
        if layer.qkv_bias is not None:
            qkv += layer.qkv_bias
        attended = replace(ops, heads=shard.heads).attention(qkv, rows, shard.caches[index], layer)
        whole = self.config.num_attention_heads * self.config.head_dim
        return sub_sums(self.tree, attended, layer.attention_out, whole, shard.chunks)

    def _mlp(self, shard: Shard, index: int, ops: TritonOperators, normed: Tensor) -> Sums:
        layer = shard.layers[index]
        if layer.gate_up is None or layer.down is None or not len(layer.gate_up):
            return {}
        gated = ops.swiglu(ops.linear(normed, layer.gate_up))
        return sub_sums(self.tree, gated, layer.down, self.config.intermediate_size, shard.chunks)

    def _complete(self, whole: int, sums: Sequence[Sums], hidden: Tensor) -> Tensor:
        count = chunks_in(whole, self.tree.chunks)
        return complete(count, self.exchange(sums, count, hidden)).to(hidden.dtype)


class Ranks:
    """Some or all ranks of a model in this process, beside the arithmetic whose operators they use."""

    def __init__(self, arithmetic: TensorCoreArithmetic, shards: Sequence[Shard], exchange: Exchange) -> None:
        """Raises ValueError for another arithmetic than `tensorcore` with k_order=tree."""
        self.shards = shards
        self._arithmetic = arithmetic
        self._pass = RankedPass(arithmetic.model, arithmetic.weights, self.shards, tree_of(arithmetic), exchange)

    def logits(self, batch: StepBatch) -> Tensor:
        """Logits (W, vocab) of a step, launched call by call."""
        ops = self._arithmetic.operators(int(batch.position.max()) + 1)
        if not isinstance(ops, TritonOperators):
            raise TypeError("ranks need Triton's operators")
        with torch.inference_mode():
            rows, wanted = lay_out(batch, ops.heads, self._arithmetic.device, ops.linear.padded(len(batch.token)))
            return self._pass.run(ops, rows, wanted)


class EmulatedRanks(Ranks):
    """All ranks of a model in this process, one after another."""

    def __init__(
        self, arithmetic: TensorCoreArithmetic, ranks: int, pages: int, exchange: Exchange = join_sums
    ) -> None:
        """Each with `pages` pages. Raises ValueError for another arithmetic than `tensorcore` with k_order=tree."""
        super().__init__(arithmetic, take_shards(arithmetic, ranks, pages), exchange)
