"""The witness: step tables of a small honest scheduler, read once by numpy and once by a plain loop over tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_traces import make_steps, make_traces, reorder, with_requests

from harness.claims import check_claims
from harness.faults.captures import recount
from harness.judged import ComparisonError
from harness.traces import Traces
from harness.witness import witnessed

KINDS = ("beside", "composition", "chunks", "cached", "preempted")


def simulate(shapes, *, seats, tokens, arrivals, preempt_at=(), cached=None) -> Traces:
    """Runs (prompt, length, companion) requests in continuous batches.

    `preempt_at` maps a step to how many tokens the newest keeps when it is thrown out there.
    """
    preempt_at = dict(preempt_at)
    cached = cached or [0] * len(shapes)
    computed, generated, last = list(cached), [0] * len(shapes), [0] * len(shapes)
    preemptions = [0] * len(shapes)
    waiting, running, rows, step = [], [], [], 0
    while any(generated[j] < shapes[j][1] for j in range(len(shapes))):
        waiting += [j for j in range(len(shapes)) if arrivals[j] == step]
        if step in preempt_at and running and computed[running[-1]] > cached[running[-1]]:
            victim = running.pop()
            computed[victim] = min(computed[victim] - 1, preempt_at[step])
            preemptions[victim] += 1
            waiting.insert(0, victim)
        while waiting and len(running) < seats:
            running.append(waiting.pop(0))
        budget = tokens
        for j in list(running):
            count = min(shapes[j][0] + generated[j] - computed[j], budget)
            if count:
                rows.append((step, j, computed[j], count))
                computed[j], budget = computed[j] + count, budget - count
            if computed[j] == shapes[j][0] + generated[j]:
                generated[j] += 1
                if generated[j] == shapes[j][1]:
                    running.remove(j)
                    last[j] = step
        step += 1
    names = tuple(("x" if companion else "r") + str(j) for j, (_, _, companion) in enumerate(shapes))
    traces = make_traces(
        names, [length for _, length, _ in shapes], companions=[companion for _, _, companion in shapes],
        prompts=[prompt for prompt, _, _ in shapes], steps=make_steps(rows), width=1, digests=False,
    )  # fmt: skip
    traces = with_requests(
        traces, preemptions=np.array(preemptions, np.int32), cached_tokens=np.array(cached, np.int32)
    )
    return recount(traces)


def plain_witness(reference: Traces, variant: Traces, kind: str) -> dict[tuple[str, int], bool]:
    """The definition, token by token: KV cache as a dict, a position is witnessed if any live entry is varied."""
    before, after = plain_runs(reference), plain_runs(variant)
    known: dict[tuple[str, int], list] = {}
    for name, token, row in before:
        known.setdefault((name, token), []).append(row)
    times: Counter = Counter()
    table = variant.requests
    prompt = dict(zip(table.id, table.prompt_tokens.tolist(), strict=True))
    length = dict(zip(reference.requests.id, reference.requests.length.tolist(), strict=True))
    before_facts, after_facts = plain_facts(reference), plain_facts(variant)
    cache: dict[str, dict[int, bool]] = {}
    ended: dict[str, int] = {}
    rewound: set[str] = set()
    found: dict[tuple[str, int], bool] = {}
    for name, token, row in after:
        if token == row["start"]:
            if token < ended.get(name, 0):
                rewound.add(name)
                cache[name] = {t: v for t, v in cache[name].items() if t < token}
            ended[name] = row["start"] + row["count"]
        rows = known.get((name, token))
        other = rows[min(times[name, token], len(rows) - 1)] if rows else None
        times[name, token] += 1
        differs = other is not None and other["others"] != row["others"]
        varied = {
            "beside": differs and bool(row["others"]),
            "composition": differs,
            "chunks": other is not None and token < prompt[name] and other["start"] != row["start"],
            "cached": after_facts[name][0] > 0 and before_facts.get(name, (0, 0))[0] == 0,
            "preempted": name in rewound and before_facts.get(name, (0, 0))[1] == 0,
        }[kind]
        cache.setdefault(name, {})[token] = varied
        position = token - prompt[name] + 1
        if 0 <= position < length.get(name, 0):
            found.setdefault((name, position), any(v for t, v in cache[name].items() if t <= token))
    return found


def plain_facts(traces: Traces) -> dict[str, tuple[int, int]]:
    """(cached tokens, preemptions) of each request."""
    table = traces.requests
    return {name: (int(table.cached_tokens[j]), int(table.preemptions[j])) for j, name in enumerate(table.id)}


def plain_runs(traces: Traces):
    steps = traces.steps
    by_step: dict[int, list[int]] = {}
    for i, step in enumerate(steps.step.tolist()):
        by_step.setdefault(step, []).append(i)
    for rows in by_step.values():
        for i in rows:
            others = Counter((int(steps.start[k] + steps.count[k]), int(steps.count[k])) for k in rows if k != i)
            row = {"start": int(steps.start[i]), "count": int(steps.count[i]), "others": others}
            for token in range(row["start"], row["start"] + row["count"]):
                yield traces.requests.id[int(steps.request[i])], token, row


@st.composite
def shapes(draw):
    count = draw(st.integers(1, 4))
    judged = [(draw(st.integers(1, 7)), draw(st.integers(1, 5)), False) for _ in range(count)]
    return judged, [(draw(st.integers(1, 7)), draw(st.integers(1, 6)), True) for _ in range(draw(st.integers(0, 2)))]


@st.composite
def runs(draw, judged, companions):
    requests = [*judged, *companions]
    hits = [draw(st.integers(0, prompt - 1)) if draw(st.booleans()) else 0 for prompt, _, _ in requests]
    traces = simulate(
        requests, seats=draw(st.integers(1, 4)), tokens=draw(st.integers(1, 9)),
        arrivals=[draw(st.integers(0, 6)) for _ in requests],
        preempt_at=draw(st.dictionaries(st.integers(1, 12), st.integers(0, 8), max_size=4)),
        cached=hits if draw(st.booleans()) else None,
    )  # fmt: skip
    order = draw(st.permutations(range(len(requests))))
    place = np.argsort(order).astype(np.int32)
    return replace(reorder(traces, order), steps=replace(traces.steps, request=place[traces.steps.request]))


@given(st.data(), st.sampled_from(KINDS))
@settings(max_examples=150)
def test_equals_the_definition_token_by_token(data, kind):
    judged, companions = data.draw(shapes())
    reference = data.draw(runs(judged, []))
    variant = data.draw(runs(judged, companions))
    witness = witnessed(reference, variant, kind)
    plain = plain_witness(reference, variant, kind)
    expected = [
        plain.get((name, p), False)
        for j, name in enumerate(reference.requests.id)
        for p in range(int(reference.requests.length[j]))
    ]
    assert witness.mask.tolist() == expected
    assert witness.per_request.sum() == witness.positions == sum(expected)


@given(st.data())
def test_an_honest_engine_is_never_contradicted(data):
    judged, companions = data.draw(shapes())
    assert check_claims(data.draw(runs(judged, companions))) == ()


@given(st.data())
def test_the_same_run_witnesses_nothing(data):
    judged, companions = data.draw(shapes())
    traces = data.draw(runs(judged, companions))
    for kind in ("beside", "composition", "chunks", "cached", "preempted"):
        assert witnessed(traces, traces, kind).positions == 0


ALONE = simulate([(4, 3, False), (3, 2, False)], seats=1, tokens=99, arrivals=[0, 0])


def test_only_what_attends_to_company_is_witnessed():
    late = simulate([(4, 3, False), (3, 2, False)], seats=2, tokens=99, arrivals=[0, 2])
    found = witnessed(ALONE, late, "beside")
    assert found.mask.tolist() == [False, False, True, True, True]
    assert found.per_request.tolist() == [1, 2]
    assert found.sentence == "computed beside other requests than the reference: 3 of 5 positions in 2 of 2 requests"


def test_company_that_was_thrown_away_does_not_count():
    """r1 begins beside r0, is preempted and computed anew alone: what follows attends to nothing varied."""
    variant = replace(
        simulate([(2, 2, False), (2, 3, False)], seats=2, tokens=99, arrivals=[0, 0]),
        steps=make_steps([(0, 0, 0, 2), (0, 1, 0, 2), (1, 0, 2, 1), (2, 1, 0, 3), (3, 1, 3, 1)]),
    )
    variant = recount(with_requests(variant, preemptions=np.array([0, 1], np.int32)))
    assert check_claims(variant) == ()
    reference = simulate([(2, 2, False), (2, 3, False)], seats=1, tokens=99, arrivals=[0, 0])
    assert witnessed(reference, variant, "beside").mask.tolist() == [True, True, True, False, False]
    assert witnessed(reference, variant, "preempted").mask.tolist() == [False, False, False, True, True]


def test_company_before_a_partial_rewind_stays():
    """Only the tail was computed anew: the first tokens, computed beside another, are still in the cache."""
    variant = replace(
        simulate([(2, 2, False), (4, 3, False)], seats=2, tokens=99, arrivals=[0, 0]),
        steps=make_steps([(0, 0, 0, 2), (0, 1, 0, 2), (1, 1, 2, 2), (2, 1, 2, 3), (3, 1, 5, 1), (4, 0, 2, 1)]),
    )
    reference = simulate([(2, 2, False), (4, 3, False)], seats=1, tokens=99, arrivals=[0, 0])
    assert witnessed(reference, variant, "beside").mask.tolist() == [True] * 5


def test_the_earliest_company_counts_through_several_rewinds():
    """Token 0 of r1 was computed beside r0; two rewinds throw later tokens out, one of them computed beside r0 too."""
    variant = replace(
        simulate([(2, 2, False), (4, 3, False)], seats=2, tokens=99, arrivals=[0, 0]),
        steps=make_steps(
            [(0, 0, 0, 2), (0, 1, 0, 2), (1, 1, 1, 2), (2, 0, 2, 1), (2, 1, 3, 1), (3, 1, 2, 3), (4, 1, 5, 1)]
        ),
    )
    reference = simulate([(2, 2, False), (4, 3, False)], seats=1, tokens=99, arrivals=[0, 0])
    assert witnessed(reference, variant, "beside").mask.tolist() == [True] * 5


def test_process_wide_axes_need_the_callers_reason():
    found = witnessed(ALONE, ALONE, "all", "threads 1 and 2 were observed")
    assert found.mask.all()
    assert found.sentence.startswith("threads 1 and 2 were observed: 5 of 5 positions")
    with pytest.raises(ComparisonError, match="needs the observation"):
        witnessed(ALONE, ALONE, "all")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["reference", "variant"])
def test_without_a_step_table_nothing_is_witnessed(kind, side):
    blind = replace(ALONE, steps=None)
    arms = (blind, ALONE) if side == "reference" else (ALONE, blind)
    found = witnessed(*arms, kind)
    assert found.positions == 0
    assert f"the {side} shows no step table" in found.sentence


def speaking(rows, tokens, **counts):
    """Two samples of one request of two prompt tokens, three outputs each."""
    traces = make_traces(("a", "a"), (3, 3), samples=[0, 1], prompts=[2, 2], steps=make_steps(rows))
    columns = {name: np.array(values, np.int32) for name, values in counts.items()}
    return replace(
        traces,
        requests=replace(traces.requests, **columns),
        positions=replace(traces.positions, token=np.array(tokens, np.int32)),
    )


SEPARATE = [(0, 0, 0, 2), (1, 0, 2, 1), (2, 0, 3, 1), (3, 1, 0, 2), (4, 1, 2, 1), (5, 1, 3, 1)]
TOGETHER = sorted((step % 3, *rest) for step, *rest in SEPARATE)
VERIFIED = [(0, 0, 0, 2), (1, 0, 2, 2), (3, 1, 0, 2), (4, 1, 2, 1), (5, 1, 3, 1)]


def test_samples_that_all_say_the_same_witness_nothing():
    apart, same = [1, 2, 3, 1, 2, 4], [1, 2, 3, 1, 2, 3]
    assert witnessed(speaking(SEPARATE, apart), speaking(TOGETHER, apart), "samples").positions == 6
    assert witnessed(speaking(SEPARATE, same), speaking(TOGETHER, same), "samples").positions == 0


def test_drafts_count_where_they_were_accepted_and_saved_a_row():
    tokens = [1, 2, 3, 1, 2, 4]
    plain = speaking(SEPARATE, tokens, drafted=[0, 0], accepted=[0, 0], rollbacks=[0, 0])
    helped = speaking(VERIFIED, tokens, drafted=[1, 0], accepted=[1, 0], rollbacks=[0, 0])
    assert witnessed(plain, helped, "drafts").mask.tolist() == [False, True, True, False, False, False]
    silent = speaking(VERIFIED, tokens, drafted=[1, 0], accepted=[0, 0], rollbacks=[0, 0])
    assert witnessed(plain, silent, "drafts").positions == 0
    as_many_rows = [(0, 0, 0, 2), (1, 0, 2, 2), (2, 0, 3, 1), *SEPARATE[3:]]
    idle = speaking(as_many_rows, tokens, drafted=[1, 0], accepted=[1, 0], rollbacks=[0, 0])
    assert witnessed(plain, idle, "drafts").positions == 0


def test_rollbacks_count_where_something_was_thrown_away():
    tokens = [1, 2, 3, 1, 2, 4]
    plain = speaking(SEPARATE, tokens, drafted=[0, 0], accepted=[0, 0], rollbacks=[0, 0])
    calm = speaking(VERIFIED, tokens, drafted=[1, 0], accepted=[1, 0], rollbacks=[0, 0])
    wrong = speaking(VERIFIED, tokens, drafted=[2, 0], accepted=[1, 0], rollbacks=[1, 0])
    assert witnessed(plain, calm, "rollbacks").positions == 0
    assert witnessed(plain, wrong, "rollbacks").positions == 2
