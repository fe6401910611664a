"""The bundled engine by the clock: the same bits as untimed, every token with its time."""

import dataclasses

import pytest

from engines.bundled_adapter import BundledAdapter
from harness.corpus import load_corpus, retokenise
from harness.cost.drive import drive
from harness.cost.load import closed_loop, copies
from harness.cost.serve import timings_of
from harness.digest import judged_keys, request_digests
from harness.engine import Timed, Work
from harness.errors import EngineError
from harness.schedules import build_schedule

ADAPTER = BundledAdapter()


@pytest.fixture(scope="module")
def requests():
    return retokenise(load_corpus("smoke"), ADAPTER.tokenizer("tiny")).requests[:4]


@pytest.fixture(scope="module")
def engine():
    return ADAPTER.start("tiny", {"threads": 1})


def untimed(engine, requests):
    work = Work(requests=requests, schedule=build_schedule("alone", [one.id for one in requests]), replay="natural",
                golden={}, logits_digests=False)  # fmt: skip
    traces = engine.generate(work, lambda _requests, _tokens: None)
    return dict(zip(judged_keys(traces), request_digests(traces), strict=True))


def timed(engine, requests, concurrency, count):
    load = closed_loop([one.id for one in requests], concurrency, count)
    served = copies(load, requests)
    session = engine.open_timed(served)
    return timings_of(drive(session, load, served), session.finish())


def test_answers_under_load_are_those_of_the_untimed_run(engine, requests):
    assert isinstance(engine, Timed)
    reference = untimed(engine, requests)
    found = timed(engine, requests, 3, 6)
    assert [(one.request, one.copy) for one in found][4:] == [(requests[0].id, 1), (requests[1].id, 1)]
    assert all(one.judged == reference[one.request, 0] for one in found)
    assert untimed(engine, requests) == reference  # a session leaves nothing behind


def test_times_are_in_order_and_steps_are_shown(engine, requests):
    for one in timed(engine, requests, 2, 4):
        assert one.due_s <= one.submitted_s < one.token_s[0]
        assert list(one.token_s) == sorted(one.token_s)
        assert one.token_s[-1] == one.finish_s
        assert one.computed_tokens == one.prompt_tokens + len(one.token_s) - 1
        assert one.cached_tokens == 0


def test_what_comes_from_the_prefix_cache_shows(requests):
    caching = ADAPTER.start("tiny", {"threads": 1, "prefix_cache": True, "page_size": 4})
    found = timed(caching, requests, 1, 8)
    assert sum(one.cached_tokens for one in found[:4]) < sum(one.cached_tokens for one in found[4:])
    assert any(one.computed_tokens < one.prompt_tokens + len(one.token_s) - 1 for one in found[4:])


@pytest.mark.parametrize("samples", ["together", "separate"])
def test_every_sample_is_timed(requests, samples):
    seeded = dataclasses.replace(requests[0].sampling, n=3, temperature=0.8, seed=1)
    request = dataclasses.replace(requests[0], sampling=seeded)
    found = timed(ADAPTER.start("tiny", {"threads": 1, "samples": samples}), (request,), 1, 2)
    assert [(one.copy, one.sample) for one in found] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    first = [one.token_s[0] for one in found[:3]]
    assert (len(set(first)) == 3) is (samples == "separate")


def test_tokens_of_a_verified_draft_come_together():
    repeats = retokenise(load_corpus("repeats"), ADAPTER.tokenizer("tiny")).requests[:2]
    found = timed(ADAPTER.start("tiny", {"threads": 1, "draft": "lookup"}), repeats, 2, 2)
    assert any(len(set(one.token_s)) < len(one.token_s) for one in found)
    reference = untimed(ADAPTER.start("tiny", {"threads": 1}), repeats)
    assert all(one.judged == reference[one.request, 0] for one in found)


def test_a_request_is_handed_over_once(engine, requests):
    session = engine.open_timed(requests)
    session.submit(requests[0].id)
    with pytest.raises(EngineError, match="submitted twice"):
        session.submit(requests[0].id)
    with pytest.raises(EngineError, match="not opened"):
        session.submit("stranger")
    while not any(emission.finished for emission in session.advance(None)):
        pass
    session.finish()


def test_its_footprint_is_what_it_holds(engine):
    found = engine.footprint()
    assert found.kv_capacity_tokens == engine.resolved()["num_pages"] * engine.resolved()["page_size"]
    assert found.peak_memory_bytes > 10_000_000
