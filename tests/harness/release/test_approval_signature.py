"""SSH signatures against allowed signers, with OpenSSH itself: who counts, and why others do not."""

from datetime import UTC, datetime

import pytest
from release_making import allow, make_key

from harness.approval import signature
from harness.approval.signature import check, namespace_problem, sign
from harness.errors import UsageError

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
ALICE = "alice@example.org"
CONTENT = b"schema = 1\n"


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    return folder, make_key(folder, "alice"), make_key(folder, "bob")


def checked(keys, options="", *, content=CONTENT, principal=ALICE, armour=None, moment=NOW):
    folder, alice, _ = keys
    signers = allow(folder / "allowed", (principal, alice, options))
    return check(content, armour or sign(CONTENT, alice), signers, ALICE, moment, file="a.sig")


def test_an_allowed_key_counts_under_its_principal(keys):
    found = checked(keys, 'namespaces="samebits-approval"')
    assert (found.intact, found.signer, found.problem) == (True, ALICE, "")
    assert found.key.startswith("ED25519 key SHA256:")


def test_a_pattern_counts_under_the_authors_name(keys):
    assert checked(keys, principal="*@example.org").signer == ALICE


def test_a_key_that_may_sign_for_several_counts_as_the_author(keys):
    assert checked(keys, principal=f"aaron@example.org,{ALICE}").signer == ALICE


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ('valid-before="20260201"', "the key's time in the allowed signers is over"),
        ('valid-after="20260401"', "the key's time in the allowed signers has not begun"),
        ('namespaces="git"', "the key is not allowed in namespace 'samebits-approval'"),
    ],
)
def test_a_key_that_does_not_count_says_why(keys, options, problem):
    found = checked(keys, options)
    assert (found.intact, found.signer, found.problem) == (True, None, problem)


def test_validity_is_judged_at_the_time_passed_in_and_in_utc(keys):
    options = 'valid-after="20260301Z",valid-before="20260302Z"'
    assert checked(keys, options).signer == ALICE
    assert checked(keys, options, moment=datetime(2026, 3, 2, 0, 0, 1, tzinfo=UTC)).signer is None


def test_another_key_is_not_among_the_allowed(keys):
    _, _, bob = keys
    found = checked(keys, armour=sign(CONTENT, bob))
    assert (found.intact, found.signer, found.problem) == (True, None, "the key is not among the allowed signers")


def test_another_byte_breaks_the_signature(keys):
    found = checked(keys, content=CONTENT.replace(b"1", b"2"))
    assert (found.intact, found.signer) == (False, None)
    assert found.problem == "the signature is not one of this file's bytes"


def test_a_signature_of_another_namespace_proves_nothing(keys, monkeypatch):
    monkeypatch.setattr(signature, "NAMESPACE", "git")
    armour = sign(CONTENT, keys[1])
    monkeypatch.undo()
    found = checked(keys, armour=armour)
    assert (found.intact, found.problem) == (False, "it was made in namespace 'git', not 'samebits-approval'")


@pytest.mark.parametrize(
    "armour",
    [
        b"",
        b"no\nsignature\nat all",
        b"-----BEGIN SSH SIGNATURE-----\n!!\n-----END SSH SIGNATURE-----\n",
        b"-----BEGIN SSH SIGNATURE-----\nAAAA\n-----END SSH SIGNATURE-----\n",
    ],
)
def test_what_is_no_signature_is_said_to_be_none(armour):
    assert "SSH signature" in namespace_problem(armour)


def test_a_garbled_allowed_signers_file_allows_nobody_and_says_so(keys):
    folder, alice, _ = keys
    (folder / "garbled").write_text("alice@example.org\n")
    found = check(CONTENT, sign(CONTENT, alice), folder / "garbled", ALICE, NOW, file="a.sig")
    assert found.signer is None
    assert "garbled does not read as allowed signers" in found.problem


def test_missing_files_and_programs_are_clear_errors(keys, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="no such file; give your SSH private key"):
        sign(CONTENT, tmp_path / "nokey")
    (tmp_path / "nokey").write_text("not a key")
    with pytest.raises(UsageError, match="ssh-keygen cannot sign with it"):
        sign(CONTENT, tmp_path / "nokey")
    with pytest.raises(UsageError, match=r"--allowed-signers .*: no such file"):
        check(CONTENT, b"", tmp_path / "nobody", ALICE, NOW, file="a.sig")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="ssh-keygen is not on the PATH; install OpenSSH's client"):
        sign(CONTENT, keys[1])
