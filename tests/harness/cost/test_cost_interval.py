"""Intervals keep their level with few pairs, and the A/A rule keeps noise from being called a cost."""

import itertools
import math

import numpy as np
import pytest
from cost_making import arms, design, scripted
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cost.comparison import PRIMARY, Estimate, State, compare
from harness.cost.interval import Interval, interval, simultaneous
from harness.cost.session import run_session
from harness.errors import UsageError

SESSIONS = 20
values = st.lists(st.floats(-1, 1).map(lambda x: round(x, 6)), min_size=5, max_size=5)


def autocorrelated(rng, spread=0.04, memory=0.9):
    now = rng.normal(0, spread)
    while True:
        yield now
        now = memory * now + rng.normal(0, spread * math.sqrt(1 - memory**2))


def drifting(rng, spread=0.02, slope=0.01):
    for number in itertools.count():
        yield slope * number + rng.normal(0, spread)


def independent(rng, spread=0.04):
    while True:
        yield rng.normal(0, spread)


def spiking(rng, spread=0.01):
    while True:
        yield rng.normal(0, spread) + (0.3 if rng.random() < 0.08 else 0.0)


NOISES = {"independent": independent, "autocorrelated": autocorrelated, "drifting": drifting, "spiking": spiking}


@pytest.mark.parametrize("name", NOISES)
def test_identical_arms_are_not_resolved_in_19_of_20_sessions(name):
    states = [
        compare(run_session(design(), arms(["invariant=true"], ["invariant=true"]),
                            scripted(NOISES[name](np.random.default_rng(seed))), lambda _text: None)).state
        for seed in range(SESSIONS)
    ]  # fmt: skip
    assert states.count(State.NOT_RESOLVED) >= 19, states


@pytest.mark.parametrize("name", ["independent", "autocorrelated", "drifting"])
def test_a_planted_slowdown_of_a_fifth_is_resolved(name):
    for seed in range(5):
        noise = NOISES[name](np.random.default_rng(seed), spread=0.02)
        found = compare(run_session(design(), arms(["invariant=true"], ["invariant=true"], slowed=1.2), scripted(noise),
                                    lambda _text: None))  # fmt: skip
        assert found.state is State.RESOLVED, (seed, found.sentence)
        assert math.exp(found.primary.effect.low) < 1.2 < math.exp(found.primary.effect.high)


@pytest.mark.parametrize("draw", [
    lambda rng: rng.normal(0, 1, 5), lambda rng: rng.standard_t(3, 5), lambda rng: rng.uniform(-1, 1, 5),
])  # fmt: skip
def test_an_interval_holds_the_truth_about_as_often_as_it_says(draw):
    rng = np.random.default_rng(7)
    missed = sum(interval(draw(rng).tolist()).excludes_zero for _ in range(300))
    assert missed <= 300 * 0.085


def test_simultaneous_intervals_hold_together():
    rng = np.random.default_rng(11)
    missed = 0
    for _ in range(150):
        common = rng.normal(0, 1, 5)
        rows = [(common + rng.normal(0, 1, 5)).tolist() for _ in range(8)]
        missed += any(found.excludes_zero for found in simultaneous(rows))
    assert missed <= 150 * 0.1


def test_the_percentile_bootstrap_would_not_do():
    """Why the plain method is not used: it misses the truth far more often than 1 in 20."""
    rng = np.random.default_rng(7)
    resamples = np.array(list(itertools.product(range(5), repeat=5)))
    missed = 0
    for _ in range(300):
        means = rng.normal(0, 1, 5)[resamples].mean(axis=1)
        low, high = np.quantile(means, [0.025, 0.975])
        missed += low > 0 or high < 0
    assert missed > 300 * 0.1


@settings(deadline=None)
@given(values, st.floats(-1, 1))
def test_a_shift_of_every_pair_shifts_the_interval(row, shift):
    moved, still = interval([value + shift for value in row]), interval(row)
    assert moved.mean == pytest.approx(still.mean + shift, abs=1e-9)
    assert moved.high - moved.low == pytest.approx(still.high - still.low, rel=1e-6, abs=1e-9)


@settings(deadline=None)
@given(values, st.randoms(use_true_random=False))
def test_the_order_of_pairs_does_not_matter(row, random):
    shuffled = row[:]
    random.shuffle(shuffled)
    assert interval(shuffled) == pytest.approx(interval(row), abs=1e-9)


@settings(deadline=None)
@given(st.lists(values, min_size=2, max_size=4))
def test_simultaneous_intervals_are_never_narrower_than_single_ones(rows):
    for row, found in zip(rows, simultaneous(rows), strict=True):
        single = interval(row)
        assert found.low <= single.low + 1e-9
        assert found.high >= single.high - 1e-9


ESTIMATE = {"metric": PRIMARY, "load": "", "on": 1.0, "off": 1.0, "pairs": (1.05, 1.06)}


@pytest.mark.parametrize(("effect", "identical", "state"), [
    (Interval(0.05, 0.01, 0.09), Interval(0.0, -0.02, 0.02), State.RESOLVED),
    (Interval(-0.05, -0.09, -0.01), Interval(0.0, -0.02, 0.02), State.RESOLVED),
    (Interval(0.05, -0.01, 0.11), Interval(0.0, -0.02, 0.02), State.NOT_RESOLVED),  # its own interval holds 1
    (Interval(0.05, 0.01, 0.09), Interval(0.0, -0.06, 0.06), State.NOT_RESOLVED),  # identical arms may show as much
    (Interval(0.05, 0.01, 0.09), Interval(-0.04, -0.06, -0.02), State.NOT_RESOLVED),  # the sign does not matter
    (Interval(0.0, 0.0, 0.0), Interval(0.0, 0.0, 0.0), State.NOT_RESOLVED),
])  # fmt: skip
def test_an_effect_must_exceed_its_own_interval_and_that_of_identical_arms(effect, identical, state):
    assert Estimate(**ESTIMATE, effect=effect, identical=identical).state is state


def test_what_never_varied_is_the_same():
    still = {**ESTIMATE, "pairs": (1.0, 1.0)}
    assert Estimate(**still, effect=Interval(0, 0, 0), identical=Interval(0, 0, 0)).state is State.SAME


def test_a_metric_that_never_varies_has_no_width():
    assert interval([0.25] * 5) == Interval(0.25, 0.25, 0.25)
    fixed, varied = simultaneous([[0.25] * 5, [0.1, 0.2, 0.3, 0.4, 0.5]])
    assert fixed == Interval(0.25, 0.25, 0.25)
    assert varied.low < 0.3 < varied.high


def test_more_pairs_than_can_be_enumerated_use_draws_that_repeat():
    row = np.random.default_rng(3).normal(0.2, 0.1, 9).tolist()
    assert interval(row) == interval(row)
    assert interval(row).low < 0.2 < interval(row).high


@pytest.mark.parametrize("rows", [[[0.1] * 4], [[0.1] * 5, [0.1] * 6]])
def test_too_few_or_uneven_pairs_are_refused(rows):
    with pytest.raises(UsageError, match="at least 5"):
        simultaneous(rows)
