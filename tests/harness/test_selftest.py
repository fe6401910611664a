"""The selftest kills every fault, and notices when a part of the harness has been broken."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from harness import claims, judge, selftest, witness
from harness.compare import fields, scan
from harness.faults.listing import list_faults
from harness.selftest import run_selftest
from harness.specimen import alone_traces, make_trial, together_traces
from harness.witness import Witness


def test_every_fault_is_killed():
    result = run_selftest()
    assert result.survivors == ()
    assert result.planted == result.killed >= 100
    assert result.kinds >= 30
    assert result.text() == f"{result.planted} of {result.planted} killed ({result.kinds} kinds of faults)"


def test_the_untouched_trial_passes():
    trial = make_trial()
    assert judge.judge(trial.pair, trial.captures, trial.expected).verdict.value == "PASS"
    assert claims.check_claims(alone_traces()) == claims.check_claims(together_traces()) == ()


def test_every_fault_is_listed_once_and_every_finder_and_verdict_occurs():
    listed = list_faults()
    assert not [key for key, n in Counter((fault.name, fault.place) for fault in listed).items() if n > 1]
    assert {fault.found_by for fault in listed} == {"comparator", "claims", "witness", "judge"}
    assert {fault.expected for fault in listed} == {"FAIL", "ERROR", "INSUFFICIENT"}


def survivors() -> set[str]:
    return {survivor.name for survivor in run_selftest().survivors}


@pytest.mark.parametrize(
    ("field", "kind"),
    [("pick", "wrong pick"), ("logprob", "one ulp in a chosen logprob"), ("topk_ids", "another candidate's id"),
     ("topk_logprobs", "one ulp in a top-k value"), ("tensors", "one bit of a logits digest")],
)  # fmt: skip
def test_a_comparator_that_forgets_a_field_is_noticed(monkeypatch, field, kind):
    whole = fields.position_fields
    monkeypatch.setattr(scan, "position_fields", lambda rule: tuple(f for f in whole(rule) if f != field))
    if field == "pick":
        monkeypatch.setattr(scan, "_count_listed", lambda *_: 1)
        monkeypatch.setattr(scan.Scan, "choice", "logprob")
    assert kind in survivors()


def test_a_comparator_of_values_instead_of_bits_is_noticed(monkeypatch):
    exact = fields.bits
    monkeypatch.setattr(fields, "bits", lambda column: exact(column + column.dtype.type(0)))
    assert survivors() == {"-0.0 for 0.0 in a chosen logprob", "-0.0 for 0.0 in a top-k value"}


def test_a_comparator_of_the_first_request_only_is_noticed(monkeypatch):
    whole = scan.Scan.runs
    monkeypatch.setattr(
        scan.Scan, "runs", lambda self, counts: whole(self, np.where(np.arange(len(counts)), 0, counts))
    )
    found = run_selftest().survivors
    assert {survivor.place.split(",")[0] for survivor in found if "ulp" in survivor.name} >= {
        "last request",
        "middle request",
    }


def test_claims_that_are_not_checked_are_noticed(monkeypatch):
    monkeypatch.setattr(judge, "check_claims", lambda _: ())
    monkeypatch.setattr(selftest, "check_claims", lambda _: ())
    found = survivors()
    assert {"counter max_running lies", "steps leave a gap", "NaN in every arm alike", "aborted request"} <= found


def test_claims_only_the_judge_forgets_are_noticed(monkeypatch):
    monkeypatch.setattr(judge, "check_claims", lambda _: ())
    assert "NaN in every arm alike" in survivors()


def test_a_witness_that_sees_company_everywhere_is_noticed(monkeypatch):
    def everywhere(reference, variant, kind, reason=""):
        honest = witness.witnessed(reference, variant, kind, reason)
        return Witness(kind=kind, mask=~np.zeros_like(honest.mask), keys=honest.keys,
                       per_request=honest.per_request, sentence="everywhere")  # fmt: skip

    monkeypatch.setattr(judge, "witnessed", everywhere)
    assert {"no step table", "ran one at a time after all"} <= survivors()


def test_a_judge_that_does_not_look_at_nonces_is_noticed(monkeypatch):
    monkeypatch.setattr(judge, "_nonce_mistake", lambda *_: None)
    assert {"copied capture", "floor from another process", "restart in the same process"} <= survivors()


def test_a_trial_that_does_not_pass_untouched_is_a_survivor(monkeypatch):
    trial = make_trial()
    monkeypatch.setattr(selftest, "make_trial", lambda: list_faults()[0].plant(trial))
    assert "nothing planted" in survivors()
