"""A cost report before the gate, and in the archive of a release."""

import copy
import dataclasses
import json
from datetime import UTC, datetime

import pytest
from release_making import DIGEST, record, run_of, verdict

from harness.errors import StoreError, UsageError
from harness.release.archive import _cost
from harness.release.cost import read_evidence
from harness.release.decision import decide_gate
from harness.release.gate_record import gate_record
from harness.release.gate_run import GateInputs, gate, write_gate
from harness.release.policy import Policy, parse_policy

NOW = datetime(2026, 3, 15, tzinfo=UTC)
POLICY = Policy(cost={"slowdown": 1.5, "memory": 1.2})
REPORT = {
    "schema": 1, "engine": "fake", "model": "fake", "state": "resolved", "outcome": "on takes 1.2 times as long as off",
    "exit_code": 0, "identical_arms": False, "drifted": [], "primary": {"ratio": 1.2},
    "arms": {"on": {"slowed": 1.0, "settings": {"threads": 1}}}, "gate": {"slowdown": 1.3, "memory": 1.01},
    "fingerprint": {"observer": [], "subject": [
        {"name": "package.torch", "value": "2.13.0", "class": "identity", "source": "test"},
    ]},
}  # fmt: skip


def evidence(tmp_path, run=None, **changes):
    file = tmp_path / "cost.json"
    file.write_text(json.dumps({**REPORT, **changes}))
    return read_evidence(file, run or run_of(verdict()))


def decided(cost, policy=POLICY):
    return decide_gate(run_of(verdict()), {}, (), policy, NOW, cost)


def test_a_cost_within_its_limits_is_green(tmp_path):
    found = decided(evidence(tmp_path))
    assert (found.exit_code, found.costs) == (0, ())
    assert gate_record(run_of(verdict()), found)["cost"]["measures"] == {"slowdown": 1.3, "memory": 1.01}


@pytest.mark.parametrize(("gate_values", "sentence"), [
    ({"slowdown": 1.6, "memory": 1.0}, "cost slowdown is 1.6, above the 1.5 the policy allows"),
    ({"slowdown": 1.1}, "cost memory is limited to 1.2 and the run did not measure it"),
])  # fmt: skip
def test_a_cost_above_its_limit_or_not_measured_is_not(tmp_path, gate_values, sentence):
    found = decided(evidence(tmp_path, gate=gate_values))
    assert found.exit_code == 3
    assert sentence in found.sentence


def test_a_failed_cost_cell_fails_the_gate_whatever_is_limited(tmp_path):
    cost = evidence(tmp_path, state="not reproducible", outcome="3 of 40 timed answers differ", gate={})
    found = decided(cost, Policy())
    assert found.exit_code == 1
    assert "not reproducible: 3 of 40" in found.sentence


OTHER = [{**REPORT["fingerprint"]["subject"][0], "value": "2.12.0"}]


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"identical_arms": True}, "compares a configuration with itself"),
    ({"arms": {"on": {"slowed": 1.2, "settings": {}}}}, "planted slowdown"),
    ({"arms": {"on": {"slowed": 1.0, "settings": {"threads": 2}}}}, "configured otherwise than the run: threads"),
    ({"fingerprint": {"observer": [], "subject": OTHER}}, "another environment than the run: package.torch"),
    ({"drifted": ["arm on: kernels.digest was not the same"]}, "kernels.digest was not the same"),
])  # fmt: skip
def test_a_report_of_something_else_counts_as_not_measured(tmp_path, changes, sentence):
    run = run_of(verdict(), settings={"threads": 1})
    cost = evidence(tmp_path, run, **changes)
    assert cost.measures == {}
    assert any(sentence in doubt for doubt in cost.doubts)
    found = decide_gate(run, {}, (), POLICY, NOW, cost)
    assert found.exit_code == 3
    assert sentence in found.sentence


@pytest.mark.parametrize("changes", [{"engine": "bundled"}, {"model": "tiny"}])
def test_a_report_of_another_engine_or_model_is_refused(tmp_path, changes):
    with pytest.raises(UsageError, match="measure that one"):
        evidence(tmp_path, **changes)


def test_a_file_that_is_no_cost_report_is_refused(tmp_path):
    file = tmp_path / "cost.json"
    for text, sentence in (("x", "expected the record"), ('{"schema": 9}', "schema"), ('{"schema": 1}', "is missing")):
        file.write_text(text)
        with pytest.raises(StoreError, match=sentence):
            read_evidence(file, run_of(verdict()))


def test_max_may_be_written_before_a_measure():
    found = parse_policy({"schema": 1, "cost": {"max_slowdown": 1.5, "memory": 2}}, "p")
    assert found.cost == {"slowdown": 1.5, "memory": 2.0}
    with pytest.raises(UsageError, match="limited twice"):
        parse_policy({"schema": 1, "cost": {"max_slowdown": 1.5, "slowdown": 2}}, "p")


def test_the_archive_holds_the_report_the_gate_decided_on(tmp_path):
    source = tmp_path / "measured"
    source.mkdir()
    folder = tmp_path / "run"
    folder.mkdir()
    (source / "cost.json").write_text(json.dumps(REPORT))
    run = dataclasses.replace(run_of(verdict()), folder=folder)
    decision = gate(run, GateInputs(cost=source / "cost.json"), NOW)
    stored = write_gate(run, decision, folder, lambda _record: "", lambda _record, _folder: None)
    found = _cost(run, stored, _Everything())
    assert (found["measured"], found["note"]) == (True, "")
    assert found["report"]["primary"] == {"ratio": 1.2}
    assert found["sha256"] == stored["cost"]["sha256"]
    assert found["report"]["fingerprint"] == {"observer": [], "subject": []}
    changed = copy.deepcopy(REPORT) | {"outcome": "free of charge"}
    (folder / "cost.json").write_text(json.dumps(changed))
    with pytest.raises(StoreError, match="not the cost report the gate decided on"):
        _cost(run, stored, _Everything())
    (folder / "cost.json").unlink()
    with pytest.raises(StoreError, match="expected the cost report"):
        _cost(run, stored, _Everything())


def test_without_a_report_the_archive_says_so():
    run = run_of(verdict())
    found = _cost(run, {"cost": None}, _Everything())
    assert (found["measured"], found["report"], found["run"]) == (False, None, DIGEST["f"])
    assert found["note"] != ""
    assert record()["cost"] is None


class _Everything:
    """A disclosure that keeps nothing back."""

    logs = True
