"""The heart of the transformers matrix, through the command line: padding fails, restart and the same batch pass."""

import json
import subprocess
import sys

import pytest

CELLS = ("alone-vs-padded-batch", "transformers-restart", "transformers-same-batch-twice")


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "out"
    chosen = [word for cell in CELLS for word in ("--cell", cell)]
    run = ["run", "transformers", "--engine", "transformers", "--model", "tiny", "--set", "threads=1", *chosen,
           "--out", str(folder), "--quiet"]  # fmt: skip
    result = subprocess.run([sys.executable, "-m", "harness.cli", *run], capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads((folder / "run.json").read_text())


def entry(record, cell):
    return next(entry for entry in record["verdicts"] if entry["cell"] == cell)


def test_a_padded_batch_differs_from_alone(record):
    found = entry(record, "alone-vs-padded-batch")
    assert (found["verdict"], found["expected"], found["floor"]["verdict"]) == ("FAIL", "FAIL", "same")
    assert found["comparison"]["differing_positions"] > 0
    assert found["diagnosis"]["layer"] == "forward"


@pytest.mark.parametrize("cell", CELLS[1:])
def test_a_restart_and_a_second_time_change_nothing(record, cell):
    found = entry(record, cell)
    assert (found["verdict"], found["comparison"]["differing_positions"]) == ("PASS", 0)
    assert found["comparison"]["witnessed"] >= 100
    assert any("comparator only" in claim for claim in found["claims"])
