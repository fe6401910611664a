"""Bundled engines that consist of several processes, through the harness's protocol: replicas, prefill beside decode,
ranks. Each start of a process is paid once and shared.
"""

import dataclasses
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from test_bundled_adapter import quiet, request, work
from test_bundled_timed import timed

from engines.bundled_adapter import BundledAdapter
from engines.bundled_replicas import deal, join_traces
from engines.serve.command import ServeOptions, run_server
from harness.claims import check_claims
from harness.digest import judged_digest, judged_keys, request_digests
from harness.engine import Timed
from harness.errors import EngineDied, EngineError, Unsupported, UsageError
from harness.schedule import Arrival

ADAPTER = BundledAdapter()
SETTINGS = {"threads": 1, "num_pages": 64}
REQUESTS = [request(f"r{i}", "words " * (i + 1), max_tokens=5, logprobs=i) for i in range(5)]
WORK = work(REQUESTS, digests=True)


def start(**changes):
    return ADAPTER.start("tiny", {**SETTINGS, **changes})


@pytest.fixture(scope="module")
def alone():
    return start()


@pytest.fixture(scope="module")
def expected(alone):
    return judged_digest(alone.generate(WORK, quiet))


@pytest.fixture(scope="module")
def replicas():
    front = start(replica="both", replica_arithmetic="free")
    yield front
    front.stop()


@pytest.fixture(scope="module")
def disaggregated():
    engine = start(disaggregated="on")
    yield engine
    engine.stop()


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def gone(pids, seconds=30.0):
    limit = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < limit:
        time.sleep(0.05)
    return not any(map(is_running, pids))


# Dealing and joining


def test_requests_are_dealt_in_turn_and_each_replica_sees_its_own_alone():
    first, second = (part for _, part in deal(WORK, "both"))
    assert [one.id for one in first.requests] == ["r0", "r2", "r4"]
    assert [arrival.request for arrival in second.schedule.arrivals] == ["r1", "r3"]
    assert deal(WORK, "second") == [(1, WORK)]


def test_a_request_that_waits_for_another_replicas_is_refused():
    arrivals = [Arrival(request="r0"), Arrival(request="r1", after="r0")]
    with pytest.raises(Unsupported, match="request 'r1' waits for 'r0', which another replica serves"):
        deal(work(REQUESTS[:2], arrivals), "both")


def test_joined_traces_hold_every_request_in_order_and_contradict_nothing(alone, expected):
    parts = [alone.generate(part, quiet) for _, part in deal(WORK, "both")]
    joined = join_traces(parts, [one.id for one in REQUESTS])
    assert joined.requests.id == tuple(one.id for one in REQUESTS)
    assert judged_digest(joined) == expected
    assert check_claims(joined) == ()
    assert joined.positions.topk_ids.shape[1] == 4
    counters = dict(joined.counters)
    assert counters["steps"] == sum(dict(part.counters)["steps"] for part in parts)
    assert counters["max_running"] == max(dict(part.counters)["max_running"] for part in parts)


def test_a_request_that_no_replica_returned_is_an_error(alone):
    parts = [alone.generate(part, quiet) for _, part in deal(WORK, "both")]
    with pytest.raises(EngineError, match="replicas returned 3 requests, expected 5"):
        join_traces(parts[:1], [one.id for one in REQUESTS])


# Replicas


def test_a_replica_with_another_arithmetic_shows(replicas, alone):
    found, reference = replicas.generate(WORK, quiet), alone.generate(WORK, quiet)
    assert check_claims(found) == ()
    ends = np.cumsum(reference.requests.length)
    same = [
        bool((ours == theirs).all())
        for ours, theirs in zip(
            np.split(found.positions.logits_digest, ends[:-1]),
            np.split(reference.positions.logits_digest, ends[:-1]),
            strict=True,
        )
    ]
    assert same == [True, False, True, False, True]
    assert replicas.observed() == {"replica": "first 3, second 2", "replicas": 2}
    fields = {field.name: field.value for field in replicas.fingerprint()}
    assert fields["arithmetic.name"] == "portable | free"
    assert fields["model.digest"] == {f.name: f.value for f in alone.fingerprint()}["model.digest"]
    assert replicas.resolved()["threads"] == 1


def test_a_lost_replica_is_named_and_the_other_ends_with_the_front(replicas):
    pids = [replica.pid for replica in replicas._replicas]
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(EngineError, match="second replica: the engine process was ended by signal SIGKILL"):
        replicas.generate(WORK, quiet)
    replicas.stop()
    assert gone(pids)


# Prefill beside decode


