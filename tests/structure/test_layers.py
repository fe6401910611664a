"""Imports point one way: engines -> harness <- reports; the bundled engine stands alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "vllm", "pandas", "pyarrow", "jinja2", "numpy", "transformers", "fastapi", "pydantic", "uvicorn")


def modules(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files, f"no modules under {folder}"
    return files


def imported(file):
    """Top-level names of every import statement, wherever it stands."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names.add(node.module)
    return names


def offending(folder, forbidden):
    return [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in modules(folder)
        for name in sorted(imported(file))
        if any(name == package or name.startswith(package + ".") for package in forbidden)
    ]


def test_the_harness_imports_neither_engines_nor_reports():
    assert offending("harness", ("engines", "reports", "tests", "benchmarks")) == []


def test_engines_and_reports_do_not_import_each_other():
    assert offending("engines", ("reports", "tests", "benchmarks")) == []
    assert offending("reports", ("engines", "tests", "benchmarks")) == []


def test_the_bundled_engine_imports_nothing_of_the_harness():
    assert offending("engines/bundled", ("harness", "reports")) == []


def test_the_check_itself_finds_an_import(tmp_path):
    file = tmp_path / "x.py"
    file.write_text("def f():\n    from harness.plan import Plan\n")
    assert imported(file) == {"harness.plan"}


@pytest.mark.parametrize(
    "module", ["harness", "harness.cli", "harness.plugin", "engines.bundled_adapter", "engines.http.adapter"]
)
def test_importing_stays_light(module):
    code = f"import sys, {module}; print([n for n in {HEAVY!r} if n in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_no_module_grows_without_end():
    long = {str(f.relative_to(ROOT)): n for folder in ("harness", "engines", "reports") for f in modules(folder)
            if (n := len(f.read_text(encoding="utf-8").splitlines())) > 420}  # fmt: skip
    assert long == {}, "split these files by the nouns in them"


def test_no_module_is_named_for_nothing():
    vague = {"utils", "common", "helpers", "manager", "misc"}
    found = [f for folder in ("harness", "engines", "reports") for f in modules(folder) if f.stem in vague]
    assert found == []
