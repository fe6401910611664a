"""The load matrix end to end on tiny: under traffic, with a full pool, and with clients that hang up on a server."""

import json

import pytest
from click.testing import CliRunner

from harness.background import read_background
from harness.cli import commands

STEADY = "arguments=--set threads=1 --set max_num_batched_tokens=64"  # small steps: streams last, and so meet


def run(folder, *options):
    command = ["run", "load", "--model", "tiny", "--out", str(folder), "--quiet", *options]
    result = CliRunner().invoke(commands, command, standalone_mode=False)
    verdicts = json.loads((folder / "run.json").read_text())["verdicts"]
    return result, {one["label"]: one for one in verdicts}


@pytest.fixture(scope="module")
def bundled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("load") / "out"
    cells = ("--cell", "clients-leave", "--cell", "load-full-pool")
    result, verdicts = run(folder, *cells, "--set", "threads=1")
    assert result.return_value == 0, result.output
    return folder, verdicts


def test_clients_that_leave_change_nothing(bundled):
    verdict = bundled[1]["clients-leave[stay.1-cancellations.1]"]
    assert verdict["verdict"] == "PASS"
    assert verdict["control"]["fired"]
    assert "running requests per step" in " ".join(verdict["claims"])


def test_a_full_pool_preempts_and_changes_nothing(bundled):
    verdict = bundled[1]["load-full-pool[none-bursts.2]"]
    assert verdict["verdict"] == "PASS"
    told = " ".join(verdict["claims"])
    assert "preemption" in told
    assert "0 preemptions" not in told.replace("10 preemptions", "")


def test_backgrounds_are_written_down(bundled):
    files = sorted((bundled[0] / "backgrounds").iterdir())
    assert [read_background(file).name for file in files] == ["bursts:2", "cancellations:1", "stay:1"]


def test_clients_that_hang_up_on_a_server_change_nothing(tmp_path):
    options = ("--engine", "endpoint", "--set", "flavour=samebits", "--set", STEADY, "--cell", "served-load")
    result, verdicts = run(tmp_path / "out", *options)
    assert result.return_value in (0, 3), result.output
    for verdict in verdicts.values():  # on a busy machine streams may never meet
        assert verdict["verdict"] == "PASS" or "no PASS without a witness" in verdict["reason"], verdict["reason"]
        assert verdict["comparison"]["differing_positions"] == 0
        assert verdict["control"]["fired"]
        assert "running requests per step" not in " ".join(verdict["claims"])
