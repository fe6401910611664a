"""Which part of a model each rank holds, and how partial sums of the ranks become the sums of one process.

It does not know processes, kernels or weights. Rules: ranks own contiguous ranges in order; K is split at multiples
of the chunk width only, heads by whole groups that share a KV head; a rank may own nothing; T is completed over chunks
(docs/numerics.md, Tensor parallelism): a rank contributes the sums of the maximal sub-trees of T inside its range, and
a chunk that is absent is skipped, never added as zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from engines.bundled.config import Float32, ModelConfig


@dataclass(frozen=True, slots=True)
class Span:
    """The range [begin, end) of heads, chunks, ids or experts."""

    begin: int
    end: int

    def __len__(self) -> int:
        """How many."""
        return self.end - self.begin

    @property
    def slice(self) -> slice:
        """The same as a slice."""
        return slice(self.begin, self.end)

    def times(self, size: int, most: int) -> Span:
        """The range of items of which each of these holds `size`, the last one of all `most` perhaps fewer."""
        return Span(min(self.begin * size, most), min(self.end * size, most))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank holds of a model."""

    rank: int
    ranks: int
    kv_heads: Span
    heads: Span
    attention_columns: Span  # of the output projection's K
    inner: Span  # of the MLP's inner width
    vocabulary: Span
    experts: Span
    expert_inner: Span  # of each expert's inner width
    sharded: bool  # attention, MLP and vocabulary are split; else every rank holds them whole
    experts_split: bool


def split(count: int, ranks: int) -> tuple[Span, ...]:
    """`count` items over `ranks` ranks in order; the first ranks get one more where it does not come out even."""
    small, more = divmod(count, ranks)
    ends = [small * (rank + 1) + min(rank + 1, more) for rank in range(ranks)]
    return tuple(Span(begin, end) for begin, end in zip([0, *ends], ends, strict=False))


def lay_out(config: ModelConfig, *, tensor: int, expert: int) -> tuple[Part, ...]:
    """Every rank's part. `tensor` and `expert` are the sizes asked for; one of them may be 1, else they are equal.

    Raises ValueError for sizes that do not go together.
    """
    ranks = max(tensor, expert)
    if {tensor, expert} - {1, ranks}:
        raise ValueError(
            f"tensor_parallel_size {tensor} and expert_parallel_size {expert}: expected equal, or one of them 1"
        )
    group, width = config.num_attention_heads // config.num_key_value_heads, config.chunk_width
    whole = config.num_attention_heads * config.head_dim
    unit = math.lcm(width, group * config.head_dim)  # columns that end with a chunk and with a KV head
    split_units = split(-(-whole // unit), tensor) * (ranks // tensor)
    split_chunks = split(-(-config.intermediate_size // width), tensor) * (ranks // tensor)
    # An expert is held whole where experts are split.
    inner_ranks = 1 if expert > 1 else tensor
    split_inner = split(-(-config.moe_intermediate_size // width), inner_ranks) * (ranks // inner_ranks)
    split_ids = split(config.vocab_size, tensor) * (ranks // tensor)
    split_experts = split(config.num_experts, expert) * (ranks // expert)
    parts = []
    for rank in range(ranks):
        columns = split_units[rank].times(unit, whole)
        heads = Span(columns.begin // config.head_dim, columns.end // config.head_dim)
        inner = split_inner[rank].times(width, config.moe_intermediate_size)
        parts.append(
            Part(
                rank=rank, ranks=ranks, heads=heads, kv_heads=Span(heads.begin // group, heads.end // group),
                attention_columns=columns, inner=split_chunks[rank].times(width, config.intermediate_size),
                vocabulary=split_ids[rank], experts=split_experts[rank], expert_inner=inner, sharded=tensor > 1,
                experts_split=expert > 1,
            )
        )  # fmt: skip
    return tuple(parts)


def chunks_of(columns: Span, width: int) -> Span:
    """The chunks of K that a range of columns holds; it begins and ends with a chunk, or with K."""
    return Span(-(-columns.begin // width), -(-columns.end // width))


def subtrees(chunks: int, mine: Span) -> tuple[Span, ...]:
    """The maximal sub-trees of T over `chunks` chunks that lie inside `mine`, in order."""
    return tuple(_inside(Span(0, chunks), mine)) if len(mine) else ()


def _inside(node: Span, mine: Span) -> Iterator[Span]:
    if node.end <= mine.begin or mine.end <= node.begin:
        return
    if mine.begin <= node.begin and node.end <= mine.end:
        yield node
        return
    left, right = _halves(node)
    yield from _inside(left, mine)
    yield from _inside(right, mine)


def _halves(node: Span) -> tuple[Span, Span]:
    """T(a..b) = T(a..a+p) + T(a+p..b), p the largest power of two below b - a."""
    middle = node.begin + (1 << (len(node) - 1).bit_length() - 1)
    return Span(node.begin, middle), Span(middle, node.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSum:
    """A product whose K is split over the ranks: which sums of sub-trees of T each rank contributes."""

    chunks: int  # of K as a whole
    width: int  # columns of a chunk
    columns: tuple[Span, ...]  # of K, by rank
    spans: tuple[tuple[Span, ...], ...]  # by rank: the sub-trees it sums

    @property
    def widest(self) -> int:
        """Sub-trees of the rank that has most of them."""
        return max(map(len, self.spans))

    def pieces(self, rank: int) -> tuple[Span, ...]:
        """The columns of K of each of the rank's sub-trees."""
        most = self.columns[-1].end
        return tuple(span.times(self.width, most) for span in self.spans[rank])


def share_sum(whole: int, width: int, columns: Sequence[Span]) -> SharedSum:
    """How ranks that hold these columns of `whole` share a sum in chunks of `width`."""
    chunks = -(-whole // width)
    spans = tuple(subtrees(chunks, chunks_of(span, width)) for span in columns)
    return SharedSum(chunks=chunks, width=width, columns=tuple(columns), spans=spans)


def additions(chunks: int, given: Collection[Span]) -> list[Span | None]:
    """T over `chunks` chunks from sub-trees that cover it, in reverse Polish order: one of `given`, or None for an
    addition of the last two.

    Raises KeyError naming a chunk nobody summed.
    """

    def total(node: Span) -> list[Span | None]:
        if node in given:
            return [node]
        if len(node) == 1:
            raise KeyError(f"chunk {node.begin} of {chunks}: no rank summed it")
        left, right = _halves(node)
        return [*total(left), *total(right), None]

    return total(Span(0, chunks))


def complete(chunks: int, sums: Mapping[Span, Float32], add: Callable[[Float32, Float32], Float32]) -> Float32:
    """T over `chunks` chunks from the sums of sub-trees that cover it. Raises KeyError naming a chunk nobody summed."""
    stack: list[Float32] = []
    for node in additions(chunks, sums):
        if node is not None:
            stack.append(sums[node])
        else:
            right = stack.pop()
            stack.append(add(stack.pop(), right))
    return stack[0]
