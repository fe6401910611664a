"""The parallelism matrix on the tiny models: every cell judged, witnessed, its control seen to fire.

`tensor-parallel` is left out: on a tiny model `tensor-parallel-logits` asks the same of every logit.
"""

import json

from click.testing import CliRunner

from harness.choose import choose_plan
from harness.cli import commands

CELLS = ("disaggregated", "expert-parallel", "moe-alone-vs-batch", "replica", "tensor-parallel-logits")


def test_every_cell_of_the_matrix_holds_on_tiny(tmp_path):
    out = tmp_path / "run"
    chosen = [word for name in CELLS for word in ("--cell", name)]
    command = ["run", "parallelism", "--model", "tiny", *chosen, "--out", str(out), "--quiet"]
    result = CliRunner().invoke(commands, command, standalone_mode=False)  # so that its code is the return value
    assert result.return_value == 0, result.output
    verdicts = {one["label"]: one for one in json.loads((out / "run.json").read_text())["verdicts"]}
    plan = choose_plan(["parallelism"], engine="bundled", model="tiny", mode=None, assignments=(), cells=CELLS)
    assert set(verdicts) == {pair.label for pair in plan.pairs}
    for label, one in verdicts.items():
        assert (one["verdict"], one["floor"]["verdict"]) == ("PASS", "same"), (label, one["reason"])
        assert one["control"]["fired"] is True
        assert one["comparison"]["witnessed"] >= 200
    evidence = {label: " ".join(one["claims"]) for label, one in verdicts.items()}
    assert "observed ranks: 1 and 4" in evidence["tensor-parallel-logits[1-4]"]
    assert "observed ranks: 1 and 4" in evidence["expert-parallel[1-4]"]
    assert "first 12, second 0 and first 6, second 6" in evidence["replica[first-both]"]
    assert "288 of 288 positions in 12 of 12 requests" in evidence["disaggregated[off-on]"]


def test_the_matrix_names_every_cell_that_is_run_here_or_stands_for_one():
    plan = choose_plan(["parallelism"], engine="bundled", model="tiny", mode=None, assignments=())
    assert {pair.cell.name for pair in plan.pairs} == {*CELLS, "tensor-parallel"}
