"""The gate's decision and its policy: every row of the exit-code table, and every demand of a policy."""

import dataclasses
from datetime import UTC, datetime

import pytest
from release_making import DIGEST, run_of, verdict
from test_approval_ruling import ALICE, APPROVAL

from harness.approval.ruling import Filed, Terms
from harness.baseline.drift import Drift
from harness.errors import UsageError
from harness.release.decision import decide_gate, with_change_author
from harness.release.policy import Policy, parse_policy, read_policy

NOW = datetime(2026, 3, 15, tzinfo=UTC)
LABEL = "restart[same-new]"
DRIFT = Drift(outcome="different", sentence="12 of 12 requests differ", old=DIGEST["a"], new=DIGEST["b"],
              suspects=("package.torch: 1 -> 2",))  # fmt: skip
SAME = Drift(outcome="same", sentence="unchanged environment, same bits", old=DIGEST["a"], new=DIGEST["a"])
NONE = Drift(outcome="no baseline", sentence="no baseline yet")


def approval(*signatures, **changes):
    return Filed(name="restart/a.toml", folder="restart", approval=dataclasses.replace(APPROVAL, **changes), mistake="",
                 signatures=signatures or (ALICE,))  # fmt: skip


def decided(*verdicts, drifts=None, filed=(), policy=None, **changes):
    return decide_gate(run_of(*verdicts, **changes), drifts or {}, filed, policy or Policy(), NOW)


@pytest.mark.parametrize(
    ("names", "code"),
    [
        (["PASS", "PASS"], 0),
        (["PASS", "FAIL"], 1),
        (["PASS", "INSUFFICIENT"], 3),
        (["PASS", "UNSUPPORTED"], 3),
        (["FAIL", "INSUFFICIENT", "UNSUPPORTED"], 1),
        (["FAIL", "ERROR"], 4),
    ],
)
def test_exit_codes_without_any_option(names, code):
    found = decided(*(verdict(f"c{i}[1-2]", name) for i, name in enumerate(names)))
    assert found.exit_code == code


def test_a_foreseen_unsupported_needs_a_pass_beside_it():
    foreseen = verdict("c[1-2]", "UNSUPPORTED", foreseen=True, digests={})
    assert decided(foreseen).exit_code == 3
    assert decided(foreseen, verdict()).exit_code == 0


def test_pairs_that_were_planned_and_not_judged_are_not_green():
    found = decided(verdict(), planned=3)
    assert (found.exit_code, found.sentence) == (3, "2 of 3 planned pairs were not judged")


def test_an_expected_failure_is_kept_unless_it_drifts():
    kept = verdict(name="FAIL", expected="FAIL")
    assert decided(kept).exit_code == 0
    assert decided(kept, drifts={LABEL: DRIFT}).exit_code == 1


def test_a_drift_fails_a_cell_that_passed_and_names_what_changed():
    found = decided(verdict(), drifts={LABEL: DRIFT})
    assert found.exit_code == 1
    assert found.rows[0].outcome == "FAIL"
    assert found.rows[0].reasons == ("drift: 12 of 12 requests differ",)


def test_an_approved_drift_is_approved_and_an_approved_drift_alone_does_not_cover_a_failure():
    found = decided(verdict(), drifts={LABEL: DRIFT}, filed=[approval()])
    assert (found.exit_code, found.rows[0].outcome) == (0, "APPROVED")
    assert found.rows[0].reasons == ("approved until 2026-04-01, signed by alice: new kernels",)
    both = decided(verdict(name="FAIL"), drifts={LABEL: DRIFT}, filed=[approval()])
    assert (both.exit_code, both.rows[0].outcome, both.rows[0].reasons) == (1, "FAIL", ("because FAIL",))


def test_a_failure_between_the_arms_is_approved_by_its_own_digests():
    found = decided(verdict(name="FAIL"), filed=[approval(kind="difference")])
    assert (found.exit_code, found.rows[0].outcome) == (0, "APPROVED")


