"""The scheduler and sampling matrices on the tiny model, whole: every cell judged, witnessed, its control seen to fire.

One test per matrix, since a run is shared by nothing else: about a CPU minute and a third of one.
"""

import json
import re

import pytest
from click.testing import CliRunner

from harness.choose import choose_plan
from harness.cli import commands


@pytest.mark.parametrize("matrix", ["sampling", "scheduler"])
def test_every_cell_of_the_matrix_holds_on_tiny(matrix, tmp_path):
    out = tmp_path / "run"
    command = ["run", matrix, "--model", "tiny", "--out", str(out), "--quiet"]
    result = CliRunner().invoke(commands, command, standalone_mode=False)  # so that its code is the return value
    assert result.return_value == 0, result.output
    verdicts = {one["label"]: one for one in json.loads((out / "run.json").read_text())["verdicts"]}
    plan = choose_plan([matrix], engine="bundled", model="tiny", mode=None, assignments=())
    assert set(verdicts) == {pair.label for pair in plan.pairs}
    for pair in plan.pairs:
        one = verdicts[pair.label]
        assert (one["verdict"], one["expected"]) == ((pair.cell.expect or "PASS"), pair.cell.expect), one["reason"]
        witnessed = one["comparison"]["witnessed"]
        assert one["floor"]["verdict"] == "same"
        assert one["control"]["fired"] is (pair.cell.control.kind != "none"), pair.label
        printed = re.search(rf"^\S+(?: \(expected\))? +{re.escape(pair.label)} +\S+ +\d+ +(\d+) ", result.output, re.M)
        assert printed is not None, result.output
        assert int(printed[1]) == witnessed > 0
    if matrix == "scheduler":
        assert len(list((out / "caches").iterdir())) == 2  # restored by another process; and the control's
        assert any(log.name.startswith("cache-") for log in (out / "logs").iterdir())
