"""The engine on the page docs/add-your-engine.md, installed as a package of its own, runs the cell beside it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "add-your-engine.md"
MOST_LINES = 40


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder on the path with the page's module and the metadata that an installer writes."""
    folder = tmp_path_factory.mktemp("site")
    text = PAGE.read_text()
    (module,), (entry, cell) = blocks(text, "python"), blocks(text, "toml")
    (folder / "toy_engine.py").write_text(module)
    (folder / "toy.toml").write_text(cell)
    metadata = folder / "toy_engine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-engine\nVersion: 1.0\n")
    group, entry = entry.splitlines()
    assert group == '[project.entry-points."samebits.engines"]'
    (metadata / "entry_points.txt").write_text(f"[samebits.engines]\n{entry.replace(chr(34), '')}\n")
    return folder


def blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def samebits(site, *words):
    root = str(PAGE.parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), root])}
    return subprocess.run(
        [sys.executable, "-m", "harness.cli", *words], capture_output=True, text=True, timeout=300, env=env, cwd=site
    )


def test_the_page_keeps_its_word_about_size():
    assert len(blocks(PAGE.read_text(), "python")[0].splitlines()) <= MOST_LINES


def test_a_third_partys_engine_passes_its_cell_with_its_control(site, tmp_path):
    out = tmp_path / "out"
    command = re.search(r"samebits (run toy.*)", PAGE.read_text())[1].split()
    done = samebits(site, *command, "--out", str(out), "--quiet")
    assert done.returncode == 0, done.stdout + done.stderr
    (verdict,) = json.loads((out / "run.json").read_text())["verdicts"]
    assert (verdict["verdict"], verdict["control"]["fired"]) == ("PASS", True)
    assert verdict["comparison"]["witnessed"] >= 100


def test_its_refusal_is_its_own_reason(site, tmp_path):
    done = samebits(site, "run", "quick", "--engine", "toy", "--model", "toy", "--cell", "process-restart",
                    "--out", str(tmp_path / "out"), "--quiet")  # fmt: skip
    assert "UNSUPPORTED" in done.stdout
    assert "no state" in (tmp_path / "out" / "run.json").read_text()
    assert done.returncode == 3
