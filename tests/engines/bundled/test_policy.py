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


def running(engine):
    return [sequence.request.id for sequence in engine.scheduler.running]


def steps_of(engine, name):
    return [ran.step for ran in engine.log if ran.sequence.request.id == name]


def arrive_late(**changes):
    """Two lines of equal requests run; after three steps an urgent one arrives."""
    engine = scripted_engine(options(**{"policy": "priority", "max_num_seqs": 2, **changes}))
    slow = [request(f"slow{i}", range(1, 6), greedy(max_tokens=12)) for i in range(2)]
    urgent = request("urgent", range(20, 30), greedy(max_tokens=4), priority=-1)
    sequences = run_all(engine, [*slow, urgent], [0, 0, 3])
    for one, sequence in zip([*slow, urgent], sequences, strict=True):
        assert evidence(sequence) == evidence(run_all(scripted_engine(), [one])[0])
    return engine, sequences


def test_a_more_urgent_arrival_takes_the_seat_of_the_last_in_rank():
    engine, (first, second, urgent) = arrive_late()
    assert [s.preemptions for s in (first, second, urgent)] == [0, 1, 0]
    assert steps_of(engine, "urgent")[0] == 3
    assert (engine.scheduler.preemptions, engine.scheduler.gave_way) == (1, 1)
    again = [ran.start for ran in engine.log if ran.sequence is second]
    assert again.count(0) == 2, "it is recomputed from its first token"
    assert steps_of(engine, "slow1")[3] > max(steps_of(engine, "urgent"))


def test_without_preemption_by_priority_it_waits_for_a_seat():
    engine, sequences = arrive_late(priority_preempts=False)
    assert [sequence.preemptions for sequence in sequences] == [0, 0, 0]
    assert steps_of(engine, "urgent")[0] > max(steps_of(engine, "slow0"))


@pytest.mark.parametrize("policy", ["fcfs", "shortest"])
def test_under_other_policies_nobody_loses_a_seat(policy):
    _, sequences = arrive_late(policy=policy)
    assert [sequence.preemptions for sequence in sequences] == [0, 0, 0]


def test_while_a_step_runs_the_urgent_one_waits_for_the_step_after():
    engine, sequences = arrive_late(async_scheduling=True)
    assert [sequence.preemptions for sequence in sequences] == [0, 1, 0]
    assert steps_of(engine, "urgent")[0] in (4, 5)


def test_equals_never_push_each_other_out_of_their_seats():
    engine = scripted_engine(options(policy="priority", max_num_seqs=1))
    run_all(engine, [request(f"r{i}", [i + 1], greedy(max_tokens=6)) for i in range(3)], [0, 1, 2])
    assert engine.scheduler.preemptions == 0


def test_the_more_urgent_takes_pages_too():
    """There is a seat, but no page: the least urgent one gives its own."""
    engine = scripted_engine(options(policy="priority", num_pages=8, max_num_seqs=4))
    slow = [request(f"slow{i}", range(1, 12), greedy(max_tokens=5)) for i in range(2)]
    urgent = request("urgent", range(20, 31), greedy(max_tokens=5), priority=-1)
    sequences = run_all(engine, [*slow, urgent], [0, 0, 2])
    assert steps_of(engine, "urgent")[0] == 2
    assert (sequences[1].preemptions, engine.scheduler.gave_way) == (1, 0)
    assert sequences[2].preemptions == 0


def test_one_that_lost_its_seat_before_it_ran_was_not_preempted():
    """The prompt of the most urgent uses up every step; who sits behind it is sent back by others more urgent."""
    engine = scripted_engine(options(policy="priority", max_num_seqs=3, max_num_batched_tokens=4, prefix_cache=True))
    made = [
        request(name, prompt, greedy(max_tokens=2), priority=priority)
        for name, prompt, priority in (
            ("slow", range(9), 0), ("first", range(30), -5), ("sent-back", range(20), -3),
            ("c", [7], -4), ("d", [8], -4),
        )
    ]  # fmt: skip
    sequences = run_all(engine, made, [0, 1, 2, 3, 4])
    assert [sequence.preemptions for sequence in sequences] == [1, 0, 0, 0, 0]
    assert engine.scheduler.preemptions == 1
    first = {name: steps_of(engine, name)[0] for name in ("first", "c", "d", "sent-back")}
    assert sorted(first, key=first.__getitem__) == ["first", "c", "d", "sent-back"]
    for sequence in sequences:
        assert next(ran.start for ran in engine.log if ran.sequence is sequence) == sequence.cached_tokens
    assert sequences[2].cached_tokens > 0


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
        async_scheduling=data.draw(st.booleans()), priority_preempts=data.draw(st.booleans()),
    )  # fmt: skip
    together = run_all(scripted_engine(config), requests, [data.draw(st.integers(0, 6)) for _ in requests])
    for one, sequence in zip(requests, together, strict=True):
        assert evidence(sequence) == evidence(run_all(scripted_engine(), [one])[0])
