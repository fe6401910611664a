"""Planted faults: each changes what it says, at its place, in a copy."""

from __future__ import annotations

import numpy as np
import pytest
from made_traces import make_traces, with_positions

from harness.claims import check_claims
from harness.compare.pairs import ulp_distance
from harness.faults import captures as faults
from harness.faults.captures import Place
from harness.specimen import alone_traces, together_traces
from harness.traces import NO_TOKEN, PositionTable, RequestTable

BASE = alone_traces()
AT = Place("c", -2, 1)
ROW = 5 + 3 + 4


def changed_cells(a, b) -> dict[str, list]:
    """Which cells of which columns differ in bits."""
    found = {}
    for table, names in (("positions", PositionTable.__slots__), ("requests", RequestTable.__slots__)):
        for name in names:
            left, right = getattr(getattr(a, table), name), getattr(getattr(b, table), name)
            if left is None or right is None:
                where = [] if left is right else ["a column came or went"]
            elif isinstance(left, tuple):
                where = [j for j, (x, y) in enumerate(zip(left, right, strict=True)) if x != y]
            else:
                raw = np.uint64 if left.dtype.itemsize == 8 else left.dtype
                raw = np.uint32 if left.dtype.itemsize == 4 else raw
                where = np.argwhere(left.view(raw) != right.view(raw)).tolist()
            if where:
                found[name] = where
    return found


@pytest.mark.parametrize(
    ("plant", "cells"),
    [
        (faults.ulp_in_logprob, {"logprob": [[ROW]]}),
        (faults.ulp_in_topk, {"topk_logprobs": [[ROW, 1]]}),
        (faults.wrong_candidate, {"topk_ids": [[ROW, 1]]}),
        (faults.wrong_pick, {"pick": [[ROW]]}),
        (faults.no_pick, {"pick": [[ROW]]}),
        (faults.wrong_token, {"token": [[ROW]]}),
        (faults.wrong_digest, {"logits_digest": [[ROW, 1]]}),
        (faults.swap_candidates, {"topk_ids": [[ROW, 1], [ROW, 2]], "topk_logprobs": [[ROW, 1], [ROW, 2]]}),
        (faults.swap_logits, {"topk_ids": [[ROW, 1], [ROW, 2]]}),
        (
            faults.no_candidates,
            {"topk_ids": [[ROW, k] for k in range(4)], "topk_logprobs": [[ROW, k] for k in range(4)]},
        ),
        (lambda t, p: faults.logprob_becomes(t, p, np.nan), {"logprob": [[ROW]]}),
        (lambda t, p: faults.topk_becomes(t, p, 0.0), {"topk_logprobs": [[ROW, 1]]}),
        (lambda t, p: faults.edit_request(t, p.request, finish_reason="stop"), {"finish_reason": [2]}),
        (lambda t, p: faults.edit_request(t, p.request, cached_tokens=3), {"cached_tokens": [[2]]}),
    ],
)
def test_one_fault_at_one_place_in_a_copy(plant, cells):
    before = alone_traces()
    planted = plant(BASE, AT)
    assert changed_cells(BASE, planted) == cells
    assert changed_cells(before, BASE) == {}, "the original was touched"


def test_an_ulp_is_one_ulp():
    moved = faults.ulp_in_logprob(BASE, AT).positions.logprob
    assert ulp_distance(moved, BASE.positions.logprob).sum() == 1


def test_swapped_logits_take_pick_and_logprob_along():
    place = Place("c", -2, 0)
    planted = faults.swap_logits(BASE, place).positions
    assert planted.pick[ROW] == BASE.positions.topk_ids[ROW, 1] == planted.topk_ids[ROW, 0]
    assert planted.token[ROW] == BASE.positions.token[ROW]
    assert planted.logprob[ROW] == BASE.positions.topk_logprobs[ROW, 1]


def test_tables_stay_whole_when_requests_go():
    together = together_traces()
    dropped = faults.recount(faults.drop_request(together, "b"))
    assert dropped.requests.id == ("companion", "a", "c", "d")
    assert check_claims(dropped) == ()
    assert len(dropped.positions.token) == len(together.positions.token) - 3
    twice = faults.duplicate_request(together, "b")
    assert twice.requests.id.count("b") == 2
    assert twice.positions.token[-3:].tolist() == together.positions.token[10:13].tolist()


@pytest.mark.parametrize("by", [1, 2])
def test_a_truncated_capture_does_not_contradict_itself(by):
    short = faults.truncate_request(together_traces(), "c", by)
    assert check_claims(short) == ()
    assert short.requests.length.tolist() == [5, 5, 3, 6 - by, 4]


def test_the_least_fault_of_each_rule_for_a_cells_control():
    for rule in ("logprobs", "topk", "tensors"):
        assert changed_cells(BASE, faults.plant_least(BASE, rule, "golden")) == {"logprob": [[0]]}
    bare = with_positions(BASE, logprob=None)
    assert faults.plant_least(bare, "tokens", "golden").positions.pick[0] != bare.positions.pick[0]
    assert faults.plant_least(bare, "text", "natural").positions.token[0] != bare.positions.token[0]
    beside = together_traces()
    changed = changed_cells(beside, faults.plant_least(beside, "topk", "golden"))
    assert changed == {"logprob": [[5]]}, "companions are not judged"


def test_shifted_positions_and_shorter_lists():
    moved = faults.shift_positions(BASE, "b").positions.token
    assert moved[5:8].tolist() == BASE.positions.token[[7, 5, 6]].tolist()
    assert (np.delete(moved, [5, 6, 7]) == np.delete(BASE.positions.token, [5, 6, 7])).all()
    assert faults.narrow_topk(BASE).positions.topk_ids.shape == (18, 3)
    assert faults.no_candidates(BASE, AT).positions.topk_ids[ROW].tolist() == [NO_TOKEN] * 4


def test_a_place_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match="request 'b' has 3 positions, there is no 3"):
        faults.ulp_in_logprob(BASE, Place("b", 3))
    bare = make_traces(digests=False)
    with pytest.raises(ValueError, match="carries no logits digests"):
        faults.wrong_digest(bare, Place("a"))
    with pytest.raises(ValueError, match="carries no top-k lists"):
        faults.ulp_in_topk(with_positions(bare, topk_ids=None, topk_logprobs=None), Place("a"))
