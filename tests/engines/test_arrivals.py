"""Arrivals: when each is due, in which order, and which schedules can never complete."""

import pytest

from engines.arrivals import Arrivals, Standing
from harness.errors import EngineError
from harness.schedule import Arrival, Schedule


def make(*arrivals, requests=None):
    schedule = Schedule(name="s", arrivals=arrivals)
    return Arrivals(schedule, requests or [arrival.request for arrival in arrivals])


def names(arrivals):
    return [arrival.request for arrival in arrivals]


def test_arrivals_by_step_come_once_and_in_the_order_of_the_schedule():
    arrivals = make(Arrival(request="c", at_step=2), Arrival(request="a", at_step=1), Arrival(request="b", at_step=1))
    assert names(arrivals.take_due(0, {})) == []
    assert names(arrivals.take_due(1, {})) == ["a", "b"]
    assert arrivals.pending
    assert names(arrivals.take_due(5, {})) == ["c"]
    assert not arrivals.pending
    assert arrivals.take_due(9, {}) == []


def test_an_arrival_waits_for_tokens_of_another():
    arrivals = make(Arrival(request="a"), Arrival(request="b", after="a", after_tokens=3))
    assert names(arrivals.take_due(0, {})) == ["a"]
    assert names(arrivals.take_due(9, {"a": Standing(2, finished=False)})) == []
    assert names(arrivals.take_due(9, {"a": Standing(3, finished=False)})) == ["b"]


def test_an_arrival_waits_for_the_end_of_another():
    arrivals = make(Arrival(request="b", after="a"), Arrival(request="a"))
    assert names(arrivals.take_due(0, {})) == ["a"]
    assert names(arrivals.take_due(1, {"a": Standing(99, finished=False)})) == []
    assert names(arrivals.take_due(2, {"a": Standing(99, finished=True)})) == ["b"]


def test_a_request_that_ends_early_releases_whoever_waits_for_more_of_its_tokens():
    arrivals = make(Arrival(request="a"), Arrival(request="b", after="a", after_tokens=30))
    arrivals.take_due(0, {})
    assert names(arrivals.take_due(1, {"a": Standing(2, finished=True)})) == ["b"]


def test_an_idle_engine_moves_on_to_the_next_step():
    arrivals = make(Arrival(request="a", at_step=7), Arrival(request="b", at_step=4), Arrival(request="c", after="a"))
    assert arrivals.next_step() == 4


IMPOSSIBLE = [
    ((Arrival(request="a"), Arrival(request="a")), ["a"], "'a' arrives more than once"),
    ((Arrival(request="a"),), ["a", "b"], "request 'b' never arrives"),
    ((Arrival(request="a"), Arrival(request="x")), ["a"], "'x' arrives but there is no such request"),
    ((Arrival(request="a", after="z"),), ["a"], "'a' waits for 'z', which never arrives"),
    ((Arrival(request="a", after="a"),), ["a"], "'a' waits for itself"),
    (
        (Arrival(request="a", after="b"), Arrival(request="b", after="c"), Arrival(request="c", after="b")),
        ["a", "b", "c"],
        "'b' waits for itself in the end; 'c' waits for itself in the end",
    ),
]


@pytest.mark.parametrize(("arrivals", "requests", "message"), IMPOSSIBLE, ids=[row[2][:24] for row in IMPOSSIBLE])
def test_a_schedule_that_can_never_complete_is_an_error(arrivals, requests, message):
    with pytest.raises(EngineError, match="schedule 's' can never complete: ") as caught:
        make(*arrivals, requests=requests)
    assert message in str(caught.value)


def test_nothing_left_to_release_the_rest_is_an_error_that_says_who_waits():
    arrivals = make(Arrival(request="a"), Arrival(request="b", after="a"))
    arrivals.take_due(0, {})
    with pytest.raises(EngineError, match="nothing runs and 'b' still waits for 'a'"):
        arrivals.next_step()
