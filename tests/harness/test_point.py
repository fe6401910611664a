"""A cell's declared point: a fault that the axis cannot have caused shows nothing."""

from dataclasses import replace

from harness.judge import judge
from harness.specimen import alone_traces, make_capture, make_trial, shifted


def test_a_failure_at_no_position_that_the_axis_reached_is_not_the_cells_point():
    """The variant ran alone as well: whatever differs, company is not what made it so."""
    trial = make_trial()
    pair = replace(trial.pair, cell=replace(trial.pair.cell, expect="FAIL"))
    expected = {**trial.expected, "varied": trial.expected["reference"]}
    captures = {**trial.captures, "varied": make_capture("varied", shifted(alone_traces()))}
    verdict = judge(pair, captures, expected)
    assert str(verdict.verdict) == "INSUFFICIENT"
    assert "no position was reached by the axis" in verdict.reason
    captures["varied"] = make_capture("varied", shifted(trial.varied.traces))
    verdict = judge(pair, captures, trial.expected)
    assert (str(verdict.verdict), str(verdict.expected)) == ("FAIL", "FAIL"), verdict.reason
