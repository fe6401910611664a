"""What approvals rule: one sentence for each way in which one cannot be honoured."""

import dataclasses
from datetime import UTC, datetime, timedelta

import pytest
from release_making import DIGEST

from harness.approval.record import Approval
from harness.approval.ruling import Difference, Filed, Scope, Terms, rule
from harness.approval.signature import Signature

NOW = datetime(2026, 3, 15, tzinfo=UTC)
LABEL = "restart[same-new]"
APPROVAL = Approval(
    cell="restart", variant="same-new", engine="fake", model="fake", kind="drift", rule="topk", corpus=DIGEST["c"],
    old=DIGEST["a"], new=DIGEST["b"], changed=(), size="", cause="", reason="new kernels", author="alice",
    change_author="alice", created=datetime(2026, 3, 1, tzinfo=UTC), expires=datetime(2026, 4, 1, tzinfo=UTC),
)  # fmt: skip
DIFFERENCE = Difference(label=LABEL, kind="drift", rule="topk", corpus=DIGEST["c"], old=DIGEST["a"], new=DIGEST["b"])
SCOPE = Scope(engine="fake", model="fake", labels={LABEL, "other[1-2]"}, cells={"restart", "other"})
ALICE = Signature(file="a.sig", intact=True, signer="alice", key="K1")
BOB = Signature(file="b.sig", intact=True, signer="bob", key="K2")


def filed(*signatures, name="restart/a.toml", folder="restart", unchecked="", **changes):
    approval = dataclasses.replace(APPROVAL, **changes)
    return Filed(name=name, folder=folder, approval=approval, mistake="", signatures=signatures, unchecked=unchecked)


def ruled(*items, terms=None, differences=(DIFFERENCE,), now=NOW):
    return rule(items, SCOPE, differences, terms or Terms(), now)


def fault(*items, **arguments):
    rulings = ruled(*items, **arguments)
    assert rulings.approved == ()
    assert rulings.obsolete == ()
    (note,) = rulings.invalid
    return note.sentence


def test_a_good_approval_covers_exactly_its_difference():
    rulings = ruled(filed(ALICE))
    (approved,) = rulings.approved
    assert (approved.difference, approved.signers, approved.name) == (DIFFERENCE, ("alice",), "restart/a.toml")
    assert rulings.invalid == rulings.obsolete == ()


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        (filed(), "it is not signed; sign it with `samebits cosign`"),
        (
            filed(
                dataclasses.replace(
                    ALICE, intact=False, signer=None, problem="the signature is not one of this file's bytes"
                )
            ),
            "a.sig does not hold: the signature is not one of this file's bytes; the approval was changed",
        ),
        (filed(ALICE, dataclasses.replace(BOB, intact=False, signer=None, problem="x")), "b.sig does not hold: x"),
        (
            filed(dataclasses.replace(ALICE, signer=None, problem="the key is not among the allowed signers")),
            "it is signed by a key that does not count (K1): the key is not among the allowed signers; let",
        ),
        (filed(BOB), "it names alice as its author, who has not signed it (bob did); sign it"),
        (filed(ALICE, expires=NOW), "it expired on 2026-03-15 00:00 UTC; fix the cell, or judge the difference"),
        (
            filed(ALICE, created=NOW + timedelta(seconds=1)),
            "it is dated 2026-03-15 00:00 UTC, in the future; check the clock",
        ),
        (filed(ALICE, kind="difference"), "it approves a difference between the arms, and the run shows another kind"),
        (filed(ALICE, rule="tokens"), "it is scoped to rule tokens, and the run used topk; approve anew"),
        (filed(ALICE, corpus=DIGEST["d"]), "it is scoped to corpus dddddddddddd, and the run used cccccccccccc"),
        (
            filed(ALICE, new=DIGEST["e"]),
            "it approves the difference aaaaaaaaaaaa -> eeeeeeeeeeee, and the run shows aaaaaaaaaaaa -> bbbbbbbbbbbb",
        ),
        (filed(ALICE, old=DIGEST["e"]), "it approves the difference eeeeeeeeeeee -> bbbbbbbbbbbb, and the run shows"),
        (filed(ALICE, unchecked="no allowed signers were given"), "its signature was not checked: no allowed signers"),
        (filed(unchecked="no allowed signers were given"), "its signature was not checked: no allowed signers"),
    ],
)
def test_each_defect_has_its_sentence(item, sentence):
    assert fault(item).startswith(sentence)


