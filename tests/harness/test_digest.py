"""Judged digests: equal exactly when the strongest comparison says same, and laid out as documented."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_traces import (
    captures,
    copy_traces,
    flip_bit,
    flips,
    judged_rows,
    make_traces,
    reorder,
    with_positions,
    with_requests,
)

from harness.compare import compare, strongest_rule
from harness.digest import judged_digest, judged_keys, request_digests
from harness.judged import ComparisonError
from harness.traces import NO_TOKEN

COLUMNS = ("token", "pick", "logprob", "topk_ids", "topk_logprobs", "logits_digest")


@given(st.data())
def test_digests_are_equal_exactly_when_the_comparison_says_same(data):
    a = data.draw(captures())
    b = flip_bit(a, data.draw(flips(a, COLUMNS))) if data.draw(st.booleans()) else copy_traces(a)
    if (b.positions.topk_ids[:, 0] == NO_TOKEN).any():
        return  # nothing to compare at that position: an error, not a verdict
    same = compare(a, b, strongest_rule(a, b), "natural").outcome == "same"
    assert (judged_digest(a) == judged_digest(b)) == same
    assert (request_digests(a) == request_digests(b)) == same


@given(st.data())
def test_one_request_changes_only_its_own_digest(data):
    a = data.draw(captures())
    flip = data.draw(flips(a, COLUMNS))
    before = dict(zip(judged_keys(a), request_digests(a), strict=True))
    after = dict(zip(judged_keys(a), request_digests(flip_bit(a, flip)), strict=True))
    changed = {key.id for key in before if before[key] != after[key]}
    assert changed == {a.requests.id[flip.request]}


@given(captures(), st.randoms(use_true_random=False))
def test_submission_order_companions_steps_and_times_stay_out(traces, random):
    order = list(range(len(traces.requests.id)))
    random.shuffle(order)
    other = reorder(traces, order)
    other = with_requests(other, finish_s=other.requests.finish_s + 1, preemptions=other.requests.preemptions + 1)
    other = replace(other, counters=(("steps", 3),))
    assert judged_digest(other) == judged_digest(traces)
    alone = reorder(traces, judged_rows(traces))
    assert judged_digest(alone) == judged_digest(traces)


def test_finish_reason_length_and_key_are_in():
    a = make_traces()
    digests = {
        judged_digest(a),
        judged_digest(with_requests(a, finish_reason=("length", "stop"))),
        judged_digest(with_requests(a, id=("a", "c"))),
        judged_digest(with_requests(a, sample=np.array([0, 1], dtype=np.int32))),
        judged_digest(with_requests(a, length=np.array([2, 3]))),
        judged_digest(with_positions(a, logits_digest=None)),
        judged_digest(with_positions(a, topk_ids=None, topk_logprobs=None)),
        judged_digest(with_positions(a, logprob=None)),
    }
    assert len(digests) == 8


def test_padding_columns_are_left_out_of_the_digest():
    narrow = make_traces(("a",), (2,), width=2)
    ids = np.concatenate([narrow.positions.topk_ids, np.full((2, 3), NO_TOKEN, np.int32)], axis=1)
    values = np.concatenate([narrow.positions.topk_logprobs, np.full((2, 3), np.nan, np.float32)], axis=1)
    wide = with_positions(narrow, topk_ids=ids, topk_logprobs=values)
    assert judged_digest(wide) == judged_digest(narrow)
    assert compare(narrow, wide, "topk", "natural").outcome == "same"
    other_nan = values.copy()
    other_nan.view(np.uint32)[1, 4] = 0x7FC00001
    odd = with_positions(wide, topk_logprobs=other_nan)
    assert judged_digest(odd) != judged_digest(narrow)
    assert compare(narrow, odd, "topk", "natural").outcome == "different"


def test_bytes_are_those_of_the_documented_layout():
    a = make_traces(("é",), (2,), width=2)
    table = a.positions
    table.topk_logprobs[0, 0] = -0.0
    body = b"samebits judged 1\n" + struct.pack("<I", 2) + "é".encode() + struct.pack("<i", 0)
    body += struct.pack("<I", 6) + b"length" + struct.pack("<Q", 2)
    body += struct.pack("<BI2i", 1, 1, *table.token) + struct.pack("<BI2i", 2, 1, *table.pick)
    body += struct.pack("<BI2f", 3, 1, *table.logprob) + struct.pack("<BI", 4, 2)
    for ids, values in zip(table.topk_ids, table.topk_logprobs, strict=True):
        body += b"".join(struct.pack("<if", token, value) for token, value in zip(ids, values, strict=True))
    body += struct.pack("<BI4Q", 5, 2, *table.logits_digest.reshape(-1).tolist())
    expected = hashlib.sha256(body)
    assert request_digests(a) == (expected.hexdigest(),)
    whole = hashlib.sha256(b"samebits judged capture 1\n" + struct.pack("<I", 1) + expected.digest())
    assert judged_digest(a) == whole.hexdigest()


def test_frozen_value():
    """A changed layout needs a new number in its magic: stored digests are named in approvals and baselines."""
    a = make_traces(("a", "b"), (1, 1), width=1, digests=False)
    a = with_positions(
        a, token=np.array([1, 2], np.int32), pick=np.array([1, 3], np.int32),
        logprob=np.array([-0.5, -0.0], np.float32), topk_ids=np.array([[1], [2]], np.int32),
        topk_logprobs=np.array([[-0.5], [-0.0]], np.float32),
    )  # fmt: skip
    assert judged_digest(a) == "3799a0912e094a5198490838898fcfb8a09f513e013af3c13dac13aab0a9f72c"


def test_duplicate_keys_have_no_digest():
    with pytest.raises(ComparisonError, match=r"1 request\(s\) of which each appears more than once: 'a'"):
        judged_digest(make_traces(("a", "a"), (1, 1)))
