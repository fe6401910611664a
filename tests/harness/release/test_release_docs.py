"""The workflows and units in docs/nightly: their samebits commands run as they are written, on the fake engine."""

import configparser
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from release_making import allow, make_key, samebits

from harness.release.policy import read_policy

DOCS = Path(__file__).resolve().parents[3] / "docs"
NIGHTLY = DOCS / "nightly"
SMALL = {"MATRIX": "quick.toml", "ENGINE": "fake", "MODEL": "fake", "CHANGE_AUTHOR": "bob@example.org"}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A user's repository: baselines accepted, approvals empty, signers and policy as documented."""
    folder = tmp_path_factory.mktemp("project")
    key = make_key(folder, "alice")
    (folder / ".github").mkdir()
    for place in (folder / ".github" / "allowed_signers", folder / "allowed_signers"):
        allow(place, ("alice@example.org", key, 'namespaces="samebits-approval"'))
    (folder / "approvals").mkdir()
    (folder / "gate.toml").write_text((NIGHTLY / "gate.toml").read_text())
    (folder / "quick.toml").write_text((DOCS.parent / "cells" / "quick" / "seeded-natural.toml").read_text())
    first = samebits("run", folder / "quick.toml", "--engine", "fake", "--out", folder / "first", "--quiet")
    assert first.code == 0, first
    done = samebits("baseline", "accept", folder / "first", "--reason", "first", "--author", "alice@example.org",
                    "--baselines", folder / "baselines")  # fmt: skip
    assert done.code == 0, done
    return folder


def shell(project, script):
    """Runs a step as CI would, with `samebits` on the PATH."""
    tools = project / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "samebits").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m harness.cli "$@"\n')
    (tools / "samebits").chmod(0o755)
    home = str(DOCS.parent)
    variables = os.environ | SMALL | {
        "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": home, "GITHUB_STEP_SUMMARY": str(project / "summary"),
    }  # fmt: skip
    return subprocess.run(
        ["bash", "-e", "-c", script], cwd=project, env=variables, capture_output=True, text=True, check=False
    )


def steps(file, *words):
    """The scripts of a workflow's steps whose name is among `words`, in order."""
    document = yaml.safe_load((NIGHTLY / file).read_text())
    (job,) = document["jobs"].values()
    found = [step["run"] for step in job["steps"] if step.get("name") in words]
    assert len(found) == len(words)
    return found


def test_the_nightly_workflow_runs_as_written(project):
    for script in steps("samebits-nightly.yml", "Nightly", "Show the decision"):
        ended = shell(project, script)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "same bits, environment unchanged" in (project / "nightly" / "gate.md").read_text()
    assert "samebits gate: accepted" in (project / "summary").read_text()
    assert (project / "nightly" / "trend.html").exists()
    assert list((project / "history" / "parts").glob("*.parquet"))


def test_the_gate_workflow_runs_as_written_and_archives(project):
    for script in steps("samebits-gate.yml", "Run", "Gate", "Archive"):
        ended = shell(project, script)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "::notice title=samebits gate::" in shell(project, steps("samebits-gate.yml", "Gate")[0]).stdout
    assert (project / "samebits-release.tar").exists()


def unit(name):
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str
    parser.read(NIGHTLY / name)
    return parser


def test_the_systemd_unit_runs_as_written(project):
    command = unit("samebits-nightly.service")["Service"]["ExecStart"]
    program, _, rest = command.partition(" ")
    assert program.endswith("/.venv/bin/samebits")
    ended = shell(project, f"samebits {rest}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "unchanged environment, same bits" in ended.stdout


def test_the_timer_names_a_time_with_a_zone_and_starts_the_unit_of_its_name():
    timer = unit("samebits-nightly.timer")["Timer"]
    assert re.fullmatch(r"\*-\*-\* \d\d:\d\d:\d\d UTC", timer["OnCalendar"])
    assert "Unit" not in timer  # so it is the service of the same name
    assert timer["Persistent"] == "true"


def test_the_documented_policy_reads():
    policy = read_policy(NIGHTLY / "gate.toml")
    assert (policy.rules, policy.terms.author_alone, policy.terms.longest_days) == ({"quick": "topk"}, False, 90)