@pytest.mark.parametrize(
    ("terms", "item", "sentence"),
    [
        (Terms(signers=2), filed(ALICE), "1 signed and the policy asks for 2; let another person sign it"),
        (Terms(signers=2), filed(ALICE, dataclasses.replace(ALICE, file="b.sig", key="K2")), "1 signed and the policy"),
        (Terms(signers=2), filed(ALICE, dataclasses.replace(BOB, key="K1")), "1 signed and the policy asks for 2"),
        (
            Terms(author_alone=False),
            filed(ALICE),
            "only alice, who made the change, signed it; the policy asks for another",
        ),
        (Terms(author_alone=False, change_author="bob"), filed(BOB, author="bob"), "only bob, who made the change"),
        (Terms(longest_days=30), filed(ALICE), "it runs longer than the 30 days the policy allows; approve anew"),
    ],
)
def test_the_terms_of_the_policy_are_kept(terms, item, sentence):
    assert fault(item, terms=terms).startswith(sentence)


def test_two_people_with_two_keys_meet_a_threshold_of_two():
    assert ruled(filed(ALICE, BOB), terms=Terms(signers=2, author_alone=False)).approved[0].signers == ("alice", "bob")


def test_an_unsigned_approval_counts_only_where_the_terms_allow_it_and_has_no_signers():
    assert ruled(filed(), terms=Terms(unsigned=True)).approved[0].signers == ()


def test_where_unsigned_ones_are_allowed_a_broken_signature_still_is_none():
    broken = dataclasses.replace(ALICE, intact=False, signer=None, problem="x")
    assert fault(filed(broken), terms=Terms(unsigned=True)).startswith("a.sig does not hold")


@pytest.mark.parametrize("changes", [{"engine": "vllm"}, {"model": "other"}, {"variant": "x"}, {"cell": "gone"}])
def test_approvals_for_what_is_not_planned_are_left_alone(changes):
    rulings = ruled(filed(folder="", **changes))
    assert rulings == dataclasses.replace(rulings, approved=(), invalid=(), obsolete=())


def test_an_approval_of_a_cell_that_passes_is_obsolete_whatever_is_wrong_with_it():
    rulings = ruled(filed(ALICE), filed(expires=NOW, name="b.toml"), differences=())
    assert [note.sentence for note in rulings.obsolete] == ["the cell passes now; remove it"] * 2
    assert rulings.invalid == rulings.approved == ()


def test_an_expired_one_beside_a_good_one_is_obsolete_and_not_invalid():
    rulings = ruled(filed(ALICE), filed(ALICE, expires=NOW, name="old.toml"))
    assert len(rulings.approved) == 1
    assert rulings.invalid == ()
    assert rulings.obsolete[0].sentence.startswith("another approval is in force (it expired on")


def test_one_difference_of_two_approved_leaves_the_other_ones_approval_invalid():
    both = (DIFFERENCE, dataclasses.replace(DIFFERENCE, kind="difference"))
    rulings = ruled(filed(ALICE), filed(ALICE, kind="difference", expires=NOW, name="b.toml"), differences=both)
    assert [item.difference.kind for item in rulings.approved] == ["drift"]
    assert rulings.invalid[0].sentence.startswith("it expired")


def unreadable(folder):
    return Filed(name="a.toml", folder=folder, approval=None, mistake="not TOML", signatures=())


def test_an_unreadable_file_is_invalid_unless_its_folder_is_another_cells():
    assert fault(unreadable("restart")).startswith("it cannot be read (not TOML): it was changed or damaged")
    assert fault(unreadable(""), differences=()).startswith("it cannot be read")
    assert ruled(unreadable("elsewhere")).invalid == ()


def test_a_file_in_one_cells_folder_that_names_another_cell_is_invalid():
    sentence = "it lies in the folder of cell 'restart' and names cell 'gone': it was moved or changed"
    assert fault(filed(ALICE, cell="gone")).startswith(sentence)
    assert fault(filed(ALICE, folder="elsewhere")).startswith("it lies in the folder of cell 'elsewhere'")
    assert ruled(filed(ALICE, folder="elsewhere", cell="gone")).invalid == ()