def test_prompts_that_were_computed_elsewhere_give_the_same(disaggregated, expected):
    traces = disaggregated.generate(WORK, quiet)
    assert judged_digest(traces) == expected
    assert check_claims(traces) == ()
    assert (traces.requests.cached_tokens == traces.requests.prompt_tokens - 1).all()
    assert disaggregated.observed()["handed_over_tokens"] == int(traces.requests.cached_tokens.sum())
    assert disaggregated.resolved()["disaggregated"] == "on"


def test_a_prompt_that_does_not_fit_is_no_silent_computation(disaggregated):
    inbox = disaggregated._decode.engine.scheduler.inbox
    find = inbox.find
    inbox.find = lambda sequence: 0 if sequence.request.id == "r3" else find(sequence)
    try:
        with pytest.raises(EngineError, match="request 'r3': 0 of 23 prompt tokens were handed over"):
            disaggregated.generate(WORK, quiet)
    finally:
        inbox.find = find


def test_a_lost_prefill_process_is_named(disaggregated):
    pid = disaggregated._prefill.pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="prefill process: the engine process was ended by signal SIGKILL"):
        disaggregated.generate(WORK, quiet)
    assert gone([pid])


def test_several_processes_refuse_to_serve_by_the_clock_by_name(replicas, disaggregated):
    for engine, form in ((replicas, "replica=both"), (disaggregated, "disaggregated=on")):
        assert isinstance(engine, Timed)
        with pytest.raises(Unsupported, match=f"{form}: .*no token has a time of its own"):
            engine.open_timed(REQUESTS)
        with pytest.raises(Unsupported, match=form):
            engine.footprint()


def test_what_does_not_go_together_is_refused():
    with pytest.raises(Unsupported, match="disaggregated with prefix_cache"):
        start(disaggregated="on", prefix_cache=True)
    with pytest.raises(Unsupported, match="dtype bfloat16 over several ranks: sums follow the ranks; set k_order=tree"):
        start(tensor_parallel_size=2, device="cuda", arithmetic="free", dtype="bfloat16", num_pages=64)


@pytest.mark.parametrize("chosen", ["replica=both", "disaggregated=on"])
def test_a_server_of_several_engine_processes_is_refused(chosen):
    options = ServeOptions(engine="bundled", model="tiny", mode=None, assignments=(chosen,), host="127.0.0.1", port=0,
                           default_seed_policy="refuse", grace_s=1.0, max_body_bytes=1000)  # fmt: skip
    with pytest.raises(UsageError, match=f"--set {chosen}: a server is one engine process"):
        run_server(options)


# Ranks


def test_ranks_show_in_counters_and_observations_and_a_lost_one_ends_the_engine(expected):
    engine = start(tensor_parallel_size=2)
    try:
        traces = engine.generate(WORK, quiet)
        counters = dict(traces.counters)
        assert judged_digest(traces) == expected
        assert counters["rank0_kv_bytes"] == counters["rank1_kv_bytes"] > 0
        assert {count["steps"] for count in engine.arithmetic.counts()} == {counters["steps"]}
        observed = engine.observed()
        mine = observed["threads"]  # the first rank shares this process, and its threads, with other tests
        assert (observed["ranks"], observed["threads_by_rank"]) == (2, f"{mine} 1")
        cores = [os.sched_getaffinity(count["pid"]) for count in engine.arithmetic.counts()]
        assert observed["cores_by_rank"] == " ".join(str(len(one)) for one in cores)
        assert (engine.resolved()["rank_cores"] == "own cores") == cores[0].isdisjoint(cores[1])
        assert engine.resolved()["collectives"].startswith("gloo of torch")
        peaks = [count["peak_memory_kib"] for count in engine.arithmetic.counts()]
        assert engine.footprint().peak_memory_bytes >= 1024 * sum(peaks) > 1024 * peaks[0]
        plain = engine.generate(work(REQUESTS), quiet)
        alone = dict(zip(judged_keys(plain), request_digests(plain), strict=True))
        timings = timed(engine, REQUESTS, 2, len(REQUESTS))  # ranks serve by the clock as one engine does
        assert {(one.request, one.sample): one.judged for one in timings} == alone
        os.kill(engine.arithmetic.counts()[1]["pid"], signal.SIGKILL)
        with pytest.raises(EngineDied, match=r"of 2 ranks, rank 1 .* was ended by signal SIGKILL"):
            engine.generate(WORK, quiet)
    finally:
        engine.stop()


def test_one_process_says_so_too(alone):
    counters = dict(alone.generate(dataclasses.replace(WORK), quiet).counters)
    assert counters["rank0_weight_bytes"] > 0
    assert "rank1_weight_bytes" not in counters
    assert alone.observed()["ranks"] == 1
    assert alone.resolved()["collectives"] == "not applicable"
