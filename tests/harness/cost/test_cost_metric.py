"""Metrics from timings, and the audits of what was timed."""

import math

import numpy as np
import pytest
from cost_making import answer, timing
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cost.audit import audit_cache, check_equality
from harness.cost.capacity import Limits, find_capacity
from harness.cost.metric import BY_NAME, curve, is_thin, log_cost, quantile, serving_metrics, summary
from harness.cost.order import turns

TWO = (
    timing("a"),
    timing("b", due_s=0.01, submitted_s=0.015, finish_s=0.11, token_s=(0.05, 0.07, 0.09, 0.11), prompt_tokens=4),
)


def test_metrics_are_what_the_definitions_say():
    found = serving_metrics(TWO)
    assert found["seconds"] == pytest.approx(0.11)
    assert found["output_tokens_per_s"] == pytest.approx(8 / 0.11)
    assert found["prefill_tokens_per_s"] == pytest.approx(12 / 0.05)  # somebody waits from 0 to 0.02, and to 0.05
    assert found["decode_tokens_per_s"] == pytest.approx(6 / 0.09)  # from 0.02 to 0.11 without a gap
    assert found["ttft_mean"] == pytest.approx((0.02 + 0.04) / 2)
    assert found["itl_mean"] == pytest.approx((3 * 0.01 + 3 * 0.02) / 6)
    assert found["e2e_p50"] == pytest.approx(0.05)
    assert found["e2e_p99"] == pytest.approx(0.10)
    assert found["cache_hit_rate"] == 0.0


def test_a_request_waits_from_when_it_was_due():
    """A stall between the two counts in every metric that counts waiting."""
    stalled = [timing("a", due_s=0.0, submitted_s=0.015), timing("b", due_s=0.005, submitted_s=0.015)]
    found = serving_metrics(stalled)
    assert found["seconds"] == pytest.approx(0.05)
    assert found["prefill_tokens_per_s"] == pytest.approx(16 / 0.02)
    assert found["ttft_mean"] == pytest.approx((0.02 + 0.015) / 2)
    assert found["e2e_mean"] == pytest.approx((0.05 + 0.045) / 2)


def test_tokens_that_came_together_are_nothing_apart():
    found = serving_metrics([timing(token_s=(0.02, 0.05, 0.05, 0.05))])
    assert found["itl_p50"] == 0.0
    assert found["itl_p99"] == pytest.approx(0.03)


def test_the_far_tail_needs_ten_thousand_values():
    assert "p999" not in summary(np.arange(9_999.0))
    assert summary(np.arange(10_000.0))["p999"] == 9_989.0


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50), st.floats(0.01, 1))
def test_a_quantile_was_measured_and_enough_lies_below_it(found, share):
    values = np.array(found)
    value = quantile(values, share)
    assert value in found
    assert (values <= value).mean() >= share - 1e-9


def test_a_curve_ends_at_the_extremes():
    assert curve(np.array([3.0, 1.0, 2.0]))[:: len(curve(np.array([1.0]))) - 1] == [1.0, 3.0]


@pytest.mark.parametrize(("count", "name", "thin"), [(100, "p99", True), (1000, "p99", False), (20, "p50", False)])
def test_a_quantile_of_few_values_says_so(count, name, thin):
    assert is_thin(count, name) is thin


def test_a_cost_is_above_1_where_on_costs_more():
    assert log_cost(BY_NAME["seconds"], 2.0, 1.0) == pytest.approx(math.log(2))
    assert log_cost(BY_NAME["output_tokens_per_s"], 1.0, 2.0) == pytest.approx(math.log(2))
    assert log_cost(BY_NAME["peak_memory_bytes"], 2.0, 1.0) == pytest.approx(math.log(2))
    assert log_cost(BY_NAME["kv_capacity_tokens"], 1.0, 2.0) == pytest.approx(math.log(2))
    assert log_cost(BY_NAME["cache_hit_rate"], 0.5, 1.0) is None
    assert log_cost(BY_NAME["seconds"], 0.0, 1.0) is None


REFERENCE = {"a sample 0": answer(), "b sample 0": answer()}


def test_equal_answers_are_counted_to_the_bit():
    found = check_equality([timing("a"), timing("b"), timing("a", copy=1)], REFERENCE)
    assert (found.answers, found.same_bits, found.same_tokens, found.most_distinct) == (3, 3, 3, 1)
    assert found.whole


@pytest.mark.parametrize(("changes", "tokens"), [
    ({"judged": "z" * 64}, 1), ({"judged": "z" * 64, "tokens_only": "z" * 64}, 0), ({"request": "new"}, 0),
    ({"sample": 1}, 0),
])  # fmt: skip
def test_one_other_answer_is_found(changes, tokens):
    found = check_equality([timing("a"), timing(**{"request": "b", **changes})], REFERENCE)
    assert not found.whole
    assert found.same_bits == 1
    assert found.same_tokens == 1 + tokens
    assert len(found.first_different) == 1


def test_nothing_timed_is_not_equal():
    assert not check_equality([], REFERENCE).whole


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"cached_tokens": 4}, "4 prompt tokens came from a cache that is meant to be off"),
    ({"computed_tokens": 10}, "10 tokens computed, 11 needed"),
])  # fmt: skip
def test_an_answer_that_was_not_computed_is_found(changes, sentence):
    found = audit_cache([timing("a"), timing("b", **changes)], cache_is_off=True)
    assert len(found.faults) == 1
    assert sentence in found.faults[0]
    assert audit_cache([timing("b", **changes)], cache_is_off=False).faults == ()


def test_an_audit_says_whether_it_saw_steps():
    shown = audit_cache([timing("a")], cache_is_off=True)
    assert (shown.faults, shown.shown) == ((), True)
    assert "by the engine's own steps" in shown.sentence
    told = audit_cache([timing("a", computed_tokens=None)], cache_is_off=True)
    assert (told.faults, told.shown) == ((), False)
    assert "by the engine's word alone" in told.sentence
    assert audit_cache([], cache_is_off=True).faults != ()


def test_rounds_are_mirrored_so_that_a_straight_drift_cancels():
    order = turns(("off", "on", "off again"), 4, ("native",), 2)
    assert [turn.arm for turn in order[:8]] == ["off", "on", "off again", "native", "native", "off again", "on", "off"]
    assert [turn.arm for turn in order if turn.arm in ("off", "on")][:4] == ["off", "on", "on", "off"]
    compared = turns(("off", "on", "off again"), 4)
    means = [
        np.mean([place for place, turn in enumerate(compared) if turn.arm == arm]) for arm in ("off", "on", "off again")
    ]
    assert means[0] == means[1] == means[2]


def test_capacity_is_the_largest_rate_within_the_limits():
    probed = []

    def probe(rate):
        probed.append(rate)
        slow = 0.5 if rate > 3.0 else 0.02
        return [timing(token_s=(slow, slow + 0.01), finish_s=slow + 0.01)]

    found = find_capacity(probe, Limits(ttft_s=0.1, itl_s=None, requests=8), reached=2.0)
    assert found.bounded
    assert 2.8 < found.rate <= 3.0
    assert len(set(probed)) == len(probed)
    none = find_capacity(lambda _rate: [timing()], Limits(ttft_s=None, itl_s=0.001, requests=8), reached=2.0)
    assert none.rate == 0.0
    everything = find_capacity(lambda _rate: [timing()], Limits(ttft_s=1.0, itl_s=1.0, requests=8), reached=2.0)
    assert not everything.bounded
