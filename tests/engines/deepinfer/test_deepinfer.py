"""The DeepInfer adapter on a stand-in with DeepInfer's signatures: conditions, evidence, refusals. No GPU."""

import hashlib
import importlib.util
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import signatures
from offline_cases import paths, quiet, requests, work

from engines import deepinfer_lifetime
from engines.deepinfer_local import VARIABLES, DeepInferAdapter
from engines.hf_folders import open_folder
from harness.axis import AXES
from harness.choose import choose_plan
from harness.claims import check_claims
from harness.compare import compare
from harness.errors import EngineDied, EngineError, Unsupported
from harness.witness import witnessed

HERE = Path(__file__).parent
ADAPTER = DeepInferAdapter()
RECORDED = json.loads((HERE / "recorded.json").read_text())
SOURCE = os.environ.get("SAMEBITS_DEEPINFER_SOURCE")  # an unpacked source package of DeepInfer 0.1.0


@pytest.fixture
def start(monkeypatch):
    """Starts the adapter on the stand-in, with the variables the child process would carry."""
    monkeypatch.setattr(deepinfer_lifetime, "accelerator", lambda: "sm100")
    monkeypatch.setattr(deepinfer_lifetime, "PYTHON", sys.version_info[:2])
    monkeypatch.syspath_prepend(str(HERE / "standin"))
    started = []

    def begin(**settings):
        for name, value in ADAPTER.environment(settings).items():
            if name.startswith("DEEPINFER_"):
                monkeypatch.setenv(name, value)
        started.append(ADAPTER.start(str(open_folder("tiny")), settings))
        return started[-1]

    yield begin
    for engine in started:
        engine.stop()
        assert engine.llm.closed
    for name in [name for name in sys.modules if name.split(".")[0] == "deepinfer"]:
        del sys.modules[name]


def run(engine, *arguments, **options):
    traces = engine.generate(work(*arguments, **options), quiet)
    assert check_claims(traces) == ()
    return traces


def test_together_and_alone_are_equal_under_the_three_conditions(start):
    engine = start()
    alone = run(engine, requests(), schedule="alone")
    together = run(engine, requests(), golden=paths(alone))
    found = compare(alone, together, "topk", "golden")
    assert (found.outcome, found.positions) == ("same", 24)
    assert int(witnessed(alone, together, "beside").mask.sum()) == 24
    assert dict(together.counters)["max_running"] == 4
    assert dict(alone.counters)["max_running"] == 1


@pytest.mark.parametrize("taken", [{"batch_invariant": False}, {"mtp_varlen": True}])
def test_without_a_condition_together_differs(start, taken):
    engine = start(**taken)
    alone = run(engine, requests(), schedule="alone")
    assert compare(alone, run(engine, requests(), golden=paths(alone)), "topk", "golden").outcome == "different"


def test_without_a_seed_the_same_request_differs_from_itself(start):
    hot = requests(temperature=1.0, seed=11)
    fixed, loose = start(), None
    assert paths(run(fixed, hot)) == paths(run(fixed, hot))
    loose = start(seeding="none")
    assert paths(run(loose, hot)) != paths(run(loose, hot))


def test_the_conditions_are_read_back_from_deepinfer(start):
    observed = start().observed()
    assert {name: observed[f"condition.{name}"] for name in ("batch_invariant", "mtp_varlen")} == {
        "batch_invariant": True, "mtp_varlen": False,
    }  # fmt: skip
    assert observed["draft_length"] == 5


def test_a_condition_that_did_not_arrive_is_an_error(start, monkeypatch):
    start()
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", "0")
    with pytest.raises(EngineError, match="DEEPINFER_BATCH_INVARIANT: True was set, DeepInfer holds False"):
        ADAPTER.start(str(open_folder("tiny")), {})


def test_proposals_count_as_accepted_tokens_of_one_row(start):
    traces = run(start(), requests(), schedule="alone")
    assert traces.requests.accepted.tolist() == [2] * 4  # 1, 2, 2, 1 tokens in four steps
    assert run(start(draft_length=0), requests(), schedule="alone").requests.accepted.tolist() == [0] * 4


def test_steps_that_ran_ahead_are_seen_when_they_are_flushed(start):
    late, prompt = start(), start(async_scheduling=False)
    run(prompt, requests())
    assert prompt.observed()["steps_scheduled_ahead"] == 0
    late = start(async_scheduling=True)
    run(late, requests())
    assert late.observed()["steps_scheduled_ahead"] == 1


def test_a_forced_pick_is_known_for_greedy_requests_alone(start):
    engine = start()
    own = paths(run(engine, requests(), schedule="alone"))
    forced = {name: tuple((token + 1) % 64 for token in tokens) for name, tokens in own.items()}
    traces = run(engine, requests(), golden=forced)
    assert paths(traces) == forced
    first = np.cumsum(traces.requests.length) - traces.requests.length
    assert traces.positions.pick[first].tolist() == [own[name][0] for name in traces.requests.id]
    for hidden in ({"temperature": 1.0, "seed": 3}, {"logprobs": 0}):
        with pytest.raises(Unsupported, match="replay = natural"):
            engine.generate(work(requests(**hidden), golden=forced), quiet)


