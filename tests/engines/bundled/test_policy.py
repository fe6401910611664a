"""Scheduling policies: who runs first, who is preempted first."""

import pytest
from engine_cases import evidence, greedy, options, request, run_all, scripted_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.bundled.faults import FAULTS
from engines.bundled.policy import POLICIES
from engines.bundled_adapter import FAULTS as OFFERED_FAULTS
from engines.bundled_adapter import POLICIES as OFFERED

REQUESTS = [
    request("late", range(1, 12), greedy(max_tokens=14), priority=2),
    request("urgent", range(20, 30), greedy(max_tokens=14), priority=-1),
    request("short", range(40, 44), greedy(max_tokens=14), priority=0),
]
FIRST = {
    "fcfs": ["late", "urgent", "short"],
    "priority": ["urgent", "short", "late"],
    "shortest": ["short", "urgent", "late"],
}


def order_of_arrival(engine):
    return list(dict.fromkeys(ran.sequence.request.id for ran in engine.log))


def test_the_adapter_offers_what_there_is():
    assert set(OFFERED) == set(POLICIES) == set(FIRST)
    assert set(OFFERED_FAULTS) == set(FAULTS)


@pytest.mark.parametrize("policy", FIRST)
def test_the_first_in_rank_runs_first_and_the_last_is_preempted(policy):
    engine = scripted_engine(options(policy=policy, max_num_seqs=1))
    run_all(engine, REQUESTS)
    assert order_of_arrival(engine) == FIRST[policy]
    tight = scripted_engine(options(policy=policy, num_pages=10))
    sequences = {one.request.id: one for one in run_all(tight, REQUESTS)}
    preempted = [name for name in FIRST[policy] if sequences[name].preemptions]
    assert preempted
    assert FIRST[policy][0] not in preempted


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_whatever_the_policy_everybody_gets_what_they_get_alone(data):
    count = data.draw(st.integers(2, 6))
    requests = [
        request(
            f"r{i}",
            range(1, data.draw(st.integers(2, 16))),
            greedy(max_tokens=5),
            priority=data.draw(st.integers(-2, 2)),
        )
        for i in range(count)
    ]
    config = options(
        policy=data.draw(st.sampled_from(sorted(POLICIES))), max_num_seqs=data.draw(st.integers(1, 4)),
        num_pages=data.draw(st.integers(6, 14)), prefix_cache=data.draw(st.booleans()),
        async_scheduling=data.draw(st.booleans()),
    )  # fmt: skip
    together = run_all(scripted_engine(config), requests, [data.draw(st.integers(0, 6)) for _ in requests])
    for one, sequence in zip(requests, together, strict=True):
        assert evidence(sequence) == evidence(run_all(scripted_engine(), [one])[0])
