"""Which requests are judged, how two captures line up, and which tables are refused."""

from __future__ import annotations

import numpy as np
import pytest
from made_traces import make_traces, reorder, with_positions, with_requests

from harness.judged import ComparisonError, RequestKey, align, find_judged


def test_companions_are_left_out_and_positions_counted():
    found = find_judged(make_traces(("a", "x", "b"), (3, 4, 2), companions=[0, 1, 0]))
    assert found.keys == (RequestKey("a", 0), RequestKey("b", 0))
    assert found.starts.tolist() == [0, 7]
    assert found.offsets.tolist() == [0, 3, 5]
    assert [found.locate(n) for n in range(5)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def test_alignment_is_by_key_in_the_references_order():
    a = make_traces(("a", "b", "b"), (1, 2, 3), samples=[0, 0, 1])
    found = align(a, reorder(a, [2, 0, 1]))
    assert found.keys == (RequestKey("a", 0), RequestKey("b", 0), RequestKey("b", 1))
    assert found.variant.starts.tolist() == [3, 4, 0]
    assert found.variant.lengths.tolist() == [1, 2, 3]
    assert str(found.keys[2]) == "'b' sample 1"


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (make_traces(("a",), (3,)), "variant: 1 request.s. of which each is missing: 'b'"),
        (make_traces(("a", "b", "c"), (3, 2, 1)), "variant: 1 request.s. of which each is not in the reference: 'c'"),
        (make_traces(("a", "c"), (3, 2)), "is missing: 'b'"),
        (make_traces(("a", "b", "b"), (3, 2, 2)), "appears more than once: 'b'"),
        (make_traces(("a", "b"), (3, 0)), "has no generated position: 'b'"),
        (make_traces(("a", "b"), (3, 2), companions=[0, 1]), "is missing: 'b'"),
        (make_traces(("a", "b"), (3, 2), companions=[1, 1]), "no judged request"),
        (make_traces(("a", "b"), (3, 2), prompts=[5, 6]), "another number of prompt tokens: 'b'"),
        (make_traces(("a", "b"), (3, 2), prompts=[4, 5]), "another number of prompt tokens: 'a'"),
        (make_traces(("a", "b"), (3, 2), samples=[0, 1]), "is missing: 'b'"),
    ],
)
def test_requests_that_do_not_line_up(variant, message):
    with pytest.raises(ComparisonError, match=message):
        align(make_traces(("a", "b"), (3, 2)), variant)


def test_many_missing_requests_are_counted_and_a_few_named():
    whole = make_traces(tuple("abcdefgh"), (1,) * 8)
    with pytest.raises(ComparisonError, match=r"7 request\(s\) .* 'b', 'c', 'd', 'e', 'f' and 2 more"):
        align(whole, make_traces(("a",), (1,)))


BASE = make_traces(("a", "b"), (3, 2))


@pytest.mark.parametrize(
    ("traces", "message"),
    [
        (with_positions(BASE, logprob=BASE.positions.logprob.astype(np.float64)), "logprob: expected float32"),
        (
            with_positions(BASE, token=BASE.positions.token[:-1]),
            r"token: expected int32 of shape \(5,\), found int32 of \(4,\)",
        ),
        (with_positions(BASE, pick=BASE.positions.pick.astype(np.int64)), "pick: expected int32"),
        (with_positions(BASE, topk_logprobs=None), "must come together"),
        (
            with_positions(BASE, topk_logprobs=BASE.positions.topk_logprobs[:, :1]),
            r"topk_logprobs: expected .*\(5, 3\)",
        ),
        (with_positions(BASE, topk_ids=BASE.positions.topk_ids[:, 0]), "topk_ids: expected"),
        (with_positions(BASE, logits_digest=BASE.positions.logits_digest[:, :1]), "logits_digest: expected uint64"),
        (with_requests(BASE, length=np.array([6, -1])), "request 'b' has a negative length"),
        (with_requests(BASE, finish_reason=("stop",)), "2 requests but 1 finish reasons"),
        (with_requests(BASE, companion=np.zeros(3, dtype=np.bool_)), "companion: expected bool"),
    ],
)
def test_malformed_tables_are_refused(traces, message):
    with pytest.raises(ComparisonError, match=message):
        find_judged(traces)
