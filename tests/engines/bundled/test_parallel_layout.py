"""Who holds what, and that T completed over chunks is T, whoever summed which of them."""

import dataclasses

import numpy as np
import pytest
from arithmetic_cases import normal, same
from hypothesis import given
from hypothesis import strategies as st

from engines.bundled import twin
from engines.bundled.models.tiny import CONFIG, MOE_CONFIG
from engines.bundled.parallel.layout import Span, chunks_of, complete, lay_out, split, subtrees

SMOLLM2 = dataclasses.replace(
    CONFIG, num_attention_heads=9, num_key_value_heads=3, head_dim=64, hidden_size=576, intermediate_size=1536,
    vocab_size=49152,
)  # fmt: skip


def sizes(spans):
    return [len(span) for span in spans]


@pytest.mark.parametrize(
    ("ranks", "kv_heads", "heads", "chunks"),
    [
        (1, [3], [9], [8]),
        (2, [2, 1], [6, 3], [4, 4]),
        (3, [1, 1, 1], [3, 3, 3], [3, 3, 2]),
        (4, [1, 1, 1, 0], [3, 3, 3, 0], [2, 2, 2, 2]),
    ],
)
def test_nine_heads_in_three_groups_over_ranks(ranks, kv_heads, heads, chunks):
    parts = lay_out(SMOLLM2, tensor=ranks, expert=1)
    assert sizes(part.kv_heads for part in parts) == kv_heads
    assert sizes(part.heads for part in parts) == heads
    assert [len(chunks_of(part.inner, SMOLLM2.chunk_width)) for part in parts] == chunks


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(4, 2, 16), (9, 3, 64), (32, 32, 80), (28, 4, 128), (12, 12, 64), (40, 8, 128)]
)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_every_head_chunk_and_id_has_one_rank_and_chunks_stay_whole(heads, kv_heads, dim, ranks):
    config = dataclasses.replace(
        SMOLLM2, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=dim, intermediate_size=1500
    )
    parts, width = lay_out(config, tensor=ranks, expert=1), config.chunk_width
    wholes = {
        "heads": heads,
        "kv_heads": kv_heads,
        "attention_columns": heads * dim,
        "inner": 1500,
        "vocabulary": 49152,
    }
    for name, whole in wholes.items():
        spans = [getattr(part, name) for part in parts]
        assert [spans[0].begin, *[span.end for span in spans]][: ranks + 1] == [span.begin for span in spans] + [whole]
    for name in ("attention_columns", "inner"):
        chunks = [chunks_of(getattr(part, name), width) for part in parts]
        assert [0, *[span.end for span in chunks]] == [span.begin for span in chunks] + [-(-wholes[name] // width)]
        assert all(
            getattr(p, name).begin == min(c.begin * width, wholes[name]) for p, c in zip(parts, chunks, strict=True)
        )
    for part in parts:
        assert len(part.heads) == len(part.kv_heads) * heads // kv_heads


def test_experts_are_split_alone_or_with_everything_else():
    alone = lay_out(MOE_CONFIG, tensor=1, expert=4)
    assert sizes(part.experts for part in alone) == [2, 2, 2, 2]
    assert sizes(part.heads for part in alone) == [4, 4, 4, 4]
    both = lay_out(MOE_CONFIG, tensor=2, expert=2)
    assert (sizes(part.experts for part in both), sizes(part.heads for part in both)) == ([4, 4], [2, 2])
    with pytest.raises(ValueError, match="tensor_parallel_size 2 and expert_parallel_size 4: expected equal"):
        lay_out(MOE_CONFIG, tensor=2, expert=4)


@given(st.integers(1, 70), st.lists(st.integers(0, 70), max_size=6), st.integers(0, 2**16))
def test_the_tree_completed_over_chunks_is_the_tree(chunks, cuts, seed):
    values = [normal(seed + i, 3) for i in range(chunks)]
    ends = sorted(min(cut, chunks) for cut in cuts)
    spans = [Span(begin, end) for begin, end in zip([0, *ends], [*ends, chunks], strict=True)]
    sums = {node: twin.tree(values[node.slice]) for span in spans for node in subtrees(chunks, span)}
    assert same(complete(chunks, sums, np.add), twin.tree(values))
    assert sum(sizes(sums)) == chunks  # each chunk once


def test_sub_trees_are_the_largest_that_fit():
    assert subtrees(8, Span(3, 6)) == (Span(3, 4), Span(4, 6))
    assert subtrees(7, Span(4, 7)) == (Span(4, 7),)  # the incomplete right side of T is one of its nodes
    assert subtrees(3, Span(0, 2)) == (Span(0, 2),)
    assert subtrees(3, Span(3, 3)) == ()


@pytest.mark.parametrize("how", ["one after another", "as a tree over ranks"])
def test_adding_ranks_instead_of_chunks_gives_other_bits(how):
    """8 chunks as 3 + 3 + 2: the trap that docs/numerics.md names."""
    values = [normal(i, 4000) for i in range(8)]
    ranks = [twin.tree(values[span.slice]) for span in split(8, 3)]
    added = twin.tree(ranks) if how == "as a tree over ranks" else (ranks[0] + ranks[1]) + ranks[2]
    assert not same(added, twin.tree(values))


def test_an_absent_chunk_is_no_zero():
    minus = np.array([-0.0], np.float32)
    assert same(complete(1, {Span(0, 1): minus}, np.add), minus)
    assert not same(minus + np.float32(0.0), minus)


def test_a_chunk_that_nobody_summed_is_named():
    with pytest.raises(KeyError, match="chunk 2 of 3: no rank summed it"):
        complete(3, {Span(0, 2): normal(0, 1)}, np.add)
