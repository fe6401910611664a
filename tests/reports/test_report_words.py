"""The sentences all reports share."""

from __future__ import annotations

import pytest
import run_samples

from reports import decision, words
from reports.reader import read_run, read_verdict
from reports.table import five_lines


def verdict(**changes):
    return read_verdict(run_samples.verdict(**changes))


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 5, 130, 77, None])
def test_every_exit_code_has_a_decision(code):
    found = decision.decide(read_run(run_samples.run([run_samples.verdict()], exit_code=code)))
    assert (found.status == "good") == (code == 0)
    assert found.title
    assert found.meaning


def test_exit_code_0_is_not_believed_when_pairs_are_unjudged():
    run = run_samples.all_pass()
    run["plan"]["pairs"] += 1
    found = decision.decide(read_run(run))
    assert found.status == "bad"
    assert "8 of 9 planned pairs were judged" in found.meaning
    assert decision.decide(read_run(run_samples.run([]))).status == "bad"
    assert decision.decide(read_run({"schema": 1, "exit_code": 0})).meaning.endswith("nothing was judged")


def test_more_verdicts_than_planned_is_said_too():
    run = run_samples.all_pass()
    run["plan"]["pairs"] = 1
    assert decision.unjudged(read_run(run)) == "8 of 1 planned pair were judged"


@pytest.mark.parametrize(
    ("record", "status", "text"),
    [
        (run_samples.verdict(), "good", "PASS"),
        (run_samples.failed(), "bad", "FAIL"),
        (run_samples.expected_failure(), "good", "FAIL (expected)"),
        (run_samples.error(), "bad", "ERROR"),
        (run_samples.insufficient(), "open", "INSUFFICIENT"),
        (run_samples.unsupported(), "idle", "UNSUPPORTED"),
        (run_samples.unsupported(foreseen=False), "open", "UNSUPPORTED"),
        (run_samples.verdict(name="APPROVED"), "good", "APPROVED"),
        (run_samples.verdict(name="WHAT"), "bad", "WHAT"),
        (run_samples.verdict(name=None), "bad", "no verdict"),
        (run_samples.verdict(name="INSUFFICIENT", expected="FAIL"), "open", "INSUFFICIENT"),
        (run_samples.verdict(name=None, expected=""), "bad", "no verdict"),
    ],
)
def test_status_and_words(record, status, text):
    read = read_verdict(record)
    assert (decision.status(read), words.verdict_words(read)) == (status, text)


def test_the_worst_come_first_and_expected_ones_do_not():
    labels = [item.label for item in decision.by_severity(read_run(run_samples.mixed()).verdicts)]
    assert labels[0] == "process-restart[same-new]"
    assert labels[1:3] == ["alone-vs-batch[alone-batch]", "page-size[16-32]"]
    assert labels.index("known-broken[off-on]") > labels.index("tensor-parallel[1-2]")
    assert decision.by_severity([verdict(name="WHAT"), verdict()])[0].verdict == "WHAT"


def test_a_failure_in_five_lines():
    head, first, many, size, layer = five_lines(run_samples.failed()).splitlines()
    assert head.startswith("alone-vs-batch[alone-batch] FAIL (alone_vs_batch: alone -> batch, rule topk): ")
    assert head.endswith("logprob 48, topk_logprobs 47, topk_ids 4, pick 2")
    assert first.startswith("  first     request quick-01, position 5: logprob -1.3862944 -> -1.3862946 ")
    assert first.endswith("(2 ulp, |Δlogprob| 2.38e-07, near tie, reference gap 0.0125)")
    assert many == "  how many  48 of 288 positions in 9 of 12 requests; 276 positions witnessed"
    assert size == "  size      at most 18 ulp; |Δlogprob| at most 2.15e-06; KL about 1.2e-08 (k1), 3.4e-13 (k3)"
    assert layer.startswith("  layer     forward: logprobs differ under golden replay")


