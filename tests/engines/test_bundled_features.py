"""The bundled engine's caches, cancellation and scheduling as the harness sees them."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import cells
from engines.bundled_adapter import BundledAdapter
from harness.case import Case
from harness.claims import check_claims
from harness.cli import commands
from harness.engine import KeepsCache, Work
from harness.errors import EngineError, Unsupported
from harness.expected import expected_of, missing_from
from harness.request import Request, Sampling
from harness.schedule import Arrival, Schedule
from harness.schedules import build_schedule, value_mistake

ADAPTER = BundledAdapter()
SHIPPED = Path(cells.__file__).parent
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


# Scheduling


def test_priorities_of_the_schedule_turn_the_order_round():
    requests = [request(name, 20) for name in ("a", "bb", "ccc")]
    schedule = Schedule(name="s", arrivals=tuple(Arrival(request=r.id, priority=-i) for i, r in enumerate(requests)))
    plain, urgent = (
        generate(start(policy=policy, max_num_seqs=1), requests, schedule) for policy in ("fcfs", "priority")
    )
    assert [traces.steps.request[0] for traces in (plain, urgent)] == [0, 2]
    assert all(bits(plain, one.id) == bits(urgent, one.id) for one in requests)


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


def test_the_cache_restore_cell_runs_in_two_processes(tmp_path):
    """The whole way: one process fills and saves, another restores and is judged; the control misplaces pages."""
    cell = (SHIPPED / "scheduler" / "cache-restore.toml").read_text()
    (tmp_path / "matrix").mkdir()
    (tmp_path / "matrix" / "cache-restore.toml").write_text(cell.replace('"quick"', '"smoke"').replace("100", "8"))
    out = tmp_path / "run"
    result = CliRunner().invoke(
        commands, ["run", str(tmp_path / "matrix"), "--model", "tiny", "--out", str(out), "--quiet"]
    )
    assert result.exit_code == 0, result.output
    (verdict,) = json.loads((out / "run.json").read_text())["verdicts"]
    assert (verdict["verdict"], verdict["control"]["value"]) == ("PASS", "misplaced-page")
    assert sorted(log.name[:5] for log in (out / "logs").glob("cache-*"))[0] == "cache"
    assert len(list((out / "caches").iterdir())) == 2  # the variant's and its control's
