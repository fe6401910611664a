"""The whole story, as a release manager lives it: a baseline, a change, an approval, and all that can go wrong."""

import json
import re
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from release_making import allow, make_key, samebits

ALICE, BOB = "alice@example.org", "bob@example.org"
CELL = "process-restart"
LABEL = "process-restart[same-new]"


def nightly(story, name, *options):
    return samebits("nightly", "quick", "--cell", CELL, "--engine", "fake", "--history", story / "history",
                    "--out", story / name, "--quiet", *options)  # fmt: skip


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """A project with a baseline, an unchanged night, a changed night, and a signed approval of the change."""
    folder = tmp_path_factory.mktemp("story")
    alice, bob = make_key(folder, "alice"), make_key(folder, "bob")
    allow(folder / "allowed", (ALICE, alice, 'namespaces="samebits-approval"'))
    allow(folder / "both", (ALICE, alice, ""), (BOB, bob, ""))
    first = nightly(folder, "night1")
    assert (first.code, "no baseline yet" in first.out) == (3, True), first
    accepted = samebits("baseline", "accept", folder / "night1", "--reason", "first release", "--author", ALICE,
                        "--baselines", folder / "history" / "baselines")  # fmt: skip
    assert accepted.code == 0, accepted
    second = nightly(folder, "night2")
    assert (second.code, f"{LABEL}: unchanged environment, same bits" in second.out) == (0, True), second
    third = nightly(folder, "night3", "--set", "invariant=false")
    assert third.code == 1, third
    assert "changed: config.invariant: true -> false" in third.out
    approved = samebits(
        "approve",
        folder / "night3",
        CELL,
        "--reason",
        "the new kernels are worth it",
        "--expires",
        "30d",
        "--author",
        ALICE,
        "--key",
        alice,
        "--approvals",
        folder / "approvals",
    )
    assert approved.code == 0, approved
    return folder


def gate(story, approvals, *options, signers="allowed", run="night3", out="gated"):
    return samebits("gate", story / run, "--baselines", story / "history" / "baselines", "--approvals", approvals,
                    "--allowed-signers", story / signers, "--out", story / out, *options)  # fmt: skip


@pytest.fixture
def approvals(story, tmp_path):
    """A copy of the approvals to break; returns (folder, the approval's file)."""
    shutil.copytree(story / "approvals", tmp_path / "approvals")
    (file,) = (tmp_path / "approvals").rglob("*.toml")
    return tmp_path / "approvals", file


def test_without_an_approval_the_drift_fails_and_names_the_field(story):
    ended = samebits("gate", story / "night3", "--baselines", story / "history" / "baselines", "--out", story / "plain")
    assert ended.code == 1
    assert f"1 cell FAILED and nobody has signed for it: {LABEL}" in ended.out
    assert "config.invariant: true -> false" in ended.out
    assert samebits("gate", story / "night3", "--out", story / "plain").code == 0  # no baselines: the run alone passes


def test_the_nightly_attributes_the_drift_to_the_first_night_that_has_it(story):
    fourth = nightly(story, "night4", "--set", "invariant=false")
    assert fourth.code == 1
    started = json.loads((story / "night3" / "run.json").read_text())["started"]
    assert f"{LABEL}: drifts since the run of {started}" in fourth.out
    assert "changed: config.invariant: true -> false" in fourth.out
    assert LABEL in (story / "night4" / "trend.html").read_text()


def test_the_approval_says_what_was_approved(story):
    (file,) = (story / "approvals").rglob("*.toml")
    text = file.read_text()
    for part in (f'cell = "{CELL}"', 'variant = "same-new"', 'engine = "fake"', 'kind = "drift"', f'author = "{ALICE}"',
                 "config.invariant: true -> false", 'size = "', "ulp", 'reason = "the new kernels are'):  # fmt: skip
        assert part in text
    assert file.parent.name == CELL


def test_signed_for_the_gate_passes_and_every_report_says_approved(story, approvals):
    ended = gate(story, approvals[0])
    assert ended.code == 0, ended
    assert f"APPROVED      {LABEL}: approved until" in ended.out
    assert f"signed by {ALICE}" in ended.out
    record = json.loads((story / "gated" / "gate.json").read_text())
    assert (record["schema"], record["exit_code"], record["rows"][0]["outcome"]) == (1, 0, "APPROVED")
    assert "signed by alice" in (story / "gated" / "gate.md").read_text().replace("\u200b", "")
    assert "APPROVED" in (story / "gated" / "gate" / "report.html").read_text()
    assert json.loads((story / "night3" / "run.json").read_text())["verdicts"][0]["verdict"] == "PASS"


def test_one_changed_byte_of_the_approval_is_exit_5(story, approvals):
    folder, file = approvals
    text = file.read_text()
    file.write_text(text.replace("worth it", "worth lt"))
    ended = gate(story, folder)
    assert ended.code == 5
    assert "the signature is not one of this file's bytes; the approval was changed after it was signed" in ended.out


@pytest.mark.parametrize("place", range(0, 1000, 97))
def test_no_changed_byte_ever_makes_the_gate_pass(story, approvals, place):
    folder, file = approvals
    content = bytearray(file.read_bytes())
    content[place % len(content)] ^= 1
    file.write_bytes(content)
    assert gate(story, folder).code in (1, 5)


def test_a_changed_byte_of_the_signature_is_exit_5(story, approvals):
    folder, file = approvals
    place = file.with_name(file.name + ".sig")
    lines = place.read_text().splitlines()
    lines[3] = lines[3][:10] + ("A" if lines[3][10] != "A" else "B") + lines[3][11:]
    place.write_text("\n".join(lines) + "\n")
    ended = gate(story, folder)
    assert (ended.code, "does not hold" in ended.out) == (5, True)


