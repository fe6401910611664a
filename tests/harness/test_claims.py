"""Claims: an engine that contradicts itself is told where; one that does not is left alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from made_traces import make_steps, make_traces, with_positions, with_requests

from harness.claims import check_claims
from harness.faults.captures import claim, recount
from harness.traces import NO_TOKEN

ROWS = [(0, 0, 0, 5), (0, 1, 0, 4), (1, 0, 5, 1), (1, 1, 4, 1), (2, 0, 6, 1), (2, 1, 5, 1)]
HONEST = recount(make_traces(("a", "b"), (3, 3), prompts=[5, 4], steps=make_steps(ROWS)))


def with_rows(*rows):
    return recount(replace(HONEST, steps=make_steps(rows)))


def test_nothing_to_say_of_an_honest_capture():
    assert check_claims(HONEST) == ()
    assert check_claims(replace(HONEST, steps=None)) == ()


def test_a_last_output_that_was_computed_as_well_is_no_contradiction():
    assert check_claims(with_rows(*ROWS, (3, 0, 7, 1))) == ()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([*ROWS[:5]], "request 'b' reports outputs that no step computed"),
        ([row for row in ROWS if row[1] == 0], "request 'b' reports an output, but the step table never ran it"),
        ([*ROWS, (3, 0, 7, 2)], "request 'a' has more tokens computed than prompt and output hold"),
        ([(0, 0, 0, 5), (0, 1, 1, 3), *ROWS[2:]], "request 'b' does not begin where its cached prefix ends"),
        ([*ROWS[:2], (1, 0, 6, 1), *ROWS[3:]], "request 'a' has tokens that no step computed"),
        ([*ROWS, (3, 0, 0, 7)], "request 'a' was computed again more often than preempted"),
        ([*ROWS[:4], (2, 0, 6, 1), (2, 0, 6, 1), ROWS[5]], "runs a request twice in one step"),
        ([*ROWS[2:], *ROWS[:2]], "steps go back in time"),
        ([*ROWS, (3, 2, 0, 1)], "outside the 2 of the request table"),
        ([*ROWS, (3, 0, 7, 0)], "rows that compute no token"),
        ([], "the step table is empty"),
    ],
)
def test_contradictions_in_the_step_table(rows, message):
    found = check_claims(with_rows(*rows))
    assert any(message in sentence for sentence in found), found


def test_ragged_step_columns():
    ragged = replace(HONEST, steps=replace(HONEST.steps, count=HONEST.steps.count[:-1]))
    assert check_claims(ragged) == ("the step table's columns have different lengths: [5, 6]",)


@pytest.mark.parametrize("counter", ["max_running", "steps", "tokens_computed", "preemptions"])
def test_counters_must_equal_the_tables(counter):
    truth = dict(HONEST.counters)[counter]
    found = check_claims(claim(HONEST, **{counter: truth + 1}))
    assert found == (f"counter {counter} claims {truth + 1}, the tables show {truth}",)


def test_unknown_counters_are_not_judged():
    assert check_claims(claim(HONEST, bananas=3)) == ()


def test_a_claimed_preemption_must_show():
    claimed = recount(with_requests(HONEST, preemptions=np.array([1, 0], np.int32)))
    assert check_claims(claimed) == ("request 'a' claims a preemption, but nothing was computed again",)
    shown = replace(claimed, steps=make_steps([*ROWS[:4], (2, 0, 0, 7), ROWS[5]]))
    assert check_claims(recount(shown)) == ()
    cached = recount(with_requests(claimed, cached_tokens=np.array([0, 2], np.int32)))
    cached = recount(replace(cached, steps=make_steps([ROWS[0], (0, 1, 2, 2), *ROWS[2:]])))
    assert check_claims(cached) == (), "with a prefix cache in play the recomputation may not show"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_reported_values_must_be_finite(value):
    logprob = HONEST.positions.logprob.copy()
    logprob[4] = value
    found = check_claims(with_positions(HONEST, logprob=logprob))
    assert found == ("request 'b' position 1: a reported logprob is not a finite number",)
    values = HONEST.positions.topk_logprobs.copy()
    values[2, 1] = value
    found = check_claims(with_positions(HONEST, topk_logprobs=values))
    assert found[0] == "request 'a' position 2: a reported logprob is not a finite number"


def test_padding_may_be_nan():
    ids, values = HONEST.positions.topk_ids.copy(), HONEST.positions.topk_logprobs.copy()
    ids[0, 2], values[0, 2] = NO_TOKEN, np.nan
    assert check_claims(with_positions(HONEST, topk_ids=ids, topk_logprobs=values)) == ()


def test_an_aborted_request_is_no_result():
    aborted = with_requests(HONEST, finish_reason=("length", "abort"))
    assert check_claims(aborted) == ("request 'b' was aborted, so what it reports is not its result",)


def test_malformed_tables_are_the_only_contradiction():
    found = check_claims(with_positions(HONEST, topk_logprobs=None))
    assert found == ("tables: top-k ids and top-k logprobs must come together, one of them is missing",)


def test_candidates_must_descend():
    values = HONEST.positions.topk_logprobs.copy()
    values[4] = values[4][::-1]
    found = check_claims(with_positions(HONEST, topk_logprobs=values))
    assert found == ("request 'b' position 1: the top candidates are not in descending order",)


def proposing(rows, *, drafted, accepted, rollbacks, lengths=(4,)):
    """One request of five prompt tokens that proposes."""
    traces = make_traces(("a",), lengths, prompts=[5], steps=make_steps(rows))
    columns = {"drafted": drafted, "accepted": accepted, "rollbacks": rollbacks}
    return recount(with_requests(traces, **{name: np.array([n], np.int32) for name, n in columns.items()}))


VERIFIED = [(0, 0, 0, 5), (1, 0, 5, 3), (2, 0, 7, 2)]  # the second row: one proposal taken, one thrown away


def test_proposals_that_the_rows_show_are_no_contradiction():
    assert check_claims(proposing(VERIFIED, drafted=3, accepted=1, rollbacks=2)) == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accepted": 2}, "request 'a' claims accepted proposals that its rows do not show"),
        ({"accepted": 0}, "request 'a' claims accepted proposals that its rows do not show"),
        ({"drafted": 0}, "request 'a' claims accepted proposals that its rows do not show"),
        ({"rollbacks": 0}, "request 'a' was computed again more often than preempted"),
    ],
)
def test_proposals_that_the_rows_do_not_show(changes, message):
    counts = {"drafted": 3, "accepted": 1, "rollbacks": 2, **changes}
    assert message in check_claims(proposing(VERIFIED, **counts))


@pytest.mark.parametrize(
    ("masked", "steered", "wrong"),
    [(4, 4, 0), (0, 0, 0), (5, 0, 1), (2, 3, 1), (2, -1, 1), (-1, -1, 1)],
)
def test_masks_work_at_positions_and_change_at_most_their_picks(masked, steered, wrong):
    steps = make_steps([(0, 0, 0, 5), *((i, 0, 4 + i, 1) for i in (1, 2, 3))])
    traces = make_traces(("a",), (4,), prompts=[5], steps=steps)
    columns = {"masked": np.array([masked], np.int32), "steered": np.array([steered], np.int32)}
    message = "request 'a' claims more positions under a grammar than it has"
    traces = recount(with_requests(traces, **columns))
    assert check_claims(traces) == (message,) * wrong
    told = replace(traces, counters=(("masked", masked + 1),))
    assert f"counter masked claims {masked + 1}, the tables show {masked}" in check_claims(told)


def test_rows_beyond_the_last_output_need_rejected_proposals():
    rows = [(0, 0, 0, 5), (1, 0, 5, 6)]  # reaches token 11, the last output is token 8
    message = "request 'a' has more tokens computed than prompt and output hold"
    assert message in check_claims(proposing(rows, drafted=3, accepted=2, rollbacks=1))
    assert check_claims(proposing(rows, drafted=5, accepted=2, rollbacks=1)) == ()
