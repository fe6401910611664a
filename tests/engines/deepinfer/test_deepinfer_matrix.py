"""The deepinfer matrix through the command line, on the stand-in: contract kept, conditions missed, refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CELLS = ("deepinfer-together-and-alone", "deepinfer-seeded-together", "deepinfer-without-batch-invariance",
         "deepinfer-without-seed")  # fmt: skip
SM100 = """
import sys
from engines import deepinfer_lifetime
deepinfer_lifetime.accelerator = lambda: "sm100"
deepinfer_lifetime.PYTHON = sys.version_info[:2]
"""


def run(folder, path, cells):
    chosen = [word for cell in cells for word in ("--cell", cell)]
    words = ["run", "deepinfer", "--engine", "deepinfer", "--model", "tiny", *chosen, "--out", str(folder), "--quiet"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(
        [sys.executable, "-m", "harness.cli", *words], capture_output=True, text=True, timeout=600, env=env
    )
    return done, {entry["cell"]: entry for entry in json.loads((folder / "run.json").read_text())["verdicts"]}


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """A run whose processes take the stand-in for DeepInfer and this machine for one with an SM100."""
    site = tmp_path_factory.mktemp("site")
    (site / "sitecustomize.py").write_text(SM100)
    done, verdicts = run(tmp_path_factory.mktemp("run") / "out", (site, ROOT, HERE / "standin"), CELLS)
    assert done.returncode == 0, done.stdout + done.stderr
    return verdicts


@pytest.mark.parametrize("cell", CELLS[:2])
def test_together_and_alone_pass_and_the_control_without_conditions_fires(stand_in, cell):
    found = stand_in[cell]
    assert (found["verdict"], found["control"]["fired"]) == ("PASS", True)
    assert found["comparison"]["witnessed"] >= 200


def test_a_condition_that_is_missing_fails_as_declared(stand_in):
    assert {stand_in[cell]["verdict"] for cell in CELLS[2:]} == {"FAIL"}
    assert stand_in["deepinfer-without-seed"]["floor"]["verdict"] == "different"
    assert stand_in["deepinfer-without-batch-invariance"]["floor"]["verdict"] == "same"


def test_here_the_matrix_is_unsupported_with_the_reason(tmp_path):
    done, verdicts = run(tmp_path / "out", (ROOT,), CELLS[:1])
    assert (done.returncode, verdicts[CELLS[0]]["verdict"]) == (3, "UNSUPPORTED")
    assert "DeepInfer" in verdicts[CELLS[0]]["reason"]