def test_an_expired_approval_is_exit_5(story, approvals, tmp_path):
    folder, file = approvals
    past = datetime.now(UTC) - timedelta(days=1)
    text = re.sub(r"created = .*", f"created = {past - timedelta(days=2):%Y-%m-%dT%H:%M:%SZ}", file.read_text())
    file.write_text(re.sub(r"expires = .*", f"expires = {past:%Y-%m-%dT%H:%M:%SZ}", text))
    resign(story, file, "alice")
    ended = gate(story, folder)
    assert (ended.code, f"it expired on {past:%Y-%m-%d}" in ended.out) == (5, True)


def test_a_key_that_is_not_allowed_is_exit_5(story, approvals):
    folder, file = approvals
    resign(story, file, "bob")
    ended = gate(story, folder)
    assert (ended.code, "the key is not among the allowed signers" in ended.out) == (5, True)
    other = gate(story, folder, signers="both")
    assert (other.code, f"it names {ALICE} as its author, who has not signed it" in other.out) == (5, True)


def test_another_digest_is_exit_5_even_when_it_is_signed(story, approvals):
    folder, file = approvals
    file.write_text(re.sub(r'new = "....', 'new = "0000', file.read_text()))
    resign(story, file, "alice")
    ended = gate(story, folder)
    assert (ended.code, "another difference; judge that one and approve anew" in ended.out) == (5, True)


def test_a_missing_signature_is_exit_5_unless_the_policy_allows_it_and_then_it_is_marked(story, approvals, tmp_path):
    folder, file = approvals
    file.with_name(file.name + ".sig").unlink()
    ended = gate(story, folder)
    assert (ended.code, "it is not signed; sign it with `samebits cosign`" in ended.out) == (5, True)
    (tmp_path / "gate.toml").write_text("schema = 1\n[allow]\nunsigned_approvals = true\n")
    allowed = gate(story, folder, "--policy", tmp_path / "gate.toml", out="unsigned")
    assert (allowed.code, "NOT SIGNED" in allowed.out) == (0, True)
    assert "NOT SIGNED" in (story / "unsigned" / "gate.md").read_text()
    assert "is NOT SIGNED" in (story / "unsigned" / "gate" / "report.html").read_text()
    assert "NOT SIGNED" in (story / "unsigned" / "gate" / "summary.md").read_text()


def test_two_signers_meet_a_threshold_of_two(story, approvals, tmp_path):
    folder, file = approvals
    (tmp_path / "gate.toml").write_text("schema = 1\n[approvals]\nsigners = 2\nauthor_alone = false\n")
    options = ("--policy", tmp_path / "gate.toml")
    assert gate(story, folder, *options, signers="both").code == 5
    assert samebits("cosign", file, "--key", story / "bob").code == 0
    ended = gate(story, folder, *options, signers="both")
    assert (ended.code, f"signed by {ALICE}, {BOB}" in ended.out) == (0, True)


def test_reverted_the_approval_is_obsolete_and_the_gate_passes(story, approvals):
    ended = gate(story, approvals[0], run="night2")
    assert (ended.code, "obsolete approval" in ended.out, "the cell passes now; remove it" in ended.out) == (
        0,
        True,
        True,
    )


def test_continuous_integration_never_writes_approvals(story, tmp_path):
    ended = samebits("approve", story / "night3", CELL, "--reason", "x", "--expires", "1d", "--unsigned", "--author",
                     ALICE, "--approvals", tmp_path, CI="true")  # fmt: skip
    assert (ended.code, "approvals are written by people" in ended.err) == (2, True)
    (file,) = (story / "approvals").rglob("*.toml")
    assert samebits("cosign", file, "--key", story / "bob", CI="1").code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["night2", CELL, "--expires", "1d"], "nothing to approve: its verdict is PASS and no drift is on record"),
        (["night3", "process-restrat", "--expires", "1d"], "did you mean 'process-restart'"),
        (["night3", CELL, "--expires", "soon"], "expected a date such as 2026-12-31, or days such as 30d"),
        (["night3", CELL, "--expires", "2020-01-01"], "expected a time in the future"),
        (["night3", CELL, "--expires", "1d", "--key", "nokey"], "no such file; give your SSH private key"),
    ],
)
def test_what_cannot_be_approved_is_said_and_exit_2(story, tmp_path, arguments, message):
    ended = samebits("approve", story / arguments[0], *arguments[1:], "--reason", "x", "--author", ALICE,
                     *([] if "--key" in arguments else ["--unsigned"]), "--approvals", tmp_path)  # fmt: skip
    assert ended.code == 2
    assert message in ended.err


def test_the_same_difference_is_not_approved_twice(story):
    ended = samebits("approve", story / "night3", LABEL, "--reason", "x", "--expires", "1d", "--author", ALICE,
                     "--unsigned", "--approvals", story / "approvals")  # fmt: skip
    if ended.code == 0:  # filed on another day
        return
    assert "this difference is approved there already" in ended.err


def test_annotations_are_for_github_actions(story, approvals):
    plain, actions = gate(story, approvals[0]), gate(story, approvals[0], "--annotations")
    assert "::notice" not in plain.out
    assert "::notice title=samebits gate::1 APPROVED" in actions.out


def resign(story, file, key):
    """Signs a file anew in place of its signature."""
    file.with_name(file.name + ".sig").unlink()
    assert samebits("cosign", file, "--key", Path(story) / key).code == 0
