"""The pytest plugin, driven as users drive it: a nested pytest over small matrices on the fake engine."""

import re
import subprocess
import sys

import pytest

CELL = """schema = 1
name = "{name}"
invariant = "A seed gives the same tokens in any company."
corpus = "smoke"
rule = "topk"
replay = "natural"
{extra}
[axis]
name = "batch"
reference = "alone"
variants = ["together"]
[control]
variant = {{ seed_offset = 1 }}
{requires}
"""


def run_pytest(folder, *arguments, engine="fake"):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", "-rs", *arguments]
    if engine:
        command += ["--samebits-engine", engine]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.fixture
def project(tmp_path):
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["harness.plugin"]\n')
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_unit.py").write_text("def test_unit():\n    assert 1 + 1 == 2\n")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "first.toml").write_text(CELL.format(name="first", extra="", requires=""))
    return tmp_path


def add(project, name, extra="", requires=""):
    (project / "mine" / f"{name}.toml").write_text(CELL.format(name=name, extra=extra, requires=requires))


def test_plain_pytest_runs_unit_tests_only(project):
    result = run_pytest(project)
    assert result.returncode == 0, result.stdout
    assert "1 passed" in result.stdout
    assert "samebits" not in result.stdout.splitlines()[-1]


def test_the_matrix_is_collected_with_plain_names(project):
    result = run_pytest(project, "-m", "matrix", "--samebits-matrix", "mine", "--collect-only", "-q")
    assert result.returncode == 0, result.stdout + result.stderr
    names = [line for line in result.stdout.splitlines() if "::" in line]
    assert names == ["mine/first.toml::first[alone-together]"]
    assert re.fullmatch(r"[A-Za-z0-9/._:\[\]-]+", names[0])


def test_a_passing_matrix_says_how_much_was_judged(project):
    result = run_pytest(project, "-m", "matrix", "--samebits-matrix", "mine")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 passed" in result.stdout
    assert "1 of 1 planned pairs judged" in result.stdout


def test_a_failure_is_five_lines(project):
    result = run_pytest(project, "-m", "matrix", "--samebits-matrix", "mine", "--samebits-set", "invariant=false")
    assert result.returncode == 1, result.stdout + result.stderr
    block = result.stdout.partition("first[alone-together]")[2].partition("= samebits")[0].partition("= short")[0]
    lines = [line for line in block.splitlines() if line.strip() and not set(line.strip()) <= set("_ =")]
    assert len(lines) == 5, lines
    text = "\n".join(lines)
    for word in ("FAIL", "position", "forward"):
        assert word in text
    assert "Traceback" not in result.stdout


def test_unsupported_is_a_skip_with_its_reason(project):
    add(project, "second", requires='[requires]\nengines = ["vllm"]')
    result = run_pytest(project, "-m", "matrix", "--samebits-matrix", "mine")
    assert result.returncode == 0, result.stdout
    assert "1 passed, 1 skipped" in result.stdout
    assert "UNSUPPORTED: the cell is for vllm, the engine is fake" in result.stdout
    assert "2 of 2 planned pairs judged" in result.stdout


UNFORESEEN = """schema = 1
name = "unforeseen"
invariant = "Pages do not matter."
corpus = "smoke"
rule = "topk"
replay = "golden"
axis = { name = "page_size", reference = 8, variants = [16] }
control = { mode = "free" }
"""


def test_unsupported_that_nobody_foresees_fails_as_it_does_in_run(project):
    (project / "mine" / "unforeseen.toml").write_text(UNFORESEEN)
    result = run_pytest(project, "-m", "matrix", "--samebits-matrix", "mine")
    assert result.returncode == 1, result.stdout
    assert "UNSUPPORTED, and neither [requires] nor" in result.stdout
    (project / "mine" / "matrix.toml").write_text('schema = 1\nallow_unsupported = ["unforeseen"]\n')
    result = run_pytest(project, "-m", "matrix", "--samebits-matrix", "mine")
    assert (result.returncode, "1 passed, 1 skipped" in result.stdout) == (0, True), result.stdout