def test_an_invalid_approval_outranks_a_failure_and_an_error_outranks_it():
    expired = approval(expires=NOW)
    assert decided(verdict(), drifts={LABEL: DRIFT}, filed=[expired]).exit_code == 5
    failed = decided(verdict(), verdict("x[1-2]", "FAIL"), drifts={LABEL: DRIFT}, filed=[expired])
    assert failed.exit_code == 5
    assert decided(verdict(), verdict("x[1-2]", "ERROR"), drifts={LABEL: DRIFT}, filed=[expired]).exit_code == 4


def test_an_obsolete_approval_is_reported_and_does_not_block():
    found = decided(verdict(), filed=[approval(expires=NOW)])
    assert found.exit_code == 0
    assert found.obsolete[0].sentence == "the cell passes now; remove it"


def test_an_unsigned_approval_is_marked_in_reasons_and_warnings():
    unsigned = Filed(name="restart/a.toml", folder="restart", approval=APPROVAL, mistake="", signatures=())
    found = decided(verdict(), drifts={LABEL: DRIFT}, filed=[unsigned], policy=Policy(terms=Terms(unsigned=True)))
    assert found.exit_code == 0
    assert "NOT SIGNED, in the name of alice" in found.rows[0].reasons[0]
    assert found.warnings == (f"{LABEL} rests on an approval that is NOT SIGNED (restart/a.toml)",)


def test_the_change_author_that_ci_knows_cannot_be_the_only_signer():
    policy = with_change_author(Policy(terms=Terms(author_alone=False)), "alice")
    filed = [approval(change_author="somebody-else")]
    assert decided(verdict(), drifts={LABEL: DRIFT}, filed=filed, policy=policy).exit_code == 5
    assert (
        decided(verdict(), drifts={LABEL: DRIFT}, filed=filed, policy=Policy(terms=Terms(author_alone=False))).exit_code
        == 0
    )


def test_no_baseline_is_never_green_by_itself():
    found = decided(verdict(), drifts={LABEL: NONE})
    assert (found.exit_code, found.rows[0].outcome) == (3, "INSUFFICIENT")
    assert decided(verdict(), drifts={LABEL: NONE}, policy=Policy(missing_baselines=True)).exit_code == 0
    assert decided(verdict(), drifts={LABEL: SAME}).exit_code == 0


def test_a_baseline_of_another_corpus_is_not_held_silently():
    apart = Drift(outcome="incomparable", sentence="the baseline was made with another corpus")
    assert decided(verdict(), drifts={LABEL: apart}).rows[0].reasons == ("the baseline was made with another corpus",)


def test_cells_that_were_left_out_are_said_and_may_be_refused():
    """One cell of a matrix must not pass for the matrix."""
    part = {"matrix": {"name": "release", "path": "cells/release", "digest": DIGEST["d"], "left_out": ["a", "b"]}}
    found = decided(verdict(), **part)
    assert (found.exit_code, found.sentence) == (0, "1 PASS; 2 cells of matrix release left out by --cell")
    found = decided(verdict(), policy=Policy(left_out_cells=False), **part)
    assert found.exit_code == 3
    assert found.sentence.startswith("the policy wants whole matrices, and these cells were left out: a, b")


def test_a_rule_for_a_corpus_holds_for_its_views():
    seeded = {"corpus": verdict()["corpus"] | {"name": "quick:seeded"}, "rule": "tokens"}
    assert decided(verdict(**seeded), policy=Policy(rules={"quick": "topk"})).exit_code == 3
    named = Policy(rules={"quick": "topk", "quick:seeded": "tokens"})
    assert decided(verdict(**seeded), policy=named).exit_code == 0


def test_demands_that_meet_no_cell_are_said():
    """A typing mistake in a policy must not pass for a demand that was met."""
    found = decided(verdict(), policy=Policy(rules={"quikc": "topk", "quick": "topk"}, block=("restrat", "restart")))
    assert found.exit_code == 0
    assert found.warnings == (
        "the policy's rule for corpus 'quikc' met no cell of this run",
        "the policy's block = 'restrat' met no cell of this run",
    )