def test_a_floor_that_differs_blames_no_axis():
    head, _, many, *_ = five_lines(run_samples.run_to_run()).splitlines()
    assert head.endswith("run-to-run: the reference differs from itself, so no axis is blamed")
    assert many == "  how many  48 of 288 positions in 9 of 12 requests"
    assert words.arms(read_verdict(run_samples.run_to_run())) == ("reference", "reference again")


def test_an_error_shows_the_end_of_its_log():
    lines = five_lines(run_samples.error()).splitlines()
    assert "  reason    variant: the engine's process ended with status -9 (killed: out of memory?)" in lines
    assert lines[-1].startswith("  log       RuntimeError:")


def test_insufficient_says_what_is_missing():
    text = five_lines(run_samples.insufficient())
    assert "  changed   config.page_size: 16 -> 32; package.torch" in text
    silent = run_samples.verdict(name="INSUFFICIENT", reason="the control stayed silent: nothing differs")
    silent["control"]["fired"] = False
    assert "  control   free SILENT" in five_lines(silent)
    assert "  floor     same" in five_lines(silent)


EVERY = [*run_samples.mixed()["verdicts"], *run_samples.hostile()["verdicts"], {}, {"verdict": "FAIL"},
         {"verdict": "ERROR"}, {"verdict": "INSUFFICIENT"}]  # fmt: skip


@pytest.mark.parametrize("record", [*EVERY, *(run_samples.inner_nulls(item) for item in EVERY)])
def test_never_more_than_five_lines_nor_long_ones(record):
    lines = five_lines(record).split("\n")
    assert 1 <= len(lines) <= 5
    assert all(len(line) <= 320 for line in lines)
    assert "None" not in five_lines(record)


def test_fields_that_do_not_differ_are_not_listed():
    comparison = verdict(comparison={"fields": {"pick": 0, "length": 1, "logprob": 4}}).comparison
    assert words.field_words(comparison) == "logprob 4, length 1"
    assert words.field_words(verdict().comparison) == words.field_words(None) == ""


def test_unknown_numbers_are_said_to_be_so():
    assert words.compared_words(verdict(comparison={"positions": 3}).comparison) == (
        "requests not recorded, 3 positions, elements not recorded"
    )
    assert words.size_words(verdict(diagnosis={"layer": "x"}).diagnosis) == "not measurable in these fields"
    assert words.size_words(None) == "not measured"


def test_numbers_that_are_no_numbers_are_shown():
    diagnosis = verdict(diagnosis={"max_abs_delta_logprob": float("nan"), "kl_k1": float("inf")}).diagnosis
    assert words.size_words(diagnosis) == "|Δlogprob| at most nan; KL about inf (k1)"


@pytest.mark.parametrize(
    ("control", "text"),
    [
        (None, "none"),
        ({"kind": "none"}, "none"),
        ({"kind": "mode", "value": "free", "fired": True}, "free fired"),
        ({"kind": "mode", "value": "free", "fired": False}, "free SILENT"),
        ({"kind": "mode", "value": "free", "fired": None}, "free not recorded"),
        ({"kind": "variant", "value": "", "fired": True}, "variant fired"),
        ({"kind": "planted", "fired": True}, "comparator only, fault found"),
        ({"kind": "planted", "fired": False}, "comparator only, fault NOT FOUND"),
    ],
)
def test_control_words(control, text):
    assert words.control_words(verdict(control=control).control) == text


@pytest.mark.parametrize(
    ("floor", "text"),
    [(None, "none"), ({"verdict": "different"}, "DIFFERS"), ({"verdict": None, "positions": 1}, "not recorded")],
)
def test_floor_words(floor, text):
    assert words.floor_words(verdict(floor=floor).floor) == text


def test_only_good_verdicts_rest_on_a_weak_corpus():
    weak = run_samples.weak()
    assert words.weak_words(read_verdict(weak)).startswith("weak corpus: its longest prompt has 96")
    assert words.weak_words(read_verdict({**weak, "verdict": "FAIL"})) == ""
    assert words.weak_words(verdict(corpus={"weak": "short"})) == "weak corpus: short"


def test_one_line():
    assert words.one_line("a\n b\t\tc") == "a b c"
    assert words.one_line("x" * 400, 10) == "x" * 9 + "…"
