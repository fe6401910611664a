"""The gate's pull-request comment and annotations: what people wrote cannot end its place or forge a command."""

import dataclasses

from release_making import run_of, verdict
from test_approval_ruling import ALICE, APPROVAL
from test_release_decision import DRIFT, LABEL, NOW

from harness.approval.ruling import Filed
from harness.release.decision import decide_gate
from harness.release.gate_record import drift_of, gate_record
from harness.release.policy import Policy
from reports.gate_comment import LIMIT, gate_annotations, gate_comment

NASTY = "x\n::error::forged\n@somebody `<b>` | **bold** [a](http://e.example)%0A"


def gate(*verdicts, filed=(), drifts=None, policy=None):
    run = run_of(*(verdicts or (verdict(),)))
    return gate_record(run, decide_gate(run, drifts or {}, filed, policy or Policy(), NOW))


def approval(**changes):
    return Filed(name="restart/a.toml", folder="restart", approval=dataclasses.replace(APPROVAL, **changes), mistake="",
                 signatures=(ALICE,))  # fmt: skip


def test_an_accepted_run_says_so_first():
    text = gate_comment(gate())
    assert text.startswith("## ✅ samebits gate: accepted\n\n1 PASS (exit code 0)")
    assert f"| PASS | `{LABEL}` | PASS | not held |" in text


def test_what_blocks_what_is_approved_and_what_is_obsolete_have_their_lists():
    blocked = gate_comment(gate(drifts={LABEL: DRIFT}))
    assert "**Blocks**\n\n- `restart[same-new]` FAIL: drift: 12 of 12 requests differ" in blocked
    assert "| FAIL | `restart[same-new]` | PASS | DRIFT, environment changed |" in blocked
    signed = gate_comment(gate(drifts={LABEL: DRIFT}, filed=[approval()]))
    assert "**Approved**\n\n- `restart[same-new]` (drift), signed by alice, until 2026-04-01: new kernels" in signed
    assert "**Obsolete approvals**" in gate_comment(gate(filed=[approval()]))
    invalid = gate_comment(gate(drifts={LABEL: DRIFT}, filed=[approval(expires=NOW)]))
    assert "**Approvals that cannot be honoured**\n\n- `restart/a.toml`: it expired on 2026-03-15" in invalid


def test_nothing_that_people_wrote_gets_out_of_its_place():
    record = gate(verdict(name="FAIL", reason=NASTY), filed=[approval(reason=NASTY)], drifts={LABEL: DRIFT})
    text = gate_comment(record)
    assert "\n::error" not in text
    assert "<b>" not in text.replace("\\<b", "")
    assert "@somebody" not in text
    lines = gate_annotations(record).splitlines()
    assert all(line.startswith(("::error title=", "::warning title=", "::notice title=")) for line in lines)
    assert len(lines) == 2
    assert "x%0A::error::forged%0A@somebody" in lines[1]
    assert lines[1].endswith("e.example)%250A; drift: 12 of 12 requests differ") or "%250A" in lines[1]


def test_a_comment_stays_under_the_size_that_is_accepted():
    many = [verdict(f"c{i}[{'v' * 200}]", "FAIL", reason="r" * 400) for i in range(400)]
    text = gate_comment(gate(*many))
    assert len(text.encode()) <= LIMIT
    assert "…cut to the size of a comment; `gate.json` holds all of it." in text


def test_the_recorded_drift_reads_back():
    assert drift_of(gate(drifts={LABEL: DRIFT}), LABEL) == DRIFT
    assert drift_of(gate(), LABEL) is None
