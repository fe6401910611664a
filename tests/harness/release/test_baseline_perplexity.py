"""The perplexity baseline: exact per sample, protected by a digest, refreshed by the command alone."""

import dataclasses
import json
import math
from datetime import UTC, datetime

import pytest
from release_making import samebits

from harness.baseline.measure import parse_part
from harness.baseline.perplexity import (
    Measurement,
    Sample,
    accept_perplexity,
    compare_perplexity,
    describe_changes,
    join,
    sample_nll,
)
from harness.engine import Field
from harness.errors import UsageError
from harness.fingerprint import fingerprint_of

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def measurement(*names, nll=1.5, torch="2.13", host="h", whole=2, **changes):
    made = fingerprint_of([Field(name="package.torch", value=torch, field_class="identity", source="test")])
    samples = tuple(Sample(id=name, tokens=3, nll=nll.hex()) for name in names)
    return dataclasses.replace(Measurement(corpus="quick", corpus_digest="c", whole=whole, engine="fake", model="fake",
                                           host=host, fingerprint=made, samples=samples), **changes)  # fmt: skip


def accepted(*parts):
    return accept_perplexity(parts or (measurement("a", "b"),), "alice", "first", NOW)


def test_a_samples_number_is_the_exactly_rounded_sum():
    values = [-0.1] * 10
    assert float.fromhex(sample_nll(values)) == -math.fsum(values) == 1.0
    assert -sum(values) != 1.0


def test_the_last_bit_of_one_sample_is_a_difference_and_suspects_are_named():
    last = math.nextafter(1.5, 2)
    now = measurement("a", "b", torch="2.14")
    now = dataclasses.replace(now, samples=(now.samples[0], Sample(id="b", tokens=3, nll=last.hex())))
    changes = compare_perplexity(accepted(), now)
    assert [(change.id, change.now) for change in changes] == [("b", last.hex())]
    text = describe_changes(accepted(), now, changes)
    assert "1 of 2 samples differ from the baseline of 2026-03-01T00:00:00Z" in text
    assert text.endswith("changed: package.torch: 2.13 -> 2.14")


def test_a_missing_sample_is_a_difference_and_the_same_mean_is_no_excuse():
    assert [change.now for change in compare_perplexity(accepted(), measurement("a"))] == [None]
    swapped = measurement("a", "b")
    swapped = dataclasses.replace(
        swapped, samples=(Sample(id="a", tokens=3, nll=(1.0).hex()), Sample(id="b", tokens=3, nll=(2.0).hex()))
    )
    assert swapped.perplexity == accepted().measurement.perplexity
    assert len(compare_perplexity(accepted(), swapped)) == 2


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([measurement("a")], "partial: 1 of 2 samples were measured"),
        ([measurement("a"), measurement("b", host="other")], "measured on several hosts"),
        ([measurement("a"), measurement("b", torch="2.14")], "measured in several environments"),
        ([measurement("a"), measurement("a")], "measured twice: a; give each part once"),
        ([measurement("a"), measurement("b", corpus_digest="d")], "the parts differ in corpus_digest: c and d"),
    ],
)
def test_a_refresh_from_a_partial_or_multi_host_run_is_refused(parts, message):
    with pytest.raises(UsageError, match=message):
        accept_perplexity(parts, "alice", "first", NOW)


def test_whole_parts_of_one_host_make_a_baseline():
    assert accepted(measurement("b"), measurement("a")).measurement == join([measurement("a", "b")])
    with pytest.raises(UsageError, match="expected why these numbers are accepted"):
        accept_perplexity([measurement("a", "b")], "alice", "", NOW)


def test_another_corpus_is_not_compared():
    with pytest.raises(UsageError, match=r"the baseline is of another corpus_digest \(c, now d\)"):
        compare_perplexity(accepted(), measurement("a", "b", corpus_digest="d"))


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "1/x", "-1/2"])
def test_a_part_is_number_and_parts(text):
    with pytest.raises(UsageError, match="expected NUMBER/PARTS"):
        parse_part(text)


def test_the_commands_end_to_end(tmp_path):
    """Measure, accept, check; a drift and an edited file are found; halves measured here make the same baseline."""
    base = ("--baseline", tmp_path / "ppl.json")
    common = ("--engine", "fake")
    for name, options in (
        ("whole", ()),
        ("one", ("--part", "1/2")),
        ("two", ("--part", "2/2")),
        ("moved", ("--set", "invariant=false")),
    ):
        done = samebits("perplexity", "measure", "quick", *common, "--out", tmp_path / name, *options)
        assert done.code == 0, done
    nothing = samebits("perplexity", "check", tmp_path / "whole", *base)
    assert (nothing.code, "no baseline yet" in nothing.out) == (3, True)
    partial = samebits("perplexity", "accept", tmp_path / "one", "--reason", "r", "--author", "a", *base)
    assert (partial.code, "partial: 6 of 12 samples" in partial.err) == (2, True)
    assert (
        samebits(
            "perplexity", "accept", tmp_path / "one", tmp_path / "two", "--reason", "r", "--author", "a", *base
        ).code
        == 0
    )
    same = samebits("perplexity", "check", tmp_path / "whole", *base)
    assert (same.code, "12 samples, every bit as accepted" in same.out) == (0, True), same
    drifted = samebits("perplexity", "check", tmp_path / "moved", *base)
    assert (drifted.code, "config.invariant: true -> false" in drifted.out) == (1, True)
    value = json.loads((tmp_path / "ppl.json").read_text())
    value["measurement"]["samples"][0]["nll"] = (1.0).hex()
    (tmp_path / "ppl.json").write_text(json.dumps(value))
    edited = samebits("perplexity", "check", tmp_path / "whole", *base)
    assert (edited.code, "it was edited; restore it, or refresh it with" in edited.err) == (2, True)
