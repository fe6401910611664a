"""The bundled engine's caches, cancellation and scheduling as the harness sees them."""

import dataclasses

import numpy as np
import pytest

from engines.bundled_adapter import BundledAdapter
from harness.case import Case
from harness.claims import check_claims
from harness.corpus import load_corpus
from harness.corpus.retokenise import retokenise
from harness.engine import KeepsCache, Work
from harness.errors import EngineError, Unsupported
from harness.expected import expected_of, missing_from
from harness.request import Grammar, Request, Sampling
from harness.schedule import Arrival, Schedule
from harness.schedules import build_schedule, value_mistake

ADAPTER = BundledAdapter()
SAMPLING = Sampling(
    temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0,
    seed=None, max_tokens=6, min_tokens=0, ignore_eos=True, stop=(), stop_token_ids=(), logit_bias=(), logprobs=2, n=1,
)  # fmt: skip


def request(name, length=40, **changes):
    prompt = tuple((7 * i + len(name)) % 512 for i in range(length))
    sampling = dataclasses.replace(SAMPLING, **changes)
    return Request(
        id=name, prompt_token_ids=prompt, text=None, messages=None, sampling=sampling, grammar=None, images=()
    )


def work(requests, schedule=None):
    schedule = schedule or build_schedule("together", [one.id for one in requests])
    return Work(requests=tuple(requests), schedule=schedule, replay="natural", golden={}, logits_digests=False)


def generate(engine, requests, schedule=None):
    traces = engine.generate(work(requests, schedule), lambda requests, tokens: None)
    assert check_claims(traces) == ()
    return traces


def start(**settings):
    return ADAPTER.start("tiny", {"threads": 1, "num_pages": 64, **settings})


def bits(traces, name):
    row = traces.requests.id.index(name)
    begin = int(traces.requests.length[:row].sum())
    end = begin + int(traces.requests.length[row])
    return traces.positions.token[begin:end].tolist(), traces.positions.topk_logprobs[begin:end].tobytes()


# Prefix cache


def test_cached_tokens_are_reported_and_the_step_table_begins_after_them():
    engine = start(prefix_cache=True)
    cold = generate(engine, [request("a")])
    warm = generate(engine, [request("a")])
    assert (cold.requests.cached_tokens.tolist(), warm.requests.cached_tokens.tolist()) == ([0], [32])
    assert dict(warm.counters)["cached_tokens"] == int(warm.steps.start[0]) == 32
    assert bits(cold, "a") == bits(warm, "a")
    assert engine.observed()["cached_pages"] == 2


def test_a_lie_about_cached_tokens_is_a_contradiction():
    engine = start(prefix_cache=True)
    generate(engine, [request("a")])
    traces = generate(engine, [request("a")])
    table = dataclasses.replace(traces.requests, cached_tokens=np.array([16], np.int32))
    told = check_claims(dataclasses.replace(traces, requests=table))
    assert any("does not begin where its cached prefix ends" in sentence for sentence in told)
    assert any("counter cached_tokens claims 32, the tables show 16" in sentence for sentence in told)


def test_a_cache_goes_to_disk_and_back_through_the_harness(tmp_path):
    engine, other = start(prefix_cache=True), start(prefix_cache=True)
    assert isinstance(engine, KeepsCache)
    first = generate(engine, [request("a")])
    engine.save_cache(tmp_path / "c")
    other.restore_cache(tmp_path / "c")
    second = generate(other, [request("a")])
    assert second.requests.cached_tokens.tolist() == [32]
    assert bits(first, "a") == bits(second, "a")
    with pytest.raises(EngineError, match="arithmetic: expected 'free', found 'portable'"):
        start(prefix_cache=True, arithmetic="free").restore_cache(tmp_path / "c")
    with pytest.raises(Unsupported, match="runs without a prefix cache; set prefix_cache"):
        start().save_cache(tmp_path / "d")


# Cancellation


def cancelled(after=3):
    return Schedule(
        name="s",
        arrivals=(Arrival(request="x", companion=True, cancel_after_tokens=after), Arrival(request="a", at_step=1)),
    )


def test_a_cancelled_companion_ends_where_it_was_to_and_nobody_notices():
    traces = generate(start(), [request("a"), request("x", 50, max_tokens=20)], cancelled())
    assert traces.requests.id == ("x", "a")
    assert traces.requests.finish_reason == ("abort", "length")
    assert traces.requests.length.tolist() == [3, 6]
    assert bits(traces, "a") == bits(generate(start(), [request("a")]), "a")


def test_what_was_to_be_cancelled_is_held_against_the_plan():
    requests = [request("a"), request("x", 50, max_tokens=20)]
    traces = generate(start(), requests, cancelled())
    assert missing_from(traces, expected_of(requests, ["a"], cancelled())) == ()
    assert missing_from(traces, expected_of(requests, ["a"], cancelled(after=5))) == (
        "request 'x': was cut off after 3 tokens, it was to be cancelled after 5",
    )
    assert missing_from(traces, expected_of(requests, ["a"])) == (
        "request 'x': was aborted, so what it reports is not its result",
    )
    whole = generate(start(), requests, build_schedule("together", ["a"], ["x"]))
    assert missing_from(whole, expected_of(requests, ["a"], cancelled())) == (
        "request 'x': ran on for 20 tokens, it was to be cancelled after 3",
    )


def test_a_judged_request_that_was_aborted_is_a_contradiction():
    traces = generate(start(), [request("a"), request("x", 50, max_tokens=20)], cancelled())
    table = dataclasses.replace(traces.requests, companion=np.array([False, False]))
    assert any("'x' was aborted" in sentence for sentence in check_claims(dataclasses.replace(traces, requests=table)))


