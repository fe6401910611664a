"""Asynchronous scheduling: the same results, plans that follow what happened, an overlap that was measured."""

import threading

import pytest
from engine_cases import SMALL, evidence, greedy, options, request, run_all, scripted_engine

from engines.bundled.errors import ComputeError

SEEDED = greedy(temperature=0.9, seed=11, max_tokens=12, logprobs=4, ignore_eos=False)
REQUESTS = [request(f"r{i}", range(i, i + 3 + 5 * i), SEEDED, logits_digest=True) for i in range(6)]


def run_one(one):
    return run_all(scripted_engine(), [one])[0]


def run_on(engine):
    while engine.has_work:
        engine.step()
    engine.check_pages()


def open_ahead(**changes):
    return scripted_engine(options(async_scheduling=True, **changes))


@pytest.mark.parametrize("changes", [{}, {"num_pages": 12}, {"prefix_cache": True, "max_num_seqs": 2}])
def test_results_are_those_without_it(changes):
    engine = open_ahead(**changes)
    together = run_all(engine, REQUESTS, [0, 0, 2, 3, 5, 5])
    assert engine.ahead.planned_steps > 5
    assert [evidence(s) for s in together] == [evidence(run_one(one)) for one in REQUESTS]


def test_the_next_step_is_scheduled_while_one_runs():
    """The step waits inside the computation until the scheduler was at work, and the clock saw both."""
    engine = open_ahead()
    seen, forward, plan = threading.Event(), engine.arithmetic.forward, engine.scheduler.schedule_ahead
    threads = set()

    def schedule_ahead(slices):
        threads.add(threading.current_thread().name)
        seen.set()
        return plan(slices)

    def slow_forward(batch):
        assert seen.wait(20)
        seen.clear()
        return forward(batch)

    engine.scheduler.schedule_ahead, engine.arithmetic.forward = schedule_ahead, slow_forward
    run_all(engine, [REQUESTS[0]])
    assert all(name.startswith("scheduler") for name in threads)
    assert engine.ahead.overlapped_steps > 0
    assert engine.ahead.overlap_ns > 0
    engine.reset()
    assert (engine.ahead.overlapped_steps, engine.ahead.overlap_ns) == (0, 0)
    assert engine.ahead.served_steps > 0


def test_a_sequence_that_stopped_is_dropped_from_the_plan():
    """Its end is not known when the step after it is planned."""
    tokens = run_one(request("a", [1], greedy(max_tokens=8))).tokens[1:]
    engine = open_ahead()
    (stopped,) = run_all(engine, [request("a", [1], greedy(stop_token_ids=(tokens[3],)))])
    assert stopped.finish_reason == "stop"
    assert sum(ran.count for ran in engine.log) == len(stopped.tokens) - 1
    engine.check_pages()


def test_one_that_ends_by_length_is_never_planned_past_its_end():
    engine = open_ahead()
    plans = []
    plan = engine.scheduler.schedule_ahead
    engine.scheduler.schedule_ahead = lambda slices: plans.append(plan(slices)) or plans[-1]
    run_all(engine, [request("a", [1], greedy(max_tokens=4))])
    assert [len(planned) for planned in plans] == [1, 1, 1, 0]


def test_nobody_is_preempted_while_a_step_runs():
    engine = open_ahead(num_pages=8)
    scheduler, plan = engine.scheduler, engine.scheduler.schedule_ahead

    def watched(slices):
        before = scheduler.preemptions
        planned = plan(slices)
        assert scheduler.preemptions == before
        return planned

    scheduler.schedule_ahead = watched
    requests = [request(f"r{i}", range(i + 1, i + 8), greedy(max_tokens=20)) for i in range(4)]
    together = run_all(engine, requests)
    assert scheduler.preemptions > 0
    assert [evidence(s) for s in together] == [evidence(run_one(one)) for one in requests]


def test_what_is_aborted_leaves_the_plan_and_the_rest_goes_on():
    engine = open_ahead()
    sequences = [engine.submit(one) for one in REQUESTS[:3]]
    for _ in range(3):
        engine.step()
    assert engine.abort("r1") == 1
    while engine.has_work:
        engine.step()
    engine.check_pages()
    assert [evidence(sequences[i]) for i in (0, 2)] == [evidence(run_one(REQUESTS[i])) for i in (0, 2)]


def test_after_a_step_that_raised_everything_is_scheduled_anew():
    engine = open_ahead()
    sequences = [engine.submit(one) for one in REQUESTS[:3]]
    forward = engine.arithmetic.forward
    engine.step()
    engine.arithmetic.forward = lambda batch: (_ for _ in ()).throw(MemoryError("no 8 GiB"))
    with pytest.raises(ComputeError, match=r"step 1 of \d+ tokens in 3 sequences: memory ran out \(no 8 GiB\); lower"):
        engine.step()
    engine.arithmetic.forward = forward
    engine.recover()
    while engine.has_work:
        engine.step()
    engine.check_pages()
    assert [evidence(s) for s in sequences] == [evidence(run_one(one)) for one in REQUESTS[:3]]


# What must hold when things go wrong


@pytest.mark.parametrize("ahead", [False, True])
def test_weights_that_are_no_numbers_are_named_and_others_are_unharmed(ahead):
    """One request's logits are NaN; it is taken out, the others get what they get alone."""
    engine = scripted_engine(options(async_scheduling=ahead, prefix_cache=True))
    sequences = [engine.submit(one) for one in REQUESTS[:3]]
    logits = engine.arithmetic._logits(REQUESTS[1].prompt).copy()
    logits[:] = float("nan")
    engine.arithmetic.spoil[REQUESTS[1].prompt] = logits
    with pytest.raises(ComputeError, match="request 'r1', generated position 0: logit of token 0 is nan") as caught:
        run_on(engine)
    engine.recover()
    engine.abort(caught.value.request_id)
    run_on(engine)
    assert [evidence(sequences[i]) for i in (0, 2)] == [evidence(run_one(REQUESTS[i])) for i in (0, 2)]


def test_a_full_pool_and_a_request_that_never_fits():
    """The over-long one is refused by name; what runs and waits goes on to its end."""
    engine = open_ahead(num_pages=8)
    sequences = [engine.submit(one) for one in REQUESTS[:4]]
    engine.step()
    with pytest.raises(Exception, match="request 'long': needs KV pages for 51 tokens, more than the whole pool of 8"):
        engine.submit(request("long", [1] * 40, SEEDED))
    while engine.has_work:
        engine.step()
    engine.check_pages()
    assert [evidence(s) for s in sequences] == [evidence(run_one(one)) for one in REQUESTS[:4]]


def test_the_model_here_has_an_end():
    assert SMALL.eos_token_ids, "seeded requests above may stop before their length"
