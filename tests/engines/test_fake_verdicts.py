"""Every fault of the fake engine, captured for real and judged: each comes to its verdict, and says where."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from test_fake import REQUESTS, alone, generate, paths, start, together

from harness.expected import expected_of
from harness.judge import judge
from harness.specimen import make_capture, make_trial


@cache
def control(replay):
    """The same cell with results that follow the company: it must differ."""
    free = start(invariant=False)
    own = generate(free, alone())
    return {
        "control_reference": own,
        "control_floor": generate(free, alone()),
        "control_varied": generate(free, together(), golden=paths(own) if replay == "golden" else None),
    }


def judged(variant_engine, *, reference_engine=None, rule="topk", replay="golden"):
    """The verdict of alone vs together on the fake engine; reference and floor come from `reference_engine`."""
    reference_engine = reference_engine or start()
    reference = generate(reference_engine, alone())
    golden = paths(reference) if replay == "golden" else None
    trial = make_trial()
    cell = replace(trial.pair.cell, rule=rule, replay=replay)
    captures = {
        "reference": reference,
        "floor": generate(reference_engine, alone()),
        "varied": generate(variant_engine, together(), golden=golden),
        **control(replay),
    }
    expected = expected_of(REQUESTS, [request.id for request in REQUESTS])
    return judge(
        replace(trial.pair, cell=cell),
        {role: make_capture(role, traces) for role, traces in captures.items()},
        dict.fromkeys(captures, expected),
    )


@pytest.mark.parametrize("replay", ["golden", "natural"])
def test_an_honest_engine_passes(replay):
    verdict = judged(start(), replay=replay)
    assert verdict.verdict.value == "PASS", verdict.reason


@pytest.mark.parametrize("fault_position", [0, 2, -1])
@pytest.mark.parametrize("fault_request", ["a", "d"])
@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        ("one-ulp", "FAIL"),
        ("swap", "FAIL"),
        ("nan", "ERROR"),
        ("topk-order", "ERROR"),
        ("drop", "ERROR"),
        ("truncate", "ERROR"),
    ],
)
def test_faults_of_the_variant(fault, verdict, fault_request, fault_position):
    engine = start(fault=fault, fault_request=fault_request, fault_position=fault_position, fault_when="batched")
    found = judged(engine, reference_engine=engine)
    assert found.verdict.value == verdict, found.reason
    assert repr(fault_request) in found.reason
    if verdict == "FAIL":
        assert (found.diagnosis.first.request, found.diagnosis.first.position) == (fault_request, fault_position % 6)


def test_layers_of_the_fakes_faults():
    assert judged(start(fault="one-ulp")).diagnosis.layer == "forward"
    assert judged(start(invariant=False)).diagnosis.layer == "forward"


def test_a_lie_about_the_batch():
    found = judged(start(fault="lie-batch"))
    assert (found.verdict.value, "counter max_running claims 4, the tables show 1" in found.reason) == ("ERROR", True)
    assert judged(start(fault="lie-steps")).verdict.value == "ERROR"
    assert judged(start(max_num_seqs=1)).verdict.value == "INSUFFICIENT"


def test_a_copied_capture_and_noise():
    copier = start(fault="copy")
    found = judged(copier, reference_engine=copier)
    assert (found.verdict.value, "0 positions witnessed" in found.reason) == ("INSUFFICIENT", True)
    noisy = start(fault="noise")
    found = judged(noisy, reference_engine=noisy)
    assert (found.verdict.value, "run-to-run" in found.reason) == ("FAIL", True)
