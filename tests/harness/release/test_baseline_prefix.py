"""Prefix digests: equal captures have equal chains, and any flipped bit parts them where it is."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from release_making import traces

from harness.baseline.prefix import available_rules, chains, first_difference
from harness.judged import RequestKey

COLUMNS = {"token": "tokens", "pick": "tokens", "logprob": "logprobs", "topk_ids": "topk", "topk_logprobs": "topk"}
RULES = ["tokens", "logprobs", "topk"]


def flipped(made, column, position, bit):
    array = np.ascontiguousarray(getattr(made.positions, column)).copy()
    row = array.reshape(len(array), -1).view(np.uint32)[position]
    row[0] ^= np.uint32(1 << bit)
    return dataclasses.replace(made, positions=dataclasses.replace(made.positions, **{column: array}))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4), column=st.sampled_from(sorted(COLUMNS)),
    bit=st.integers(0, 30), data=st.data(),
)  # fmt: skip
def test_any_flipped_bit_parts_the_chain_at_its_position_and_under_its_rule_only(lengths, column, bit, data):
    made = traces(tuple(lengths))
    position = data.draw(st.integers(0, sum(lengths) - 1))
    ends = np.cumsum(lengths)
    request = int(np.searchsorted(ends, position, side="right"))
    inside = position - int(ends[request] - lengths[request])
    for rule in RULES:
        before, after = chains(made, rule), chains(flipped(made, column, position, bit), rule)
        found = {key.id: first_difference(before[key], after[key]) for key in before}
        seen = RULES.index(rule) >= RULES.index(COLUMNS[column])
        assert found == {f"r{i}": inside if seen and i == request else None for i in range(len(lengths))}


def test_chains_of_a_longer_and_a_shorter_output_part_at_the_shorter_ones_end():
    long, short = traces((4,)), traces((4,))
    cut = dataclasses.replace(
        short,
        requests=dataclasses.replace(short.requests, length=np.array([3], dtype=np.int64)),
        positions=dataclasses.replace(
            short.positions, token=short.positions.token[:3], pick=short.positions.pick[:3],
            logprob=short.positions.logprob[:3], topk_ids=short.positions.topk_ids[:3],
            topk_logprobs=short.positions.topk_logprobs[:3],
        ),
    )  # fmt: skip
    key = RequestKey("r0", 0)
    assert first_difference(chains(long, "topk")[key], chains(cut, "topk")[key]) == 3


def test_another_finish_reason_is_a_difference_at_the_last_position():
    made = traces((4,))
    other = dataclasses.replace(made, requests=dataclasses.replace(made.requests, finish_reason=("stop",)))
    key = RequestKey("r0", 0)
    assert first_difference(chains(made, "tokens")[key], chains(other, "tokens")[key]) == 3


def test_padding_that_a_companion_caused_is_no_difference():
    made = traces((3, 2), topk=2)
    wide = dataclasses.replace(
        made.positions,
        topk_ids=np.concatenate([made.positions.topk_ids, np.full((5, 1), -1, np.int32)], axis=1),
        topk_logprobs=np.concatenate([made.positions.topk_logprobs, np.full((5, 1), np.nan, np.float32)], axis=1),
    )
    padded = chains(dataclasses.replace(made, positions=wide), "topk")
    assert {key: chain.end for key, chain in padded.items()} == {
        key: chain.end for key, chain in chains(made, "topk").items()
    }


def test_companions_are_left_out_and_rules_follow_the_columns():
    made = traces((3, 2), companions=1)
    assert [key.id for key in chains(made, "topk")] == ["r0"]
    bare = dataclasses.replace(made.positions, logprob=None, topk_ids=None, topk_logprobs=None)
    assert available_rules(bare) == ("tokens",)
    with pytest.raises(ValueError, match="no columns for a chain under rule 'topk'"):
        chains(dataclasses.replace(made, positions=bare), "topk")
