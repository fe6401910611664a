"""Serving by the clock at an endpoint: the same answers, tokens stamped when they arrived, failures told."""

import threading

import pytest
from endpoint_cases import endpoint, generate, request
from scripted import Model, Reply, scripted

from harness.cost.audit import audit_cache
from harness.cost.drive import drive
from harness.cost.load import closed_loop, copies
from harness.cost.serve import timings_of
from harness.digest import judged_keys, request_digests
from harness.engine import Timed
from harness.errors import EngineError

REQUESTS = (request("a"), request("b", ids=(4, 5)), request("c", ids=(6, 7, 8, 9)))


def timed(engine, concurrency, count):
    load = closed_loop([one.id for one in REQUESTS], concurrency, count)
    served = copies(load, REQUESTS)
    session = engine.open_timed(served)
    return timings_of(drive(session, load, served), session.finish())


def drain(session):
    """Takes what comes until a request is over."""
    while not any(emission.finished for emission in session.advance(None)):
        pass


def test_answers_by_the_clock_are_those_of_the_untimed_run():
    with scripted(Model()) as server, endpoint(server.url) as engine:
        assert isinstance(engine, Timed)
        traces = generate(engine, *REQUESTS)
        reference = dict(zip(judged_keys(traces), request_digests(traces), strict=True))
        found = timed(engine, 2, 7)
    assert [one.request for one in found] == ["a", "b", "c", "a", "b", "c", "a"]
    assert all(one.judged == reference[one.request, 0] for one in found)
    assert all(list(one.token_s) == sorted(one.token_s) and one.token_s[-1] == one.finish_s for one in found)
    assert all(one.submitted_s < one.token_s[0] for one in found)


def test_the_servers_steps_are_not_claimed_to_be_seen():
    with scripted(Model()) as server, endpoint(server.url) as engine:
        found = timed(engine, 1, 2)
    assert audit_cache(found, cache_is_off=True).shown is False


def test_a_failed_request_ends_the_session_and_leaves_no_thread():
    answer = Model()
    broken = []

    def failing(call):
        return Reply(status=500, kind="text/plain", parts=[b"out of luck"]) if broken else answer(call)

    with scripted(failing) as server, endpoint(server.url) as engine:
        broken.append(True)
        session = engine.open_timed(REQUESTS)
        session.submit("a")
        with pytest.raises(EngineError, match="'a'"):
            drain(session)
    assert not [one for one in threading.enumerate() if one.name == "samebits-endpoint"]


def test_a_request_is_handed_over_once():
    with scripted(Model()) as server, endpoint(server.url) as engine:
        session = engine.open_timed(REQUESTS[:1])
        session.submit("a")
        with pytest.raises(EngineError, match="submitted twice"):
            session.submit("a")
        drain(session)
        session.finish()
