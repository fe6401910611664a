"""A canary counts and never passes: shares with intervals, first divergence, margin."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from made_traces import make_traces, with_positions

from harness.canary import Canary, Share, count_repeats
from harness.canary.cli import MEASURED
from harness.cli import commands


def captures(*endings, gap=0.1):
    """Captures of one request of four tokens; each ending replaces its last tokens."""
    made = []
    for ending in endings:
        tokens = np.array([1, 2, 3, 4], np.int32)
        tokens[4 - len(ending) :] = ending
        tops = {"topk_ids": np.array([[1, 2]] * 4, np.int32),
                "topk_logprobs": np.array([[-0.5, -0.5 - gap]] * 4, np.float32)}  # fmt: skip
        made.append(with_positions(make_traces(("a",), (4,)), token=tokens, pick=tokens, **tops))
    return made


def test_wilson_intervals_are_those_of_the_literature():
    assert Share(count=10, total=10).interval == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert Share(count=19, total=20).interval == pytest.approx((0.7639, 0.9911), abs=1e-4)
    assert Share(count=0, total=5).interval == pytest.approx((0.0, 0.4345), abs=1e-4)


@pytest.mark.parametrize(("gap", "margin"), [(0.0, "tie"), (0.125, "near tie"), (1.0, "confident flip")])
def test_the_first_divergence_is_told_from_the_most_frequent_answer(gap, margin):
    found = count_repeats(captures((4,), (4,), (4,), (9, 9), (9,), gap=gap))[0]
    assert (found.modal.count, found.modal.total, found.distinct) == (3, 5, 3)
    assert (found.position, found.margin) == (2, margin)
    assert found.gap == pytest.approx(gap)


def test_equal_answers_have_no_divergence_and_still_do_not_pass():
    found = count_repeats(captures((4,), (4,)))
    assert (found[0].position, found[0].margin, found[0].distinct) == (None, "", 1)
    canary = Canary(corpus="c", repeats=2, here=found)
    assert canary.sentence.startswith("INSUFFICIENT: 0 of 1 requests")
    assert "cannot pass" in canary.sentence
    assert "PASS" not in json.dumps(canary.to_json())


def test_two_arms_are_compared_by_their_most_frequent_answers():
    here, there = count_repeats(captures((4,), (4,), (9,))), count_repeats(captures((9,), (9,), (4,)))
    assert Canary(corpus="c", repeats=3, here=here, there=here).agreeing.count == 1
    assert Canary(corpus="c", repeats=3, here=here, there=there).agreeing.count == 0


def test_the_command_measures_and_returns_the_code_of_insufficient(tmp_path):
    options = ["canary", "smoke", "--engine", "fake", "--repeats", "3", "--out", str(tmp_path / "out"), "--quiet"]
    result = CliRunner().invoke(commands, options, standalone_mode=False)
    assert result.return_value == MEASURED, result.output
    record = json.loads(Path(tmp_path / "out" / "canary.json").read_text())
    assert record["verdict"] == "INSUFFICIENT"
    assert record["pooled"]["count"] == record["pooled"]["total"] == 24
    assert len(record["requests"]) == 8


def test_the_command_finds_an_engine_that_is_not_the_same_twice(tmp_path):
    options = ["canary", "smoke", "--engine", "fake", "--repeats", "3", "--out", str(tmp_path / "out"), "--quiet",
               "--set", "fault=noise"]  # fmt: skip
    result = CliRunner().invoke(commands, options, standalone_mode=False)
    assert result.return_value == MEASURED, result.output
    assert "gave more than one answer in 3" in result.output
    record = json.loads((tmp_path / "out" / "canary.json").read_text())
    assert any(one["distinct"] > 1 and one["first_divergence"] is not None for one in record["requests"])
