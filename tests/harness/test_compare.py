"""The comparator: reflexive, symmetric, and no bit of a judged column can change unseen or be found elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
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

from harness.compare import Comparison, compare, strongest_rule
from harness.engine import RULES
from harness.judged import ComparisonError, find_judged
from harness.traces import NO_TOKEN

GOLDEN_COLUMNS = ("pick", "logprob", "topk_ids", "topk_logprobs", "logits_digest")


def differing(result: Comparison) -> dict[str, int]:
    return {count.field: count.differing for count in result.fields if count.differing}


@given(captures(), st.sampled_from(["natural", "golden"]))
def test_reflexive(traces, replay):
    result = compare(traces, copy_traces(traces), strongest_rule(traces, traces), replay)
    judged = find_judged(traces)
    assert result.outcome == "same"
    assert result.positions == judged.positions == int(result.compared_mask.sum())
    assert result.elements >= 3 * result.positions
    assert (result.incomparable, result.first, result.differing_requests) == (0, None, ())
    assert result.different_mask.sum() == 0
    assert result.magnitude.pairs == 0


@given(captures(), st.randoms(use_true_random=False))
def test_order_of_submission_does_not_matter(traces, random):
    order = list(range(len(traces.requests.id)))
    random.shuffle(order)
    assert compare(traces, reorder(traces, order), strongest_rule(traces, traces), "natural").outcome == "same"


@given(st.data())
@settings(max_examples=300)
def test_every_flipped_bit_is_found_where_it_is(data):
    traces = data.draw(captures())
    flip = data.draw(flips(traces, GOLDEN_COLUMNS))
    order = data.draw(st.permutations(range(len(traces.requests.id))))
    changed = reorder(flip_bit(traces, flip), order)
    rule = strongest_rule(traces, traces)
    if leaves_nothing_to_compare(flip_bit(traces, flip)):
        with pytest.raises(ComparisonError):
            compare(traces, changed, rule, "golden")
        return
    result = compare(traces, changed, rule, "golden")
    number = sum(int(traces.requests.length[j]) for j in judged_rows(traces) if j < flip.request) + flip.position
    assert result.outcome == "different"
    assert np.flatnonzero(result.different_mask).tolist() == [number]
    assert (result.first.request, result.first.position) == (traces.requests.id[flip.request], flip.position)
    field = "tensors" if flip.column == "logits_digest" else flip.column
    assert differing(result) == {field: 1}
    assert result.first.fields == (field,)


def leaves_nothing_to_compare(traces) -> bool:
    """The flip made a first candidate or a pick read as absent."""
    return bool((traces.positions.topk_ids[:, 0] == NO_TOKEN).any() or (traces.positions.pick == NO_TOKEN).any())


@given(st.data())
def test_flipped_bits_of_companions_are_not_judged(data):
    traces = data.draw(captures())
    companions = [j for j in range(len(traces.requests.id)) if traces.requests.companion[j]]
    if not companions:
        return
    as_judged = with_requests(traces, companion=~traces.requests.companion)
    changed = flip_bit(traces, data.draw(flips(as_judged, ("token", *GOLDEN_COLUMNS))))
    assert compare(traces, changed, strongest_rule(traces, traces), "natural").outcome == "same"


@given(st.data(), st.sampled_from(["natural", "golden"]))
def test_symmetric_in_outcome_and_first_place(data, replay):
    a = data.draw(captures())
    columns = GOLDEN_COLUMNS if replay == "golden" else ("token", *GOLDEN_COLUMNS)
    b = flip_bit(a, data.draw(flips(a, columns)))
    rule = strongest_rule(a, b)
    if leaves_nothing_to_compare(b):
        return
    forth, back = compare(a, b, rule, replay), compare(b, a, rule, replay)
    assert forth.outcome == back.outcome == "different"
    assert (forth.first.key, forth.first.position) == (back.first.key, back.first.position)
    assert differing(forth) == differing(back)
    assert (forth.positions, forth.incomparable) == (back.positions, back.incomparable)


@pytest.mark.parametrize(
    ("column", "weakest"),
    [("token", "text"), ("pick", "text"), ("logprob", "logprobs"), ("topk_ids", "topk"), ("topk_logprobs", "topk"),
     ("logits_digest", "tensors")],
)  # fmt: skip
def test_rules_are_cumulative(column, weakest):
    traces = make_traces()
    values = getattr(traces.positions, column).copy()
    raw = values.view(np.uint64 if values.dtype.itemsize == 8 else np.uint32)
    raw.reshape(-1)[-1] ^= raw.dtype.type(1)
    changed = with_positions(traces, **{column: values})
    outcomes = [compare(traces, changed, rule, "natural").outcome for rule in RULES]
    first = RULES.index(weakest)
    assert outcomes == ["same"] * first + ["different"] * (len(RULES) - first)


def test_elements_count_ids_bits_and_digests():
    traces = make_traces(("a",), (4,), width=3)
    by_rule = {rule: compare(traces, traces, rule, "natural").elements for rule in RULES}
    assert by_rule == {"text": 4, "tokens": 4, "logprobs": 8, "topk": 8 + 24, "tensors": 8 + 24 + 4}


def test_padding_counts_no_elements():
    traces = make_traces(("a",), (4,), width=3)
    traces.positions.topk_ids[1, 2], traces.positions.topk_logprobs[1, 2] = NO_TOKEN, np.nan
    assert compare(traces, traces, "topk", "natural").elements == 4 + 4 + 2 * 11


def test_forced_ids_count_as_zero_comparisons():
    traces = make_traces(("a",), (4,))
    result = compare(traces, traces, "tokens", "golden")
    assert [count.field for count in result.fields if count.unit == "positions"] == ["pick"]
    assert result.elements == 4


def test_golden_variant_that_left_the_forced_path_is_an_error():
    traces = make_traces(("a", "b"), (3, 3))
    token = traces.positions.token.copy()
    token[4] += 1
    with pytest.raises(ComparisonError, match=r"request 'b' position 1: the forced path has token \d+, the engine"):
        compare(traces, with_positions(traces, token=token), "tokens", "golden")


def test_natural_replay_stops_at_the_first_flip_of_each_request():
    traces = make_traces(("a", "b"), (5, 4))
    token, logprob = traces.positions.token.copy(), traces.positions.logprob.copy()
    token[[2, 3]] += 1
    logprob[[2, 4]] -= 1  # at the flip and after it: another token's, then another context's
    result = compare(traces, with_positions(traces, token=token, logprob=logprob), "logprobs", "natural")
    assert (result.positions, result.incomparable) == (7, 2)
    assert differing(result) == {"token": 1}
    counts = {count.field: count.compared for count in result.fields}
    assert (counts["token"], counts["logprob"]) == (7, 6)
    assert np.flatnonzero(~result.compared_mask).tolist() == [3, 4]
    assert (result.first.request, result.first.position, result.first.field) == ("a", 2, "token")


def test_a_shorter_variant_differs_where_it_ends():
    long, short = make_traces(("a", "b"), (4, 3)), make_traces(("a", "b"), (4, 3))
    keep = np.array([0, 1, 2, 4, 5, 6])
    columns = {name: getattr(short.positions, name)[keep] for name in ("token", *GOLDEN_COLUMNS)}
    short = with_requests(with_positions(short, **columns), length=np.array([3, 3]))
    for replay in ("natural", "golden"):
        result = compare(long, short, "tensors", replay)
        assert result.outcome == "different"
        assert differing(result) == {"length": 1}
        assert (result.positions, result.incomparable) == (6, 1)
        assert (result.first.request, result.first.position) == ("a", 3)
        assert (result.first.reference, result.first.variant) == ("4 tokens", "3 tokens")
        assert compare(short, long, "tensors", replay).first.position == 3


def test_finish_reasons_are_compared_under_every_rule():
    a = make_traces()
    b = with_requests(a, finish_reason=("length", "stop"))
    for rule in RULES:
        result = compare(a, b, rule, "natural")
        assert differing(result) == {"finish_reason": 1}
        assert (result.first.request, result.first.position) == ("b", 1)
        assert (result.first.reference, result.first.variant) == ("'length'", "'stop'")


def test_zeros_of_other_sign_and_nans_of_other_payload_differ():
    a = make_traces()
    a.positions.logprob[:] = 0.0
    b = copy_traces(a)
    b.positions.logprob[0] = -0.0
    assert differing(compare(a, b, "logprobs", "natural")) == {"logprob": 1}
    a.positions.logprob.view(np.uint32)[:] = 0x7FC00000
    c = copy_traces(a)
    assert compare(a, c, "logprobs", "natural").outcome == "same"
    c.positions.logprob.view(np.uint32)[3] = 0x7FC00001
    assert differing(compare(a, c, "logprobs", "natural")) == {"logprob": 1}


def test_a_longer_list_differs_and_padding_does_not():
    wide = make_traces(("a",), (3,), width=4)
    ids, values = wide.positions.topk_ids, wide.positions.topk_logprobs
    narrow = with_positions(wide, topk_ids=ids[:, :3].copy(), topk_logprobs=values[:, :3].copy())
    assert differing(compare(wide, narrow, "topk", "natural")) == {"topk_ids": 3, "topk_logprobs": 3}
    ids[:, 3], values[:, 3] = NO_TOKEN, np.nan
    assert compare(wide, narrow, "topk", "natural").outcome == "same"
    assert compare(narrow, wide, "topk", "natural").outcome == "same"


@pytest.mark.parametrize(
    ("rule", "columns", "field"),
    [("logprobs", ("logprob",), "logprob"), ("topk", ("topk_ids", "topk_logprobs"), "topk_ids"),
     ("tensors", ("logits_digest",), "tensors")],
)  # fmt: skip
def test_missing_evidence_is_an_error(rule, columns, field):
    whole = make_traces()
    lacking = with_positions(whole, **dict.fromkeys(columns))
    for a, b, side in (
        (whole, lacking, "variant"),
        (lacking, whole, "reference"),
        (lacking, lacking, "reference and variant"),
    ):
        with pytest.raises(ComparisonError, match=f"compares {field}, which the {side} does not carry"):
            compare(a, b, rule, "natural")


@pytest.mark.parametrize("side", ["reference", "variant"])
def test_positions_without_candidates_or_picks_are_errors(side):
    whole, lacking = make_traces(("a", "b"), (3, 2)), make_traces(("a", "b"), (3, 2))
    lacking.positions.topk_ids[4], lacking.positions.topk_logprobs[4] = NO_TOKEN, np.nan
    pair = (lacking, whole) if side == "reference" else (whole, lacking)
    with pytest.raises(ComparisonError, match=f"{side}: request 'b' position 1: lists no candidates"):
        compare(*pair, "topk", "natural")
    assert compare(*pair, "logprobs", "natural").outcome == "same"
    lacking = make_traces(("a", "b"), (3, 2))
    lacking.positions.pick[0] = NO_TOKEN
    pair = (lacking, whole) if side == "reference" else (whole, lacking)
    with pytest.raises(ComparisonError, match=f"{side}: request 'a' position 0: reports no pick"):
        compare(*pair, "tokens", "golden")


def test_a_list_of_no_candidates_at_all_is_an_error():
    empty = make_traces(("a", "b"), (3, 2), width=1)
    ids, values = empty.positions.topk_ids[:, :0], empty.positions.topk_logprobs[:, :0]
    empty = with_positions(empty, topk_ids=ids, topk_logprobs=values)
    with pytest.raises(ComparisonError, match="reference: request 'a' position 0: lists no candidates"):
        compare(empty, empty, "topk", "natural")
    assert compare(empty, empty, "logprobs", "natural").outcome == "same"


def test_text_is_told_by_ids_or_decoded():
    a = make_traces()
    b = copy_traces(a)
    b.positions.token[1] += 1
    by_ids = compare(a, b, "text", "natural")
    assert by_ids.outcome == "different"
    assert "stand in for the text" in by_ids.note
    same_text = compare(a, b, "text", "natural", decode=lambda ids: "x" * len(ids))
    assert (same_text.outcome, same_text.note) == ("same", "texts decoded from the ids were compared")
    assert compare(a, b, "text", "natural", decode=str).outcome == "different"


def test_differing_requests_are_listed_in_the_references_order():
    a = make_traces(("z", "m", "a"), (2, 2, 2))
    b = copy_traces(a)
    b.positions.logprob[[1, 4, 5]] -= 1
    result = compare(a, reorder(b, [2, 0, 1]), "logprobs", "natural")
    found = [(item.key.id, item.position, item.positions, item.fields) for item in result.differing_requests]
    assert found == [("z", 1, 1, ("logprob",)), ("a", 0, 2, ("logprob",))]


def test_long_runs_are_located_across_blocks():
    a = make_traces(("a", "b"), (30_000, 10_000), width=5)
    b = copy_traces(a)
    rows = [0, 13_107, 13_108, 29_999, 30_000, 39_999]
    for row in rows:
        b.positions.topk_logprobs[row, row % 5] -= 1
    result = compare(a, b, "topk", "golden")
    assert np.flatnonzero(result.different_mask).tolist() == rows
