"""JUnit XML: what counts as what, and that nothing red comes out green."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest
import run_samples

from harness.errors import StoreError
from reports.junit import render_junit


def parse(run):
    return ET.fromstring(render_junit(run).encode("utf-8"))  # noqa: S314 - our own output


def cases(run):
    return {case.get("name"): case for case in parse(run).iter("testcase")}


def properties(case):
    return {item.get("name"): item.get("value") for item in case.iter("property")}


def result(case):
    return [child.tag for child in case if child.tag in ("failure", "error", "skipped")]


def test_verdicts_map_to_results():
    found = cases(run_samples.mixed())
    assert {name: result(case) for name, case in found.items()} == {
        "max-num-seqs[1-8]": [],
        "alone-vs-batch[alone-batch]": ["failure"],
        "arrival-order[given-reversed]": [],
        "process-restart[same-new]": ["error"],
        "arrivals[alone-staggered]": ["failure"],
        "tensor-parallel[1-2]": ["skipped"],
        "scheduler-upgrade[old-new]": [],
        "isa[v3-v4]": [],
        "known-broken[off-on]": [],
        "page-size[16-32]": ["failure"],
    }
    assert found["alone-vs-batch[alone-batch]"].find("failure").get("type") == "FAIL"
    assert found["arrivals[alone-staggered]"].find("failure").get("type") == "INSUFFICIENT"
    assert found["tensor-parallel[1-2]"].find("skipped").get("message") == "needs 2 accelerators, this host has 0"
    assert "RuntimeError" in found["process-restart[same-new]"].find("system-err").text
    assert found["alone-vs-batch[alone-batch]"].find("failure").text.count("\n") == 4


def test_passes_that_are_not_plain_say_so():
    found = cases(run_samples.mixed())
    assert properties(found["scheduler-upgrade[old-new]"])["verdict"] == "APPROVED"
    assert properties(found["known-broken[off-on]"])["expected"] == "FAIL"
    assert properties(found["arrival-order[given-reversed]"])["note"].startswith("weak corpus")


def test_counts_are_those_of_the_elements():
    root = parse(run_samples.mixed())
    suite = root.find("testsuite")
    for element in (root, suite):
        assert [element.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["10", "3", "1", "1"]
    assert suite.get("timestamp") == "2026-03-01T12:00:00"
    assert suite.get("name") == "quick"


def test_all_pass_has_no_failure():
    assert not any(result(case) for case in cases(run_samples.all_pass()).values())
    assert len(cases(run_samples.all_pass())) == 8


def fewer(run):
    run["plan"]["pairs"] = 20
    return run


@pytest.mark.parametrize(
    "run",
    [
        run_samples.run([]),
        {"schema": 1},
        {"schema": 1, "exit_code": 0},
        fewer(run_samples.all_pass()),
        run_samples.run([run_samples.verdict()], exit_code=130, outcome="interrupted"),
        run_samples.run([run_samples.verdict()], exit_code=None),
        run_samples.run([run_samples.unsupported(foreseen=False)], exit_code=3),
        run_samples.nulls(run_samples.all_pass()),
        run_samples.inner_nulls(run_samples.all_pass()),
        run_samples.run([run_samples.verdict(name="WHAT")]),
        run_samples.run([run_samples.verdict(name=None)]),
    ],
)
def test_what_is_not_green_has_a_failure(run):
    root = parse(run)
    assert int(root.get("failures")) + int(root.get("errors")) > 0


def test_a_red_run_with_a_failed_cell_has_no_second_failure():
    assert int(parse(run_samples.run([run_samples.failed()], exit_code=1)).get("failures")) == 1


def test_hostile_text_is_valid_xml_and_stays_text():
    root = parse(run_samples.hostile())
    assert "<script>alert(1)</script>" in next(root.iter("testcase")).get("name")
    assert len(list(root.iter("script"))) == 0


def test_another_schema_is_refused():
    with pytest.raises(StoreError):
        render_junit({"schema": 0})
