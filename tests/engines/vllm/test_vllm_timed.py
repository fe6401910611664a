"""Serving by the clock, on a scripted engine with vLLM's interface. Nothing here needs vLLM."""

from types import SimpleNamespace

import pytest
from test_vllm_run import ABLE, CORPUS, Scripted, make_work, traces_of

from engines import vllm_timed, vllm_work
from engines.vllm_timed import VllmSession
from engines.vllm_traces import write_traces
from harness.cost.drive import drive
from harness.cost.load import closed_loop, copies
from harness.cost.serve import timings_of
from harness.digest import judged_keys, request_digests
from harness.errors import EngineDied, EngineError


@pytest.fixture(autouse=True)
def plain_parameters(monkeypatch):
    """vLLM's own class of parameters is not there; what matters here is max_tokens."""

    def parameters(request, *_rest):
        return SimpleNamespace(max_tokens=request.sampling.max_tokens)

    for module in (vllm_timed, vllm_work):
        monkeypatch.setattr(module, "parameters_of", parameters)


def open_session(engine, requests):
    write = lambda served: write_traces(served, engine.log, {}, speculative=False)  # noqa: E731
    return VllmSession(engine, engine.log, requests, ABLE, write)


def test_answers_by_the_clock_are_those_of_the_untimed_run():
    load = closed_loop([request.id for request in CORPUS.requests], 2, 5)
    requests = copies(load, CORPUS.requests)
    session = open_session(Scripted(), requests)
    found = timings_of(drive(session, load, requests), session.finish())
    traces = traces_of(Scripted(), make_work("alone"))
    reference = dict(zip(judged_keys(traces), request_digests(traces), strict=True))
    assert len(found) == 5
    assert all(one.judged == reference[one.request, 0] for one in found)
    assert all(one.computed_tokens == one.prompt_tokens + len(one.token_s) - 1 for one in found)
    assert all(list(one.token_s) == sorted(one.token_s) and one.token_s[-1] == one.finish_s for one in found)


def test_what_breaks_in_a_step_is_the_end_of_the_engine():
    session = open_session(Scripted(breaks_at=2), CORPUS.requests)
    session.submit(CORPUS.requests[0].id)
    session.advance(None)
    with pytest.raises(EngineDied, match="failed in a step"):
        session.advance(None)


def test_a_request_is_handed_over_once():
    session = open_session(Scripted(), CORPUS.requests)
    session.submit(CORPUS.requests[0].id)
    with pytest.raises(EngineError, match="submitted twice"):
        session.submit(CORPUS.requests[0].id)


def test_without_work_it_waits_no_longer_than_until_the_next_arrival():
    session = open_session(Scripted(), CORPUS.requests)
    begun = session.now()
    assert session.advance(begun) == []
    assert session.advance(begun + 0.01) == []
    assert session.now() >= begun + 0.01
