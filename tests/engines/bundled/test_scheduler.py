"""The scheduler alone: seats, tokens, pages, preemption. Tokens are appended by hand; nothing is computed."""

import numpy as np
import pytest
from engine_cases import greedy, options, request
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.bundled.pages import Pages
from engines.bundled.scheduler import Scheduler
from engines.bundled.sequence import Position, Sequence


def make(prompts, max_tokens=4, **changes):
    """A scheduler with one waiting sequence per prompt length."""
    config = options(**changes)
    scheduler = Scheduler(config, Pages(config.num_pages, config.page_size))
    for index, length in enumerate(prompts):
        one = request(f"r{index}", range(1, length + 1), greedy(max_tokens=max_tokens))
        scheduler.add(Sequence(one, frozenset(), lambda ids: ""))
    return scheduler


def run_step(scheduler):
    """One step: what ran as {request: (start, count)}; finished sequences leave."""
    slices = scheduler.schedule()
    for piece in slices:
        sequence = piece.sequence
        if piece.completes:
            sequence.append(Position(0, 0, 0.0, np.empty(0, np.int32), np.empty(0, np.float32), None))
        sequence.computed += piece.count
        if sequence.finish_reason:
            scheduler.finish(sequence)
    return {piece.sequence.request.id: (piece.start, piece.count) for piece in slices}


def test_no_more_sequences_than_seats():
    scheduler = make([2, 2, 2], max_num_seqs=2)
    assert run_step(scheduler) == {"r0": (0, 2), "r1": (0, 2)}
    assert [sequence.request.id for sequence in scheduler.waiting] == ["r2"]


def test_a_long_prompt_is_prefilled_in_chunks_beside_decodes():
    scheduler = make([2, 20], max_num_batched_tokens=8)
    assert run_step(scheduler) == {"r0": (0, 2), "r1": (0, 6)}
    assert run_step(scheduler) == {"r0": (2, 1), "r1": (6, 7)}
    assert run_step(scheduler) == {"r0": (3, 1), "r1": (13, 7)}


def test_the_line_is_first_come_first_served():
    scheduler = make([40, 2], max_num_batched_tokens=8, max_num_seqs=1)
    for _ in range(5):
        assert set(run_step(scheduler)) == {"r0"}


def test_the_newest_gives_its_pages_back_and_waits_at_the_front():
    scheduler = make([7, 7, 3], max_tokens=8, num_pages=4, page_size=4, max_num_seqs=2)
    assert run_step(scheduler) == {"r0": (0, 7), "r1": (0, 7)}
    assert run_step(scheduler) == {"r0": (7, 1), "r1": (7, 1)}
    assert run_step(scheduler) == {"r0": (8, 1)}  # needs a third page: r1 gives two back
    assert scheduler.preemptions == 1
    assert [sequence.request.id for sequence in scheduler.waiting] == ["r1", "r2"]
    assert scheduler.waiting[0].computed == 0
    assert scheduler.waiting[0].generated == 2
    assert scheduler.waiting[0].preemptions == 1
    assert scheduler.pages.free == 1


def test_a_preempted_sequence_runs_prompt_and_output_again():
    scheduler = make([7, 7], max_tokens=8, num_pages=4, page_size=4)
    ran = []
    while scheduler.has_work:
        ran.append(run_step(scheduler))
    again = [step["r1"] for step in ran if "r1" in step and step["r1"][0] == 0]
    assert again[0] == (0, 7)
    assert again[1][1] > 7  # the output so far is prefilled too
    assert scheduler.pages.free == 4


def test_abandoning_gives_everything_back():
    scheduler = make([7, 7, 3])
    run_step(scheduler)
    scheduler.abandon()
    assert not scheduler.has_work
    assert scheduler.pages.free == scheduler.pages.count


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=8),
    st.integers(1, 4),
    st.integers(1, 12),
    st.integers(1, 5),
    st.integers(0, 6),
)
def test_every_step_moves_the_oldest_keeps_the_limits_and_everything_ends(prompts, seats, tokens, page, spare):
    most = max(prompts) + 4
    pages = -(-most // page) + spare
    scheduler = make(prompts, max_num_seqs=seats, max_num_batched_tokens=tokens, page_size=page, num_pages=pages)
    everything = list(scheduler.waiting)
    for _ in range(10_000):
        if not scheduler.has_work:
            break
        oldest = (scheduler.running or list(scheduler.waiting))[0].request.id
        ran = run_step(scheduler)
        assert oldest in ran
        assert len(ran) <= seats
        assert sum(count for _, count in ran.values()) <= tokens
    assert not scheduler.has_work
    assert [sequence.generated for sequence in everything] == [4] * len(prompts)
    assert scheduler.pages.free == pages


@pytest.mark.parametrize("seats", [1, 3])
def test_running_sequences_never_exceed_the_seats(seats):
    scheduler = make([3] * 6, max_num_seqs=seats)
    while scheduler.has_work:
        run_step(scheduler)
        assert len(scheduler.running) <= seats
