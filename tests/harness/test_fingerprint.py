"""Fingerprints: identity digest, JSON, differences, and what an undeclared difference is."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.engine import Field
from harness.errors import StoreError
from harness.fingerprint import Fingerprint, diff, fingerprint_of, owns, undeclared


def make(name="x", value="1", field_class="identity", source="test"):
    return Field(name=name, value=value, field_class=field_class, source=source)


UNKNOWN = make(value=None, source="unknown, because no file")

scalars = st.none() | st.text(max_size=4) | st.integers() | st.floats() | st.booleans()
CLASS_OF = {"a.b": "identity", "a.c": "identity", "d": "lineage", "e": "context"}
fields = st.builds(
    lambda name, value: make(name, value, CLASS_OF[name]), name=st.sampled_from(sorted(CLASS_OF)), value=scalars
)
fingerprints = st.lists(fields, unique_by=lambda item: item.name).map(fingerprint_of)


def test_fields_are_sorted_and_unique():
    assert [field.name for field in fingerprint_of([make("b")], [make("a")]).fields] == ["a", "b"]
    with pytest.raises(ValueError, match="'a' is given twice: '1' and '2'"):
        fingerprint_of([make("a")], [make("a", "2")])


def test_only_identity_moves_the_digest():
    base = fingerprint_of([make("i"), make("l", "1", "lineage"), make("c", "1", "context")])
    other = fingerprint_of([make("i"), make("l", "2", "lineage"), make("c", "2", "context")])
    assert base.digest == other.digest
    assert base.digest != fingerprint_of([make("i", "2")]).digest
    assert base.digest.startswith("sha256:")


@pytest.mark.parametrize("other", [1, 1.0, True, None, "1 ", "٢"])
def test_values_differ_by_type_too(other):
    a, b = fingerprint_of([make(value="1")]), fingerprint_of([make(value=other)])
    assert a.digest != b.digest
    assert [difference.name for difference in diff(a, b)] == ["x"]


def test_numbers_of_different_types_differ():
    values = [1, 1.0, True]
    digests = {fingerprint_of([make(value=value)]).digest for value in values}
    assert len(digests) == len(values)


def test_the_source_is_no_part_of_the_identity():
    a, b = fingerprint_of([make(source="here")]), fingerprint_of([make(source="there")])
    assert a.digest == b.digest
    assert diff(a, b) == ()


@given(fingerprints)
def test_json_returns_the_same_fingerprint(fingerprint):
    again = Fingerprint.from_json(json.loads(json.dumps(fingerprint.to_json())))
    assert again.digest == fingerprint.digest
    assert diff(again, fingerprint) == ()
    assert [field.source for field in again.fields] == [field.source for field in fingerprint.fields]


@given(fingerprints, fingerprints)
def test_diff_is_reflexive_symmetric_and_agrees_with_the_digest(a, b):
    assert diff(a, a) == ()
    assert [item.name for item in diff(a, b)] == [item.name for item in diff(b, a)]
    assert (a.digest != b.digest) == any(item.field_class == "identity" for item in diff(a, b))


def test_diff_shows_the_worst_class_first():
    a = fingerprint_of([make("a", "1", "context"), make("b", "1", "lineage"), make("c"), make("d")])
    b = fingerprint_of([make("a", "2", "context"), make("b", "2", "lineage"), make("c"), make("d", "2")])
    assert [item.describe() for item in diff(a, b)] == ["d: 1 -> 2", "b: 1 -> 2", "a: 1 -> 2"]


def test_a_field_of_two_classes_counts_as_the_worse():
    (found,) = diff(fingerprint_of([make(value="1", field_class="context")]), fingerprint_of([make(value="2")]))
    assert found.field_class == "identity"


def test_every_kind_of_change_is_named():
    a = fingerprint_of([make("changed"), make("gone"), replace(UNKNOWN, name="unknown")])
    b = fingerprint_of([make("changed", 2), make("new"), make("unknown")])
    assert {item.name: (item.change, item.describe()) for item in diff(a, b)} == {
        "changed": ("changed", "changed: 1 -> 2"),
        "gone": ("only in a", "gone: 1 -> absent"),
        "new": ("only in b", "new: absent -> 1"),
        "unknown": ("unknown", "unknown: unknown, because no file -> 1"),
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 0}, "0 is older than 1"),
        ({"schema": 2}, "2 is newer than 1"),
        ({"schema": None}, "None is older"),
        ({"digest": "sha256:0"}, r"\$\.digest"),
        ({"fields": {}}, r"\$\.fields: expected a list, found dict"),
        ({"fields": [{"name": "x"}]}, r"\$\.fields\[0\]: expected an object"),
        ({"fields": [{"name": "x", "value": [], "class": "identity", "source": ""}]}, r"\[0\]\.value"),
        ({"fields": [{"name": "x", "value": 1, "class": "other", "source": ""}]}, r"\[0\]\.class"),
        ({"fields": [{"name": 1, "value": 1, "class": "context", "source": ""}]}, "must be strings"),
    ],
)
def test_what_is_no_fingerprint_is_refused_with_its_place(change, words):
    with pytest.raises(StoreError, match=words):
        Fingerprint.from_json({**fingerprint_of([make()]).to_json(), **change})


@pytest.mark.parametrize("value", [{}, [], None, {"fields": []}])
def test_a_missing_schema_number_has_its_own_sentence(value):
    with pytest.raises(StoreError, match="no schema number"):
        Fingerprint.from_json(value)


def judged(a, b, owned=(), *, same_lifetime=True):
    differences, caps = undeclared(fingerprint_of(a), fingerprint_of(b), owned, same_lifetime=same_lifetime)
    return [item.describe() for item in differences], caps


def test_an_undeclared_identity_field_is_found():
    assert judged([make("p"), make("q")], [make("p"), make("q", "2")]) == (["q: 1 -> 2"], ())


def test_lineage_and_context_are_never_undeclared():
    a = [make("l", "1", "lineage"), make("c", "1", "context")]
    assert judged(a, [make("l", "2", "lineage")]) == ([], ())


def test_owned_fields_may_differ():
    a, b = [make("graph.sizes"), make("graph")], [make("graph.sizes", "2"), make("graph", "2")]
    assert judged(a, b, ["graph.*"])[0] == ["graph: 1 -> 2"]
    assert judged(a, b, ["graph.sizes"])[0] == ["graph: 1 -> 2"]
    assert judged(a, b, ["graph", "graph.*"])[0] == []


def test_a_field_of_one_side_only_is_a_difference_unless_owned():
    assert judged([make()], []) == (["x: 1 -> absent"], ())
    assert judged([], [UNKNOWN], same_lifetime=False)[0] == ["x: absent -> unknown, because no file"]
    assert judged([make()], [], ["x"]) == ([], ())


def test_not_applicable_equals_itself_and_nothing_else():
    assert judged([make(value="not applicable")], [make(value="not applicable")]) == ([], ())
    assert judged([make(value="not applicable")], [make(value="1")])[0] == ["x: not applicable -> 1"]


@pytest.mark.parametrize(
    ("a", "b", "sides"), [(UNKNOWN, UNKNOWN, "both"), (UNKNOWN, make(), "one"), (make(), UNKNOWN, "one")]
)
def test_unknown_is_equal_in_one_lifetime_and_a_cap_across(a, b, sides):
    assert judged([a], [b]) == ([], ())
    differences, (cap,) = judged([a], [b], same_lifetime=False)
    assert differences == []
    assert cap.startswith(f"x is unknown on {sides} side")
    assert "(no file)" in cap


def test_an_owned_unknown_field_caps_nothing():
    assert judged([UNKNOWN], [UNKNOWN], ["x"], same_lifetime=False) == ([], ())


@pytest.mark.parametrize("pattern", ["*", ".*", "a*", "a.*.b", "", "a.*.*"])
def test_wildcards_that_own_too_much_are_refused(pattern):
    with pytest.raises(ValueError, match="owned field"):
        owns([pattern], "a.b")


@given(fingerprints, fingerprints)
def test_undeclared_without_owned_fields_is_the_identity_part_of_diff(a, b):
    differences, caps = undeclared(a, b, (), same_lifetime=False)
    expected = [item for item in diff(a, b) if item.field_class == "identity"]
    assert list(differences) == [item for item in expected if item.change != "unknown"]
    assert len([item for item in expected if item.change == "unknown"]) <= len(caps)
