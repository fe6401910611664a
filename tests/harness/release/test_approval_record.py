"""Approval files: what is written reads back, and every mistake is named."""

import dataclasses
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from release_making import DIGEST

from harness.approval.record import Approval, ApprovalMistakeError, read_approval, write_approval

BASE = Approval(
    cell="restart",
    variant="same-new",
    engine="fake",
    model="fake",
    kind="drift",
    rule="topk",
    corpus=DIGEST["c"],
    old=DIGEST["a"],
    new=DIGEST["b"],
    changed=("package.torch: 2.12 -> 2.13",),
    size="small",
    cause="torch",
    reason="why",
    author="alice@example.org",
    change_author="bob@example.org",
    created=datetime(2026, 3, 1, tzinfo=UTC),
    expires=datetime(2026, 4, 1, tzinfo=UTC),
)


@settings(max_examples=100, deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=("Cs",)), max_size=40),
    lines=st.lists(st.text('ab"\\\n\x7f\x00é', max_size=8), max_size=3),
)
def test_what_is_written_reads_back(text, lines):
    approval = dataclasses.replace(BASE, reason=text, changed=tuple(lines))
    assert read_approval(write_approval(approval)) == approval


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema = 1", "schema = 2", r"\$\.schema: 2 is newer than 1; install a newer samebits"),
        ("schema = 1", "schema = 0", r"\$\.schema: 0 is older than 1"),
        ("schema = 1\n", "", r"\$\.schema: missing"),
        ("cell =", "cel =", r"\$\.cell: missing.*\$\.cel: unknown key"),
        ('kind = "drift"', 'kind = "drfit"', "'drfit' is not one of difference, drift"),
        (f'old = "{DIGEST["a"]}"', 'old = "short"', r"\$\.old: expected a SHA-256"),
        ("expires = 2026-04-01T00:00:00Z", "expires = 2026-02-01T00:00:00Z", "expected a time after `created`"),
        ("expires = 2026-04-01T00:00:00Z", "expires = 2026-04-01T00:00:00", "expected a time with a zone"),
        ("expires = 2026-04-01T00:00:00Z", "expires = 3", "expected a time with a zone"),
        ("schema = 1", "schema = = 1", "not TOML"),
    ],
)
def test_every_mistake_is_named(old, new, message):
    text = write_approval(BASE).decode()
    assert old in text
    with pytest.raises(ApprovalMistakeError, match=message.replace("\n", "")):
        read_approval(text.replace(old, new).encode())


def test_bytes_that_are_no_text_are_a_mistake():
    with pytest.raises(ApprovalMistakeError, match="not TOML"):
        read_approval(b"\xff\xfe")
