"""docs/engines.md says what the adapters answer: every axis, mode and rule once, refused where they refuse."""

import re
from pathlib import Path

import pytest

from harness.engine import RULES
from harness.matrix import load_matrix, shipped_names
from harness.registry import adapter

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "engines.md"
ENGINES = ("deepinfer", "sglang", "transformers", "vllm")
ANY = re.compile(r"`([A-Za-z0-9_.-]+)`")


def section(engine):
    """The text under `## ENGINE: …`."""
    found = re.search(rf"^## {engine}: .*?(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found, f"docs/engines.md has no section '## {engine}: …'"
    return found[0]


def rows(text, first):
    """Cells of every row of the tables whose first column is headed `first`."""
    inside, found = False, []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        inside = bool(cells) and (inside or cells[0] == first)
        if inside and cells[0] != first and not set(cells[0]) <= set("-: "):
            found.append(cells)
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_every_axis_stands_there_once_and_is_refused_where_the_adapter_refuses(engine):
    told = [(name, row[1]) for row in rows(section(engine), "axis") for name in ANY.findall(row[0])]
    names = [name for name, _ in told]
    axes = adapter(engine).axes()
    assert sorted(names) == sorted(axes)
    for name, state in told:
        if axes[name].unsupported is not None:
            assert state.startswith("refused"), f"{engine}: {name} is refused ({axes[name].unsupported})"
        elif engine != "vllm":  # a build of vLLM may refuse what its adapter offers
            assert not state.startswith("refused"), f"{engine}: {name} is offered"


@pytest.mark.parametrize("engine", ENGINES)
def test_every_mode_is_named(engine):
    assert set(adapter(engine).modes()) <= set(ANY.findall(section(engine)))


@pytest.mark.parametrize("engine", ENGINES)
def test_rules_up_to_the_strongest_and_none_beyond(engine):
    told = {name: row[1] for row in rows(section(engine), "rule or feature") for name in ANY.findall(row[0])}
    strongest = RULES.index(adapter(engine).strongest_rule())
    for index, rule in enumerate(RULES):
        assert told[rule].startswith("refused") == (index > strongest), f"{engine}: {rule}"


def test_the_tests_and_cells_that_are_named_exist():
    text = PAGE.read_text()
    tests = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert {name for name in ANY.findall(text) if name.startswith("test_")} <= tests
    cells = {cell.name for name in shipped_names() for cell in load_matrix(name).cells}
    named = {name for line in re.findall(r"cells? ((?:`[a-z0-9-]+`(?:, )?)+)", text) for name in ANY.findall(line)}
    assert len(named) > 15
    assert named <= cells
