"""Reading a run's record: strict on the schema number, tolerant of the rest, and clean text."""

from __future__ import annotations

import pytest
import run_samples

from harness.errors import StoreError
from reports.reader import clean, read_run, read_verdict


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({}, "no schema number"),
        ({"schema": 0}, "0 is older than 1"),
        ({"schema": None}, "None is older than 1"),
        ({"schema": "1"}, "'1' is older"),
        ({"schema": True}, "True is older"),
        ({"schema": 2}, "2 is newer than 1.*upgrade"),
    ],
)
def test_each_wrong_schema_has_its_sentence(record, words):
    with pytest.raises(StoreError, match=words):
        read_run(record)


def test_a_whole_record():
    run = read_run(run_samples.mixed())
    assert (run.matrix.name, run.engine, run.exit_code, run.seconds.outside) == ("quick", "bundled", 4, 4.3)
    assert run.plan.pairs == len(run.verdicts) == 10
    assert run.settings == (("arithmetic", "portable"), ("threads", "2"))
    assert run.chosen == (("arithmetic", "portable"),)
    failed = run.verdicts[1]
    assert failed.label == "alone-vs-batch[alone-batch]"
    assert failed.comparison.differing[0] == ("logprob", 48)
    assert failed.diagnosis.first.delta_logprob == -2.3841858e-07
    assert failed.diagnosis.per_request[0].request == "quick-00"
    assert failed.cases[-1] == ("control_variant", "77ab02")  # the null one is left out
    assert {field.field_class for field in run.fingerprint.observer} == {"identity", "lineage", "context"}
    assert run.cost[0][0] == "cost"


def test_what_is_absent_is_none_and_never_zero():
    for record in ({"schema": 1}, run_samples.nulls(run_samples.mixed())):
        run = read_run(record)
        assert run.exit_code is run.seconds.total is run.plan.pairs is None
        assert run.verdicts == run.cases == run.fingerprint.subject == ()
    verdict = read_run(run_samples.inner_nulls(run_samples.mixed())).verdicts[0]
    assert verdict == () or verdict.comparison is None or verdict.comparison.positions is None
    assert verdict.verdict == ""


@pytest.mark.parametrize("junk", [7, "text", [1], {"a": 1}, True, 1.5])
def test_values_of_another_type_read_as_nothing(junk):
    record = dict.fromkeys(run_samples.mixed(), junk) | {"schema": 1}
    run = read_run(record)
    assert run.verdicts == ()
    verdict = read_verdict(dict.fromkeys(run_samples.verdict(), junk))
    assert verdict.claims in ((), ("1",))
    for part in (verdict.comparison, verdict.floor):
        assert part is None or part.positions is None


def test_counts_are_no_booleans_and_numbers_no_strings():
    record = run_samples.verdict(
        comparison={"requests": True, "positions": "12", "elements": 1.5, "fields": {"a": True}}
    )
    comparison = read_verdict(record).comparison
    assert (comparison.requests, comparison.positions, comparison.elements, comparison.fields) == (None, None, None, ())


def test_text_is_cleaned():
    assert clean("a\tb\r\nc\nd") == "a\tb\nc\nd"
    for mischief in ("\x00", "\x1b", "\x07", "\x9b", "\u202e", "\u2066", "\ud800", "\ufeff", "\uffff", "\u2028", "\r"):
        assert clean(f"a{mischief}b") == "a\ufffdb", ascii(mischief)
    assert clean("größe 漢字 🙂 العربية") == "größe 漢字 🙂 العربية"


def test_keys_are_cleaned_too():
    verdict = read_verdict(run_samples.verdict(digests={"ref\x1berence": "1"}, comparison={"fields": {"a\x00": 2}}))
    assert verdict.digests == (("ref\ufffderence", "1"),)
    assert verdict.comparison.fields == (("a\ufffd", 2),)


def test_a_cost_is_a_sentence_or_entries():
    assert read_run({"schema": 1, "cost": "9 % slower"}).cost == (("cost", "9 % slower"),)
    assert read_run({"schema": 1, "cost": {"decode": 0.91, "n": None}}).cost == (("decode", "0.91"),)
    assert read_run({"schema": 1, "cost": None}).cost == ()
