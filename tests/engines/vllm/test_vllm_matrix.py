"""The heart of the vllm-cpu matrix, through the command line: what fails as vLLM comes passes in mode cpu-invariant."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.usefixtures("vllm"), pytest.mark.xdist_group("vllm")]

CELLS = ("alone-vs-batch", "invariant-alone-vs-batch", "restart")


@pytest.fixture(scope="module")
def record(vllm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "out"
    chosen = [word for cell in CELLS for word in ("--cell", cell)]
    run = ["run", "vllm-cpu", "--engine", "vllm", "--model", "smollm2", *chosen, "--out", str(folder), "--quiet"]
    result = subprocess.run([sys.executable, "-m", "harness.cli", *run], capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads((folder / "run.json").read_text())


def entry(record, cell):
    return next(entry for entry in record["verdicts"] if entry["cell"] == cell)


def test_as_it_comes_a_request_alone_differs_from_one_in_a_batch(record):
    found = entry(record, "alone-vs-batch")
    assert (found["verdict"], found["expected"], found["floor"]["verdict"]) == ("FAIL", "FAIL", "same")
    assert found["comparison"]["differing_positions"] > 0
    assert found["diagnosis"]["layer"] == "forward"


def test_in_the_invariant_mode_it_does_not_and_the_control_fired(record):
    found = entry(record, "invariant-alone-vs-batch")
    assert (found["verdict"], found["comparison"]["differing_positions"]) == ("PASS", 0)
    assert found["comparison"]["witnessed"] > 100
    assert found["control"]["fired"]
    assert (
        found["control"]["differing_positions"] == entry(record, "alone-vs-batch")["comparison"]["differing_positions"]
    )


def test_a_restart_changes_nothing_and_says_what_its_control_is_worth(record):
    found = entry(record, "restart")
    assert found["verdict"] == "PASS"
    assert any("comparator only" in claim for claim in found["claims"])
