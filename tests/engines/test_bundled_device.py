"""The CPU against the GPU in one run, as `cells/gpu` has it, on the GPU kernels that this host emulates.

A device that was asked for is not yet one that computed: without kernels that ran there and logits that came from there
the cell is no PASS.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from harness.axis import AXES
from harness.choose import choose_plan
from harness.cli import commands
from harness.judge import judge
from harness.specimen import alone_traces, make_capture, make_trial

CELLS = Path(__file__).resolve().parents[2] / "cells" / "gpu"
CHANGES = {
    'variants = ["cuda"]': 'variants = ["emulated"]',
    "accelerators = 1\n": "",
    'corpus = "quick"': 'corpus = "smoke"',
    "minimum = 200": "minimum = 128",
    "requests = 4": "requests = 2",
}


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    """The cell over logits as it ships, but for what this host and a short test cannot have."""
    folder = tmp_path_factory.mktemp("device") / "matrix"
    folder.mkdir()
    text = (CELLS / "cpu-to-gpu-logits.toml").read_text()
    for old, new in CHANGES.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "cpu-to-gpu-logits.toml").write_text(text)
    (folder / "matrix.toml").write_text('schema = 1\ndescription = "The CPU against emulated kernels."\n')
    return folder


def run(matrix, folder, *settings):
    assignments = [word for one in ("threads=1", "num_pages=64", *settings) for word in ("--set", one)]
    command = ["run", str(matrix), "--out", str(folder), "--quiet", *assignments]
    result = CliRunner().invoke(commands, command, standalone_mode=False)
    (verdict,) = json.loads((folder / "run.json").read_text())["verdicts"]
    return result.return_value, verdict


def test_every_logit_is_the_cpus_and_the_witness_says_where_it_came_from(matrix, tmp_path):
    code, verdict = run(matrix, tmp_path / "out")
    assert (code, verdict["verdict"]) == (0, "PASS"), verdict["reason"]
    assert verdict["comparison"]["witnessed"] == verdict["comparison"]["positions"] == 128
    assert verdict["control"]["fired"] is True
    told = " ".join(verdict["claims"])
    assert "observed gpu_kernels: 0 and " in told
    assert "logits_device: cpu and emulated" in told


def test_a_forward_pass_that_stays_on_the_cpu_gives_equal_bits_and_is_no_pass(matrix, tmp_path):
    code, verdict = run(matrix, tmp_path / "out", "fault=host-forward")
    assert (code, verdict["verdict"]) == (3, "INSUFFICIENT"), verdict["reason"]
    assert (verdict["comparison"]["differing_positions"], verdict["comparison"]["witnessed"]) == (0, 0)
    assert verdict["control"]["fired"] is True
    assert "gpu_kernels and logits_device did not change between the arms" in verdict["reason"]


@pytest.mark.parametrize(
    ("seen", "missing"),
    [
        ({"gpu_kernels": 7, "logits_device": "cuda:0"}, None),
        ({"gpu_kernels": 0, "logits_device": "cuda:0"}, "gpu_kernels did"),  # nothing was counted
        ({"gpu_kernels": 7, "logits_device": "cpu"}, "logits_device did"),
        ({"logits_device": "cuda:0"}, "gpu_kernels did"),  # an engine that does not count
        ({"gpu_kernels": 7}, "logits_device did"),
    ],
)
def test_the_witness_takes_both_kernels_and_logits(seen, missing):
    trial = make_trial()
    pair = replace(trial.pair, cell=replace(trial.pair.cell, axis=AXES["device"]))
    there = {"gpu_kernels": 0, "logits_device": "cpu"}
    captures = {role: replace(capture, observed=there) for role, capture in trial.captures.items()}
    captures["varied"] = replace(make_capture("varied", alone_traces()), observed=seen)
    verdict = judge(pair, captures, {**trial.expected, "varied": trial.expected["reference"]})
    assert verdict.verdict == ("INSUFFICIENT" if missing else "PASS"), verdict.reason
    assert (missing or "equal") in verdict.reason


def test_without_a_gpu_both_cells_say_that_one_is_missing():
    plan = choose_plan(["gpu"], engine="bundled", model=None, mode=None, assignments=(),
                       cells=("cpu-to-gpu", "cpu-to-gpu-logits"))  # fmt: skip
    assert {pair.cell.name: pair.cell.model for pair in plan.pairs} == {
        "cpu-to-gpu": "smollm2", "cpu-to-gpu-logits": "tiny",
    }  # fmt: skip
    for pair in plan.pairs:
        assert pair.cell.requires.accelerators == 1
        assert pair.unsupported is None or "accelerator(s) needed" in pair.unsupported
