"""Cells: every mistake is reported at once, with its path and a suggestion."""

from pathlib import Path

import pytest

import cells
from harness.cell import parse_cell
from harness.errors import CellError
from harness.matrix import load_matrix

SHIPPED = sorted(path.parent.name for path in Path(cells.__file__).parent.glob("*/matrix.toml"))

GOOD = {
    "name": "max-num-seqs",
    "invariant": "A sentence.",
    "corpus": "quick",
    "rule": "topk",
    "replay": "golden",
    "axis": {"name": "max_num_seqs", "reference": 1, "variants": [8]},
    "control": {"mode": "free"},
}


def changed(**changes):
    return {**GOOD, **changes}


def mistakes(table):
    cell, found = parse_cell(table)
    assert cell is None
    return found


def test_a_good_cell_has_no_mistakes():
    cell, found = parse_cell(GOOD)
    assert found == ()
    assert cell.axis.name == "max_num_seqs"
    assert cell.variants == (8,)
    assert cell.control.kind == "mode"
    assert cell.minimum == 1


def test_all_mistakes_are_reported_at_once():
    found = mistakes(changed(rule="topq", replay=3, corpuss="x", axis={"name": "max_num_seq", "variants": []}))
    text = "\n".join(found)
    assert "$.rule: 'topq' is not one of" in text
    assert "did you mean 'topk'?" in text
    assert "$.replay: expected str, got 3 (int)" in text
    assert "$.corpuss: unknown key; did you mean 'corpus'?" in text
    assert "$.axis.name: 'max_num_seq' is not one of" in text
    assert "$.axis.reference: missing" in text
    assert "$.axis.variants: expected a list with at least one value" in text


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (changed(axis={"name": "batch", "reference": "alone", "variants": ["togther"]}), "$.axis.variants[0]:"),
        (changed(axis={"name": "max_num_seqs", "reference": 1, "variants": [1]}), "equals the reference"),
        (changed(axis={"name": "max_num_seqs", "reference": 1, "variants": [2, 2]}), "listed twice"),
        (changed(axis={"name": "companions", "reference": "none", "variants": ["smoke"]}), "CORPUS:COUNT"),
        (changed(axis={"name": "restart", "reference": "same", "variants": ["old"]}), "expected one of same, new"),
        (changed(axis={"name": "max_num_seqs", "reference": [1], "variants": [2]}), "$.axis.reference:"),
        (changed(control={}), "$.control: expected one of mode"),
        (changed(control={"mode": "free", "planted": "least"}), "got mode, planted"),
        (changed(control={"planted": "two-ulp"}), "$.control.planted"),
        (changed(control={"mode": "free", "requests": 0}), "at least 1, got 0"),
        (changed(minimum=0), "$.minimum: expected an integer of at least 1, got 0"),
        (changed(minimum=True), "$.minimum: expected int, got True (bool)"),
        (changed(requires={"core": 2}), "$.requires.core: unknown key; did you mean 'cores'?"),
        (changed(name="Max Num"), "$.name: expected lower-case"),
        (changed(expect="PASS"), "$.expect"),
        (changed(invariant="  "), "$.invariant: expected a sentence"),
    ],
)  # fmt: skip
def test_one_mistake_one_message(table, message):
    found = mistakes(table)
    assert any(message in line for line in found), found


def write(folder, name, text):
    (folder / name).write_text(text, encoding="utf-8")


CELL = """
schema = 1
name = "{name}"
invariant = "A sentence."
corpus = "quick"
rule = "topk"
replay = "golden"
[axis]
name = "max_num_seqs"
reference = 1
variants = [8]
[control]
mode = "free"
"""


def test_a_folder_is_read_whole_and_every_file_named(tmp_path):
    write(tmp_path, "a.toml", CELL.format(name="a").replace("topk", "topq"))
    write(tmp_path, "b.toml", "schema = 1\nname = ")
    write(tmp_path, "c.toml", CELL.format(name="c").replace("schema = 1", "schema = 2"))
    write(tmp_path, "d.toml", CELL.format(name="d").replace("schema = 1", ""))
    write(tmp_path, "e.toml", CELL.format(name="e").replace("schema = 1", "schema = 0"))
    with pytest.raises(CellError) as error:
        load_matrix(str(tmp_path))
    text = str(error.value)
    assert f"{tmp_path}/a.toml: $.rule" in text
    assert f"{tmp_path}/b.toml: not TOML" in text
    assert "install a newer samebits" in text
    assert "missing; write `schema = 1`" in text
    assert "is older than 1" in text


def test_names_must_be_unique_and_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(CellError, match="no cells"):
        load_matrix(str(tmp_path))
    write(tmp_path, "a.toml", CELL.format(name="same"))
    write(tmp_path, "b.toml", CELL.format(name="same"))
    with pytest.raises(CellError, match="twice: same"):
        load_matrix(str(tmp_path))


