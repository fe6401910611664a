"""The trainer cells end to end on tiny: own scoring is exact, a torch forward is not, and both say by how much."""

import json

import pytest
from click.testing import CliRunner

from engines.bundled_adapter import BundledAdapter
from harness.cli import commands
from harness.corpus import load_corpus, retokenise
from harness.engine import Work
from harness.errors import Unsupported
from harness.schedules import build_schedule


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainer") / "out"
    options = ["--model", "tiny", "--set", "threads=1", "--out", str(folder), "--quiet"]
    result = CliRunner().invoke(commands, ["run", "trainer", *options], standalone_mode=False)
    assert result.return_value == 0, result.output
    return {one["label"]: one for one in json.loads((folder / "run.json").read_text())["verdicts"]}


def test_own_scoring_passes_and_its_divergence_is_exactly_zero(record):
    verdict = record["trainer-own[decode-prefill]"]
    agreement = verdict["agreement"]
    assert verdict["verdict"] == "PASS"
    assert agreement["tokens"] == agreement["equal"] == verdict["comparison"]["positions"]
    assert (agreement["kl_k1"], agreement["kl_k3"], agreement["max_delta"]) == (0.0, 0.0, 0.0)
    assert (agreement["perplexity_ratio"], agreement["pearson"]) == (1.0, 1.0)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_torch_forward_fails_as_declared_with_its_distance(record, layout):
    verdict = record[f"trainer-torch[off-{layout}]"]
    agreement = verdict["agreement"]
    assert (verdict["verdict"], verdict["expected"]) == ("FAIL", "FAIL")
    assert 0 < agreement["tokens"] - agreement["equal"] == verdict["comparison"]["fields"]["logprob"]
    assert 0 < agreement["mean_delta"] < agreement["max_delta"] < 1e-3
    assert 0 < agreement["kl_k3"] < 1e-6
    assert sum(row["tokens"] for row in agreement["by_position"]) == agreement["tokens"]
    assert agreement["pearson"] > 0.999999


def test_a_trainer_generates_nothing():
    requests = retokenise(load_corpus("smoke"), BundledAdapter().tokenizer("tiny")).requests[:1]
    engine = BundledAdapter().start("tiny", {"trainer": "padded", "threads": 1})
    schedule = build_schedule("together", [one.id for one in requests])
    work = Work(requests=requests, schedule=schedule, replay="natural", golden={}, logits_digests=False)
    with pytest.raises(Unsupported, match="generates none"):
        engine.generate(work, lambda _requests, _tokens: None)
    engine.stop()