@pytest.mark.parametrize(
    ("policy", "changes", "reason"),
    [
        (
            Policy(rules={"quick": "tensors"}),
            {},
            "judged under rule topk, and the policy demands tensors on corpus quick",
        ),
        (Policy(comparisons=6000), {}, "5136 elements compared, and the policy demands 6000"),
        (Policy(witnessed=300), {}, "288 positions witnessed, and the policy demands 300"),
        (
            Policy(weak_corpora=False),
            {"corpus": {"name": "smoke", "digest": DIGEST["c"], "weak": "weak corpus: short"}},
            "the policy does not count this corpus: weak corpus: short",
        ),
        (
            Policy(comparator_only_controls=False),
            {"control": {"kind": "planted", "fired": True}},
            "the policy does not count a control of the comparator only",
        ),
    ],
)
def test_evidence_that_the_policy_refuses_is_insufficient(policy, changes, reason):
    assert decided(verdict(**changes)).exit_code == 0
    found = decided(verdict(**changes), policy=policy)
    assert (found.exit_code, found.rows[0].outcome, found.rows[0].reasons) == (3, "INSUFFICIENT", (reason,))


@pytest.mark.parametrize(
    ("cost", "code", "sentence"),
    [
        ({"slowdown": 1.2}, 0, "1 PASS"),
        ({"slowdown": 1.6}, 3, "cost slowdown is 1.6, above the 1.5 the policy allows"),
        ({"slowdown": float("nan")}, 3, "cost slowdown is nan, above the 1.5 the policy allows"),
        (None, 3, "cost slowdown is limited to 1.5 and the run did not measure it"),
    ],
)
def test_a_cost_above_its_limit_or_not_measured_is_not_green(cost, code, sentence):
    found = decided(verdict(), cost=cost, policy=Policy(cost={"slowdown": 1.5}))
    assert (found.exit_code, found.sentence) == (code, sentence)


def test_cells_that_warn_do_not_block_and_are_said():
    policy = Policy(warn=("native-*",))
    found = decided(verdict("native-a[1-2]", "FAIL"), verdict(), policy=policy)
    assert (found.exit_code, found.sentence) == (0, "1 PASS, 1 only warned about")
    assert found.warnings == ("native-a[1-2] is FAIL and only warns: because FAIL",)
    alone = decided(verdict("native-a[1-2]", "PASS"), policy=policy)
    assert (alone.exit_code, alone.sentence) == (3, "nothing that blocks passed")
    assert (
        decided(verdict("native-a[1-2]", "FAIL"), policy=dataclasses.replace(policy, block=("native-a",))).exit_code
        == 1
    )


def test_a_policy_file_reads_and_every_mistake_is_said_at_once(tmp_path):
    file = tmp_path / "gate.toml"
    file.write_text('schema = 1\n[cells]\nwarn = ["x"]\n[rules]\nquick = "topk"\n[least]\nwitnessed = 5\n'
                    '[allow]\nweak_corpora = false\n[approvals]\nsigners = 2\nauthor_alone = false\nlongest_days = 90\n'
                    '[cost]\nslowdown = 2\n')  # fmt: skip
    policy = read_policy(file)
    assert (policy.warn, policy.rules, policy.witnessed, policy.weak_corpora) == (("x",), {"quick": "topk"}, 5, False)
    assert policy.terms == Terms(signers=2, author_alone=False, longest_days=90)
    assert policy.cost == {"slowdown": 2.0}
    bad = {"schema": 1, "cell": {}, "rules": {"quick": "topkk"}, "least": {"witnessed": -1}, "allow": {"weak": True},
           "approvals": {"signers": 0, "longest_days": 0}, "cost": {"slowdown": True}}  # fmt: skip
    with pytest.raises(UsageError) as error:
        parse_policy(bad, "gate.toml")
    text = str(error.value)
    for place in ("$.cell", "$.rules.quick", "$.least.witnessed", "$.allow.weak", "$.approvals.signers",
                  "$.approvals.longest_days", "$.cost.slowdown"):  # fmt: skip
        assert f"gate.toml: {place}" in text
    assert "did you mean 'cells'" in text


def test_a_policy_that_contradicts_itself_or_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be demanded while unsigned approvals are allowed"):
        parse_policy({"schema": 1, "allow": {"unsigned_approvals": True}, "approvals": {"signers": 2}}, "p")
    with pytest.raises(UsageError, match="cannot be read"):
        read_policy(tmp_path / "nothing.toml")
    with pytest.raises(UsageError, match="missing; write `schema = 1`"):
        parse_policy({}, "p")