def test_an_answer_that_is_lost_or_leaves_the_golden_path_is_an_error(start, monkeypatch):
    engine = start()
    whole = engine.llm.generate
    monkeypatch.setattr(engine.llm, "generate", lambda **options: whole(**options)[:-1])
    with pytest.raises(EngineError, match="answered 3 of 4"):
        engine.generate(work(requests()), quiet)
    other = start()
    make = other._parameters
    monkeypatch.setattr(type(other), "_parameters", lambda self, request, golden: make(request, None))
    with pytest.raises(EngineError, match="left the golden path"):
        other.generate(work(requests(), golden={f"r{i}": (63,) * 6 for i in range(4)}), quiet)


def test_a_failure_ends_the_engine_in_its_own_words(start, monkeypatch):
    engine = start()

    def fail(**_options):
        raise RuntimeError("No more blocks")

    monkeypatch.setattr(engine.llm, "generate", fail)
    with pytest.raises(EngineDied, match="No more blocks"):
        engine.generate(work(requests()), quiet)
    with pytest.raises(EngineDied, match="failed before"):
        engine.generate(work(requests()), quiet)


@pytest.mark.parametrize(
    "changed",
    [{"min_p": 0.1, "temperature": 1.0, "seed": 1}, {"n": 2}, {"stop_token_ids": (3,)}, {"logit_bias": ((1, 2.0),)}],
)
def test_what_deepinfer_lacks_is_refused(start, changed):
    with pytest.raises(Unsupported, match="r0"):
        start().generate(work(requests(**changed)), quiet)


@pytest.mark.parametrize(("found", "python", "invariant", "words"), [
    ("none", (3, 12), True, "SM100 and Ascend 950; there is no accelerator"),
    ("sm90", (3, 12), True, "SM100 and Ascend 950; this machine has sm90"),
    ("sm120", (3, 12), True, "this machine has sm120"),
    ("ascend", (3, 12), True, "for NVIDIA alone"),
    ("sm100", (3, 11), True, "Python 3.12; this is 3.11"),
])  # fmt: skip
def test_other_platforms_are_unsupported_with_the_reason(found, python, invariant, words):
    with pytest.raises(Unsupported, match=words):
        deepinfer_lifetime.refuse_platform(found, python, batch_invariant=invariant)


def test_platforms_it_runs_on_are_not_refused():
    deepinfer_lifetime.refuse_platform("sm103", (3, 12), batch_invariant=True)
    deepinfer_lifetime.refuse_platform("ascend", (3, 12), batch_invariant=False)


def test_this_machine_or_the_missing_package_is_the_reason_here():
    with pytest.raises(Unsupported, match=r"SM100 and Ascend 950|Python 3\.12|not installed"):
        ADAPTER.start(str(open_folder("tiny")), {})


def test_every_axis_exists_and_owns_the_variable_that_carries_it():
    names = {setting.name for setting in ADAPTER.settings()}
    for name, support in ADAPTER.axes().items():
        assert AXES[name].kind != "setting" or name in names or support.unsupported, name
        if name in VARIABLES and support.unsupported is None:
            assert f"env.{VARIABLES[name]}" in support.fields


def test_the_matrix_mirrors_the_public_test_and_takes_each_condition_away():
    plan = choose_plan(["deepinfer"], engine="deepinfer", model="tiny", mode=None, assignments=())
    cells = {pair.cell.name: pair.cell for pair in plan.pairs}
    assert (cells["deepinfer-together-and-alone"].corpus, cells["deepinfer-together-and-alone"].rule) == (
        "random:greedy", "topk",
    )  # fmt: skip
    expected = {name for name, cell in cells.items() if cell.expect and "without" in name}
    assert expected == {
        "deepinfer-without-batch-invariance", "deepinfer-without-fixed-drafts", "deepinfer-without-seed",
    }  # fmt: skip
    assert all(pair.unsupported is None for pair in plan.pairs)


def test_the_stand_in_has_the_signatures_of_the_source_package():
    assert signatures.read(HERE / "standin" / "deepinfer") == RECORDED["signatures"]


@pytest.mark.skipif(not SOURCE, reason="SAMEBITS_DEEPINFER_SOURCE names no unpacked source package; the record is used")
def test_the_source_package_is_what_was_recorded_and_holds_what_the_adapter_sets(monkeypatch):
    package = Path(SOURCE) / "deepinfer"
    assert signatures.read(package) == RECORDED["signatures"]
    for file, digest in RECORDED["sha256"].items():
        assert hashlib.sha256((package / file).read_bytes()).hexdigest() == digest
    spec = importlib.util.spec_from_file_location("deepinfer.sampling_params", package / "sampling_params.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(
        sys.modules, "deepinfer", importlib.util.module_from_spec(importlib.util.spec_from_loader("deepinfer", None))
    )
    monkeypatch.setitem(sys.modules, "deepinfer.sampling_params", module)
    engine = deepinfer_lifetime.DeepInferLifetime.__new__(deepinfer_lifetime.DeepInferLifetime)
    engine.settings = {"seeding": "request"}
    made = engine._parameters(requests(seed=2**64 - 1, temperature=0.7)[0], (1, 2, 3))
    assert (made.seq_seed, made.max_tokens, made.golden_token_ids, made.top_k) == (2**64 - 1, 3, [1, 2, 3], -1)
    engine.settings = {"seeding": "none"}
    seeds = {engine._parameters(requests()[0], None).seq_seed for _ in range(4)}
    assert len(seeds) == 4  # the third condition, taken away without a word