@pytest.mark.parametrize(
    "arrival",
    [Arrival(request="a", cancel_after_tokens=2), Arrival(request="a", companion=True, cancel_after_tokens=0)],
)
def test_only_companions_are_cancelled_and_after_a_token_at_least(arrival):
    with pytest.raises(EngineError, match=r"request 'a': cancel_after_tokens \d: expected 1 or more, and a companion"):
        start().generate(work([request("a")], Schedule(name="s", arrivals=(arrival,))), lambda requests, tokens: None)


def test_schedules_cancel_companions_one_after_another():
    arrivals = build_schedule("together", ["a"], ["x", "y"], cancelled=True).arrivals
    assert [one.cancel_after_tokens for one in arrivals] == [1, 3, None]
    assert value_mistake("companions", "random:5:cancelled") is None
    assert value_mistake("companions", "none:cancelled") is not None
    assert value_mistake("server_history", "random:5:cancelled") is not None
    assert "cancelled" not in {field.name for field in dataclasses.fields(Case)}, "the schedule says it"


# Grammars


def test_a_grammar_must_have_been_at_work_at_every_position_and_nowhere_else():
    asked = dataclasses.replace(request("a", ignore_eos=False), grammar=Grammar(kind="regex", text="[a-f]{4}"))
    requests = [asked, request("b")]
    traces = generate(start(), requests)
    assert missing_from(traces, expected_of(requests, ["a", "b"])) == ()
    for masked, sentence in (
        ([0, 0], "request 'a': was sampled under a grammar at 0 positions, expected 5"),
        ([5, 1], "request 'b': was sampled under a grammar at 1 positions, expected 0"),
    ):
        table = dataclasses.replace(traces.requests, masked=np.array(masked, np.int32))
        told = dataclasses.replace(traces, requests=table)
        assert missing_from(told, expected_of(requests, ["a", "b"])) == (sentence,)


# Scheduling


def test_priorities_of_the_schedule_turn_the_order_round():
    requests = [request(name, 20) for name in ("a", "bb", "ccc")]
    schedule = Schedule(name="s", arrivals=tuple(Arrival(request=r.id, priority=-i) for i, r in enumerate(requests)))
    plain, urgent = (
        generate(start(policy=policy, max_num_seqs=1), requests, schedule) for policy in ("fcfs", "priority")
    )
    assert [traces.steps.request[0] for traces in (plain, urgent)] == [0, 2]
    assert all(bits(plain, one.id) == bits(urgent, one.id) for one in requests)


def test_a_more_urgent_arrival_is_seen_in_the_traces():
    """Each more urgent than the one before, on two seats: who ran is recomputed, and the counters say why."""
    requests = [request(f"r{i}", 20 + i) for i in range(4)]
    schedule = build_schedule("urgent-last", [one.id for one in requests])
    urgent = generate(start(policy="priority", max_num_seqs=2), requests, schedule)
    calm = generate(start(policy="priority", max_num_seqs=2, priority_preempts=False), requests, schedule)
    assert urgent.requests.preemptions.tolist() == [1, 1, 0, 0]
    assert calm.requests.preemptions.tolist() == [0, 0, 0, 0]
    assert (dict(urgent.counters)["gave_way"], dict(calm.counters)["gave_way"]) == (2, 0)
    assert all(bits(urgent, one.id) == bits(calm, one.id) for one in requests)


def near_ties():
    """The corpus as the tiny model reads it."""
    return retokenise(load_corpus("near-ties"), ADAPTER.tokenizer("tiny")).requests


def test_near_ties_are_rolled_back_where_the_schedule_asks_for_it():
    requests = near_ties()
    schedule = build_schedule("two-of-three-fast", [one.id for one in requests])
    settings = {"draft_length": 8, "num_pages": 400, "max_num_seqs": 16}
    plain = generate(start(**settings), requests, schedule)
    traces = generate(start(rollback="request", **settings), requests, schedule)
    assert all(bits(plain, one.id) == bits(traces, one.id) for one in requests)
    asked = [arrival.rollback for arrival in schedule.arrivals]
    assert asked == [True, True, False] * 3
    assert [count > 0 for count in traces.requests.drafted.tolist()] == asked
    wrong = [count for count, rolled in zip(traces.requests.rollbacks.tolist(), asked, strict=True) if rolled]
    assert sum(count > 0 for count in wrong) >= 4, wrong
    assert sum(wrong) >= 20, "by more than luck"
    assert dict(traces.counters)["fast_tokens"] >= int(traces.requests.drafted.sum())


def test_steps_scheduled_ahead_are_observed_and_their_time_is_counted():
    engine = start(async_scheduling=True)
    assert engine.observed()["steps_scheduled_ahead"] == 0
    seen, many = 0, [request(f"r{i}", 300) for i in range(4)]
    for _ in range(20):  # whether two threads meet in time is up to the machine; in twenty works some do
        traces = generate(engine, many)
        counters = dict(traces.counters)
        assert counters["overlap_us"] >= 0
        seen += counters["overlapped_steps"]
        if seen:
            break
    assert engine.observed()["steps_scheduled_ahead"] == seen > 0
    assert start().observed()["steps_scheduled_ahead"] == 0


def test_a_pool_larger_than_the_machine_is_refused_before_it_is_taken():
    with pytest.raises(Unsupported, match=r"num_pages=1000000000 of 16 tokens: needs \d+\.\d GiB .* lower num_pages"):
        start(num_pages=10**9)
