"""The planted faults of the selftest: what is planted, where, who must find it, and which verdict it must come to.

It does not run anything. Rules: every kind is planted at every place where it can hide (first and last request, first
and last position, first and last column); what is expected is written here by hand, never computed by what is tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from harness.faults import captures as faults
from harness.faults import step_lies
from harness.faults.captures import Place
from harness.faults.plants import (
    Fault,
    all_companions,
    contradict,
    control_becomes,
    drop_columns,
    edit_capture,
    edit_steps,
    locate,
    locate_in_natural,
    lose_variant,
    make_fault,
    not_restarted,
    on_all,
    on_role,
    on_varied,
    other_model,
    other_prompt,
    plant_at,
    plant_in_request,
    set_counter,
    set_value,
    shift_all_but_tokens,
    stop_early,
    without_reference_steps,
)  # fmt: skip
from harness.specimen import SHAPES, WIDTH, WITH_COMPANION, alone_traces

LAST = WIDTH - 1
PLACES = (
    ("first request, first position", Place("a", 0)),
    ("first request, last position", Place("a", -1)),
    ("middle request, middle position", Place("c", 2)),
    ("last request, first position", Place("d", 0)),
    ("last request, last position", Place("d", -1)),
)
COLUMNS = (
    ("first request, first position, first column", Place("a", 0, 0)),
    ("middle request, middle position, second column", Place("c", 2, 1)),
    ("last request, last position, last column", Place("d", -1, LAST)),
)
PAIRS = (
    ("first request, first position, first columns", Place("a", 0, 0)),
    ("last request, last position, last columns", Place("d", -1, LAST - 1)),
)
REQUESTS = ("a", "c", "d")


def list_faults() -> tuple[Fault, ...]:
    """Every fault, by kind and place."""
    return (
        *_value_faults(),
        *_not_a_number_faults(),
        *_choice_faults(),
        *_request_faults(),
        *_missing_faults(),
        *_claim_faults(),
        *_step_faults(),
        *_trial_faults(),
    )


def _value_faults() -> Iterator[Fault]:
    for where, place in PLACES:
        yield locate("one ulp in a chosen logprob", where, faults.ulp_in_logprob, place)
        yield locate("one bit of a logits digest", where, faults.wrong_digest, place)
    for where, place in COLUMNS:
        yield locate("one ulp in a top-k value", where, faults.ulp_in_topk, place)
        yield locate("another candidate's id", where, faults.wrong_candidate, place)
    for where, place in PAIRS:
        yield locate("two logits swapped", where, faults.swap_logits, place)
    (first, place), (last, tied) = PAIRS
    yield contradict("wrong top-k order", first, faults.swap_candidates, place)
    yield locate("wrong order of tied candidates", last, faults.swap_candidates, tied)
    zero = Place("b", 0, 0)
    yield locate("-0.0 for 0.0 in a chosen logprob", "certain token", set_value(faults.logprob_becomes, -0.0), zero)
    yield locate("-0.0 for 0.0 in a top-k value", "certain token", set_value(faults.topk_becomes, -0.0), zero)
    yield make_fault(
        "a shorter top-k list", "every position", "ERROR", "comparator", on_varied(faults.narrow_topk), ("a", 0)
    )


def _not_a_number_faults() -> Iterator[Fault]:
    for where, place in PLACES[::2]:
        yield contradict("NaN as a chosen logprob", where, set_value(faults.logprob_becomes, np.nan), place)
    for where, place in COLUMNS:
        yield contradict("NaN as a top-k value", where, set_value(faults.topk_becomes, np.nan), place)
    yield contradict(
        "infinity as a chosen logprob", PLACES[0][0], set_value(faults.logprob_becomes, np.inf), PLACES[0][1]
    )
    both = partial(on_all, lambda traces: faults.logprob_becomes(traces, Place("c", 2), np.nan))
    yield make_fault("NaN in every arm alike", "middle request, middle position", "ERROR", "claims", both)


def _choice_faults() -> Iterator[Fault]:
    for where, place in PLACES:
        yield locate("wrong pick", where, faults.wrong_pick, place)
        yield plant_at("wrong token on the forced path", where, "ERROR", "comparator", faults.wrong_token, place)
        yield locate_in_natural("wrong token in natural replay", where, faults.wrong_token, place)
    yield plant_at("no pick reported", PLACES[2][0], "ERROR", "comparator", faults.no_pick, PLACES[2][1])
    yield plant_at("no candidates listed", PLACES[2][0], "ERROR", "comparator", faults.no_candidates, PLACES[2][1])
    yield plant_at("no candidates listed", PLACES[4][0], "ERROR", "comparator", faults.no_candidates, PLACES[4][1])


def _request_faults() -> Iterator[Fault]:
    lengths = {shape.name: shape.length for shape in SHAPES}
    for name in REQUESTS:
        where = f"request {name}"
        yield plant_in_request("dropped request", name, "ERROR", lambda t, r: faults.recount(faults.drop_request(t, r)))
        yield plant_in_request("request reported twice", name, "ERROR", faults.duplicate_request)
        yield plant_in_request("renamed request", name, "ERROR", partial(faults.edit_request, id="other"))
        yield plant_in_request("another sample index", name, "ERROR", partial(faults.edit_request, sample=1))
        yield plant_in_request(
            "judged request marked as companion", name, "ERROR", partial(faults.edit_request, companion=True)
        )
        yield plant_in_request("another number of prompt tokens", name, "ERROR", other_prompt)
        yield plant_in_request("truncated request", name, "ERROR", faults.truncate_request, lengths[name] - 1)
        yield plant_in_request("stopped one token early", name, "FAIL", stop_early, lengths[name] - 1)
        yield plant_in_request("wrong finish reason", name, "FAIL", partial(faults.edit_request, finish_reason="stop"),
                       lengths[name] - 1)  # fmt: skip
        yield plant_in_request("positions shifted by one", name, "FAIL", shift_all_but_tokens, 0)
        abort = partial(faults.edit_request, request=name, finish_reason="abort")
        yield make_fault("aborted request", where, "ERROR", "claims", on_varied(abort))
    judged = partial(faults.edit_request, request="companion", companion=False)
    yield make_fault("companion reported as judged", "companion", "ERROR", "comparator", on_varied(judged))


def _missing_faults() -> Iterator[Fault]:
    for names in (("logprob",), ("topk_ids", "topk_logprobs"), ("topk_logprobs",), ("logits_digest",)):
        drop = partial(drop_columns, names=names)
        yield make_fault(f"missing {' and '.join(names)}", "whole column", "ERROR", "comparator", on_varied(drop))
        yield make_fault(f"missing {' and '.join(names)}", "both arms", "ERROR", "comparator", partial(on_all, drop))
    yield make_fault(
        "nothing judged", "all requests are companions", "ERROR", "comparator", partial(on_all, all_companions)
    )


def _claim_faults() -> Iterator[Fault]:
    for counter, lie in (("max_running", 64), ("steps", 1), ("tokens_computed", 10_000), ("preemptions", 3)):
        yield make_fault(f"counter {counter} lies", "variant", "ERROR", "claims", on_varied(set_counter(counter, lie)))
    claimed = partial(faults.edit_request, request="c", preemptions=1)
    yield make_fault("claims a preemption that no step shows", "request c", "ERROR", "claims",
                 on_varied(lambda traces: faults.recount(claimed(traces))))  # fmt: skip
    cached = partial(faults.edit_request, request="c", cached_tokens=4)
    yield make_fault("claims a cache hit that no step shows", "request c", "ERROR", "claims", on_varied(cached))


def _step_faults() -> Iterator[Fault]:
    for name, change in (
        ("steps leave a gap", step_lies.leave_gap),
        ("steps compute a token twice", step_lies.compute_twice),
        ("steps go back in time", step_lies.go_back),
        ("a request runs twice in one step", step_lies.run_twice_in_a_step),
        ("steps never ran a request", step_lies.never_run),
        ("steps stop short of the output", step_lies.stop_short),
        ("steps go past the output", step_lies.go_past),
        ("steps name an unknown request", step_lies.name_unknown),
        ("empty step table", step_lies.show_nothing),
    ):
        plant = partial(edit_steps, change=change, recount=True)  # the counters join in the lie
        yield make_fault(name, "variant", "ERROR", "claims", on_varied(plant))
    plant = partial(edit_steps, change=step_lies.show_together, recount=False)
    name = "steps show a batch that the counters deny"
    yield make_fault(name, "variant", "ERROR", "claims", on_varied(plant))
    no_steps = partial(faults.edit_steps, columns=None)
    yield make_fault("no step table", "variant", "INSUFFICIENT", "witness", on_varied(no_steps))
    yield make_fault("no step table", "reference", "INSUFFICIENT", "witness", without_reference_steps)
    alone = on_varied(lambda _: alone_traces(WITH_COMPANION))
    yield make_fault("ran one at a time after all", "variant", "INSUFFICIENT", "witness", alone)


def _trial_faults() -> Iterator[Fault]:
    """Faults of the trial itself: only the judge sees more than two captures."""
    ulp = partial(faults.ulp_in_logprob, place=Place("c", 2))
    yield make_fault(
        "floor differs by one ulp", "middle request", "FAIL", "judge", partial(on_role, role="floor", change=ulp)
    )
    for role in ("floor", "varied"):
        copied = partial(edit_capture, role=role, repetition_nonce="repetition of reference")
        yield make_fault("copied capture", role, "ERROR", "judge", copied)
    other = partial(edit_capture, role="floor", process_nonce="another process")
    yield make_fault("floor from another process", "floor", "ERROR", "judge", other)
    yield make_fault("undeclared fingerprint field", "varied", "INSUFFICIENT", "judge", other_model)
    silent = partial(control_becomes, role="control_varied", like="control_reference")
    yield make_fault("silent control", "control", "INSUFFICIENT", "judge", silent)
    yield make_fault("control that is only noise", "control", "INSUFFICIENT", "judge",
                 partial(control_becomes, role="control_floor", like="control_varied"))  # fmt: skip
    yield make_fault("control with a copied capture", "control", "INSUFFICIENT", "judge", partial(
        edit_capture, role="control_varied", repetition_nonce="repetition of control_reference"))  # fmt: skip
    yield make_fault("capture missing", "varied", "ERROR", "judge", lose_variant)
    yield make_fault("restart in the same process", "varied", "ERROR", "judge", not_restarted)
