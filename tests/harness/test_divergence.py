"""Sizes of a difference: ulp, nats, KL estimates, ties; and the pairs they are measured on."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_traces import copy_traces, make_traces, with_positions

from harness.compare import compare
from harness.compare.divergence import NEAR_TIE_GAP, count_flips, estimate_kl, tie_class
from harness.compare.pairs import Pairs, Places, candidate_pairs, ulp_distance
from harness.traces import NO_TOKEN

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def as_f32(*values) -> np.ndarray:
    return np.array(values, dtype=np.float32)


@given(FINITE, st.integers(0, 50))
def test_ulp_distance_counts_steps_along_the_floats(value, steps):
    end = np.float32(value)
    with np.errstate(over="ignore"):
        for _ in range(steps):
            end = np.nextafter(end, np.float32(np.inf))
    if not np.isfinite(end):
        return
    crossed = np.signbit(as_f32(value)[0]) and not np.signbit(end) and steps > 0  # both zeros count
    assert int(ulp_distance(as_f32(value), as_f32(end))[0]) == steps + crossed


@given(FINITE, FINITE)
def test_ulp_distance_is_symmetric_and_zero_for_equal_bits_only(a, b):
    there, back = ulp_distance(as_f32(a), as_f32(b)), ulp_distance(as_f32(b), as_f32(a))
    assert there == back
    assert (int(there[0]) == 0) == (as_f32(a).tobytes() == as_f32(b).tobytes())


def test_zeros_are_one_apart():
    assert ulp_distance(as_f32(-0.0), as_f32(0.0)).tolist() == [1]


@pytest.mark.parametrize(
    ("gap", "expected"),
    [(0.0, "tie"), (1e-7, "near tie"), (NEAR_TIE_GAP, "near tie"), (0.26, "confident flip"), (None, "unknown"),
     (math.nan, "unknown")],
)  # fmt: skip
def test_tie_classes(gap, expected):
    assert tie_class(gap) == expected


def test_flips_are_counted_by_class():
    gaps = np.array([0.0, 0.1, 0.1, 3.0, np.nan])
    assert dict(count_flips(gaps)) == {"tie": 1, "near tie": 2, "confident flip": 1, "unknown": 1}


def test_kl_estimates_against_a_plain_sum():
    reference, variant = as_f32(-1.0, -2.0), as_f32(-1.5, -1.25)
    pairs = Pairs(reference=reference, variant=variant, compared=2)
    k1, k3 = estimate_kl(pairs, 10)
    d = [-0.5, 0.75]
    assert k1 == pytest.approx(-sum(d) / 10)
    assert k3 == pytest.approx(sum(math.exp(x) - 1 - x for x in d) / 10)
    assert estimate_kl(pairs, 0) == (None, None)
    infinite = Pairs(reference=reference, variant=as_f32(-1, -np.inf), compared=2)
    assert estimate_kl(infinite, 10) == (None, None)


def planted():
    """Reference and variant that differ at request b, position 1: its logprob and one candidate."""
    a = make_traces(("a", "b"), (3, 4))
    a.positions.topk_logprobs[4] = [-0.5, -0.75, -3.0]
    a.positions.logprob[4] = -0.5
    return a, copy_traces(a)


def test_sizes_of_the_first_divergence_and_of_all():
    a, b = planted()
    b.positions.logprob[4] = -0.625
    b.positions.topk_logprobs[4, 2] = np.nextafter(np.float32(-3.0), np.float32(0))
    b.positions.topk_logprobs[6, 0] -= 4
    result = compare(a, b, "topk", "golden")
    assert result.first.max_delta == 0.125
    assert result.first.max_ulp == 2**21  # a quarter of the way from 0.5 to 1: 2**23 floats lie between
    assert result.first.gap == 0.25
    assert result.magnitude.max_delta == pytest.approx(4.0)
    assert result.magnitude.pairs == 3
    assert result.magnitude.kl_k1 == pytest.approx(0.125 / 7)
    assert result.magnitude.first_flip is None
    assert result.first.fields == ("logprob", "topk_logprobs")


def test_candidates_are_paired_by_id_whatever_their_rank():
    a, b = planted()
    b.positions.topk_ids[4] = a.positions.topk_ids[4][[1, 0, 2]]
    b.positions.topk_logprobs[4] = as_f32(-0.5, -0.5625, -3.0)  # ids 1, 0, 2: moved by 0.25, 0.0625 and 0
    result = compare(a, b, "topk", "golden")
    assert result.first.max_delta == 0.25
    assert result.first.fields == ("topk_ids", "topk_logprobs")


def test_equal_distributions_measure_zero_and_padding_is_no_pair():
    a, b = planted()
    b.positions.pick[4] += 1
    result = compare(a, b, "topk", "golden")
    assert (result.first.max_ulp, result.first.max_delta, result.magnitude.pairs) == (0, 0.0, 0)
    for side in (a, b):
        side.positions.topk_ids[4, 2], side.positions.topk_logprobs[4, 2] = NO_TOKEN, np.nan
    places = Places(reference=np.array([4]), variant=np.array([4]))
    assert candidate_pairs(a.positions, b.positions, places).compared == 2
    b.positions.topk_ids[4] = b.positions.topk_ids[4][[1, 0, 2]]
    assert candidate_pairs(a.positions, b.positions, places).compared == 2


def test_flip_at_a_tie_and_its_place():
    a, b = planted()
    a.positions.topk_logprobs[4, 1] = b.positions.topk_logprobs[4, 1] = -0.5
    b.positions.pick[4] = a.positions.topk_ids[4, 1]
    b.positions.pick[6] += 1
    result = compare(a, b, "topk", "golden")
    flip = result.magnitude.first_flip
    assert (flip.key.id, flip.position, flip.gap, flip.tie) == ("b", 1, 0.0, "tie")
    assert (flip.reference_id, flip.variant_id) == (a.positions.pick[4], b.positions.pick[4])
    assert sum(dict(result.magnitude.flips).values()) == 2
    assert (result.first.reference, result.first.variant) == (str(a.positions.pick[4]), str(b.positions.pick[4]))


def test_without_a_second_candidate_the_tie_is_unknown():
    a, b = planted()
    a.positions.topk_ids[4, 1:], a.positions.topk_logprobs[4, 1:] = NO_TOKEN, np.nan
    b.positions.topk_ids[4, 1:], b.positions.topk_logprobs[4, 1:] = NO_TOKEN, np.nan
    b.positions.pick[4] += 1
    assert compare(a, b, "topk", "golden").magnitude.first_flip.tie == "unknown"
    bare = with_positions(a, topk_ids=None, topk_logprobs=None)
    assert (
        compare(bare, with_positions(b, topk_ids=None, topk_logprobs=None), "logprobs", "golden").first.tie == "unknown"
    )


def test_values_that_are_not_finite_are_counted_apart():
    a, b = planted()
    b.positions.logprob[4] = np.nan
    result = compare(a, b, "logprobs", "golden")
    assert result.magnitude.not_finite == 1
    assert result.magnitude.kl_k1 is None
    assert result.first.variant == "nan (0x7fc00000)"


def test_other_tokens_logprobs_are_never_subtracted():
    a, b = planted()
    b.positions.token[4] += 1
    b.positions.logprob[4] = -9.0
    result = compare(with_positions(a, topk_ids=None, topk_logprobs=None),
                     with_positions(b, topk_ids=None, topk_logprobs=None), "logprobs", "natural")  # fmt: skip
    assert result.magnitude.max_delta is None
    assert result.first.max_ulp is None