def test_an_existing_path_wins_over_a_shipped_name(tmp_path, monkeypatch):
    (tmp_path / "quick").mkdir()
    write(tmp_path / "quick", "mine.toml", CELL.format(name="mine"))
    monkeypatch.chdir(tmp_path)
    assert [cell.name for cell in load_matrix("quick").cells] == ["mine"]


def test_an_unknown_matrix_is_refused_with_a_suggestion(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CellError, match="did you mean 'quick'"):
        load_matrix("quik")


def test_a_matrix_that_includes_itself_is_refused(tmp_path):
    write(tmp_path, "a.toml", CELL.format(name="a"))
    write(tmp_path, "matrix.toml", f'schema = 1\ninclude = ["{tmp_path}"]\n')
    with pytest.raises(CellError, match=r"matrix.toml: \$\.include\[0\]: .* includes itself: .* -> "):
        load_matrix(str(tmp_path))


def made(folder, include=(), cell=None):
    """A matrix of one cell or none."""
    folder.mkdir()
    write(folder, "matrix.toml", f"schema = 1\ninclude = {list(include)}\n".replace("'", '"'))
    if cell:
        write(folder, f"{cell}.toml", CELL.format(name=cell))
    return folder


def test_matrices_that_include_each_other_are_refused(tmp_path):
    made(tmp_path / "a", ["b"], "one")
    made(tmp_path / "b", ["a"], "two")
    with pytest.raises(
        CellError, match=r"b/matrix.toml: \$\.include\[0\]: 'a' includes itself: \S+/a -> \S+/b -> \S+/a"
    ):
        load_matrix(str(tmp_path / "a"))


def test_all_wrong_includes_are_named_at_once(tmp_path):
    made(tmp_path / "a", ["quik", "quick", "nowhere", "quick"], "one")
    with pytest.raises(CellError) as error:
        load_matrix(str(tmp_path / "a"))
    unknown, other, twice = str(error.value).splitlines()
    assert "$.include[0]: no matrix 'quik' beside this one or shipped; did you mean 'quick'" in unknown
    assert "$.include[2]: no matrix 'nowhere'" in other
    assert "$.include[3]: 'quick' is listed twice" in twice


def test_a_matrix_that_two_others_include_is_taken_once(tmp_path):
    made(tmp_path / "base", [], "base")
    made(tmp_path / "left", ["base"], "left")
    made(tmp_path / "right", ["base"])
    made(tmp_path / "all", ["left", "right", "base"])
    assert [cell.name for cell in load_matrix(str(tmp_path / "all")).cells] == ["left", "base"]
    with pytest.raises(CellError, match="no cells"):
        load_matrix(str(made(tmp_path / "none")))


def test_two_included_cells_of_one_name_are_refused(tmp_path):
    made(tmp_path / "left", [], "same")
    made(tmp_path / "right", [], "same")
    with pytest.raises(CellError, match="all: cell names must be unique; twice: same"):
        load_matrix(str(made(tmp_path / "all", ["left", "right"])))


def test_an_include_is_not_looked_up_where_the_command_runs(tmp_path, monkeypatch):
    made(tmp_path / "quick", [], "mine")
    monkeypatch.chdir(tmp_path)
    names = [cell.name for cell in load_matrix("release").cells]
    assert "mine" not in names
    assert "alone-vs-batch" in names


def test_release_is_the_union_of_its_parts():
    parts = ["quick", "ragged", "scheduler", "sampling", "build", "parallelism"]
    release = load_matrix("release")
    assert list(release.cells) == [cell for name in parts for cell in load_matrix(name).cells]
    assert set(release.allow_unsupported) == {one for name in parts for one in load_matrix(name).allow_unsupported}


def test_include_joins_cells(tmp_path):
    write(tmp_path, "matrix.toml", 'schema = 1\ninclude = ["build", "quick"]\nallow_unsupported = ["isa"]\n')
    matrix = load_matrix(str(tmp_path))
    assert matrix.cells == (*load_matrix("build").cells, *load_matrix("quick").cells)
    assert matrix.allow_unsupported == ("isa",)


def test_several_cells_in_one_file(tmp_path):
    body = CELL.format(name="one").replace("schema = 1\n", "")
    two = body.replace('"one"', '"two"')
    text = "schema = 1\n[[cells]]\n" + body.replace("[axis]", "[cells.axis]").replace("[control]", "[cells.control]")
    text += "[[cells]]\n" + two.replace("[axis]", "[cells.axis]").replace("[control]", "[cells.control]")
    write(tmp_path, "many.toml", text)
    assert [cell.name for cell in load_matrix(str(tmp_path / "many.toml")).cells] == ["one", "two"]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_cell_validates_and_can_fail(name):
    for cell in load_matrix(name).cells:
        assert cell.control.kind != "none" or cell.expect, f"{cell.name} has no control"
        assert cell.invariant.endswith(".")
