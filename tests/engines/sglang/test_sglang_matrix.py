"""The sglang matrix through the command line: on the stand-in, and unsupported with the reason where there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.matrix import load_matrix

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CELLS = {cell.name for cell in load_matrix("sglang").cells}
EXPECTED = {"sglang-ordinary-together-and-alone": "FAIL", "sglang-ordinary-seeds": "FAIL"}


def run(folder, path, *more):
    words = ["run", "sglang", "--engine", "sglang", "--model", "tiny", *more, "--out", str(folder), "--quiet"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(
        [sys.executable, "-m", "harness.cli", *words], capture_output=True, text=True, timeout=600, env=env
    )
    verdicts = json.loads((folder / "run.json").read_text())["verdicts"]
    return done, {(entry["cell"], entry["label"]): entry for entry in verdicts}


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """A run of the whole matrix whose processes take the stand-in for SGLang."""
    done, verdicts = run(tmp_path_factory.mktemp("run") / "out", (ROOT, HERE / "standin"))
    assert done.returncode == 0, done.stdout + done.stderr
    return verdicts


def test_every_cell_of_the_deterministic_mode_passes_with_a_control_that_fired(stand_in):
    assert {cell for cell, _ in stand_in} == CELLS
    kept = {key: entry for key, entry in stand_in.items() if key[0] not in EXPECTED}
    assert len(kept) == 7  # the cache is warm in one variant and half warm in another
    for key, entry in kept.items():
        assert (entry["verdict"], entry["control"]["fired"]) == ("PASS", True), (key, entry["reason"])
        assert entry["comparison"]["witnessed"] >= 100


def test_the_ordinary_mode_fails_as_declared(stand_in):
    found = {cell: entry for (cell, _), entry in stand_in.items() if cell in EXPECTED}
    assert {cell: entry["verdict"] for cell, entry in found.items()} == EXPECTED
    assert found["sglang-ordinary-seeds"]["floor"]["verdict"] == "different"
    assert "sampling layer is unsolved" in found["sglang-ordinary-seeds"]["reason"]
    assert found["sglang-ordinary-together-and-alone"]["floor"]["verdict"] == "same"


def test_here_the_matrix_is_unsupported_with_the_reason(tmp_path):
    done, verdicts = run(tmp_path / "out", (ROOT,), "--cell", "sglang-radix-cache")
    assert done.returncode == 3, done.stdout + done.stderr
    assert {entry["verdict"] for entry in verdicts.values()} == {"UNSUPPORTED"}
    assert all("it does not install on a CPU host" in entry["reason"] for entry in verdicts.values())