def test_a_session_in_which_nothing_passed_is_not_green(project):
    (project / "mine" / "first.toml").unlink()
    add(project, "second", requires='[requires]\nengines = ["vllm"]')
    result = run_pytest(project, "-m", "matrix", "--samebits-matrix", "mine", "-n", "2")
    assert result.returncode == 1, result.stdout
    assert "not green: nothing passed: every planned pair failed or is UNSUPPORTED here" in result.stdout


def test_a_path_that_is_given_is_run_and_not_replaced_by_the_default(project):
    """`pytest -m matrix FOLDER` must judge the cells of FOLDER, beside those of --samebits-matrix."""
    other = project / "other"
    other.mkdir()
    (other / "broken.toml").write_text(CELL.format(name="broken", extra="", requires="[settings]\ninvariant = false"))
    for chosen in (("other",), ("other", "--samebits-matrix", "mine", "-n", "2")):
        result = run_pytest(project, "-m", "matrix", *chosen)
        assert result.returncode == 1, result.stdout
        assert "broken[alone-together] FAIL" in result.stdout
        assert ("1 passed" in result.stdout) is ("mine" in chosen)


def test_a_matrix_that_includes_others_brings_their_cells(project):
    (project / "all").mkdir()
    (project / "all" / "matrix.toml").write_text('schema = 1\ninclude = ["mine"]\n')
    (project / "unasked").mkdir()
    (project / "unasked" / "unasked.toml").write_text(CELL.format(name="unasked", extra="", requires=""))
    result = run_pytest(project, "-m", "matrix", "--samebits-matrix", "all", "-n", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 of 1 planned pairs judged" in result.stdout


def test_a_pair_that_was_planned_but_not_judged_fails_the_session(project):
    """`-x` stops after the first failure; what it leaves unjudged must not look green to anyone who filters."""
    (project / "conftest.py").write_text(
        'pytest_plugins = ["harness.plugin"]\n'
        "import pytest\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_runtest_protocol(item, nextitem):\n"
        "    return True if 'first' in item.name else None\n"
    )
    add(project, "second")
    result = run_pytest(project, "-m", "matrix", "--samebits-matrix", "mine")
    assert result.returncode == 1, result.stdout
    assert "1 of 2 planned pairs judged" in result.stdout
    assert "planned but not judged" in result.stdout


def test_deselected_pairs_are_not_in_the_plan(project):
    add(project, "second")
    result = run_pytest(project, "-m", "matrix", "--samebits-matrix", "mine", "-k", "second")
    assert result.returncode == 0, result.stdout
    assert "1 of 1 planned pairs judged" in result.stdout


def test_under_xdist_the_plan_is_summed_over_workers(project):
    add(project, "second")
    add(project, "third")
    result = run_pytest(project, "-m", "matrix", "--samebits-matrix", "mine", "-n", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "3 passed" in result.stdout
    assert "3 of 3 planned pairs judged" in result.stdout


def test_a_worker_that_dies_leaves_its_pair_unjudged(project):
    (project / "conftest.py").write_text(
        'pytest_plugins = ["harness.plugin"]\n'
        "import os, pytest\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_runtest_protocol(item, nextitem):\n"
        "    if 'first' in item.name:\n"
        "        os._exit(1)\n"
    )
    add(project, "second")
    result = run_pytest(project, "-m", "matrix", "--samebits-matrix", "mine", "-n", "2", "--max-worker-restart", "0")
    assert result.returncode != 0, result.stdout


def test_a_bad_cell_file_is_a_collection_error_with_its_place(project):
    add(project, "second", extra='expct = "FAIL"')
    result = run_pytest(project, "-m", "matrix", "--samebits-matrix", "mine")
    assert result.returncode not in (0, 5), result.stdout
    assert "second.toml: $.expct: unknown key; did you mean 'expect'?" in result.stdout


def test_an_unknown_matrix_is_a_usage_error(project):
    result = run_pytest(project, "-m", "matrix", "--samebits-matrix", "quik")
    assert result.returncode == 4
    assert "did you mean 'quick'?" in result.stderr
