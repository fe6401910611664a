"""The SGLang adapter on a stand-in with its offline engine's fields: evidence, side effects, refusals. No GPU."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from offline_cases import paths, quiet, request, requests, work

from engines.hf_folders import open_folder
from engines.sglang_lifetime import IGNORED, arguments
from engines.sglang_local import NOT_INSTALLED, SglangAdapter
from harness import limits
from harness.axis import AXES
from harness.claims import check_claims
from harness.compare import compare
from harness.errors import EngineError, Unsupported
from harness.witness import witnessed

ADAPTER = SglangAdapter()
NAMES = {setting.name: setting.default for setting in ADAPTER.settings()}
MANY = {"max_tokens": 24}


@pytest.fixture
def start(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "standin"))
    started = []

    def begin(**settings):
        started.append(ADAPTER.start("tiny", settings))
        return started[-1]

    yield begin
    for engine in started:
        engine.stop()
    sys.modules.pop("sglang", None)


def run(engine, *given, **options):
    traces = engine.generate(work(*given, **options), quiet)
    assert check_claims(traces) == ()
    return traces


def test_alone_and_together_are_equal_in_the_deterministic_mode(start):
    engine = start(deterministic=True)
    alone, together = run(engine, requests(**MANY), schedule="alone"), run(engine, requests(**MANY))
    assert compare(alone, together, "topk", "natural").outcome == "same"
    assert int(witnessed(alone, together, "beside").mask.sum()) > 48
    assert together.positions.topk_ids.shape == (96, 5)


def test_as_it_comes_together_differs(start):
    engine = start()
    alone, together = run(engine, requests(**MANY), schedule="alone"), run(engine, requests(**MANY))
    assert compare(alone, together, "topk", "natural").outcome == "different"


def test_logprobs_keep_their_float32_bits(start):
    traces = run(start(deterministic=True), requests(**MANY))
    assert dict(traces.counters)["inexact_numbers"] == 0
    assert traces.positions.logprob.dtype == np.float32


def test_side_effects_of_the_deterministic_flag_are_resolved_and_observed(start):
    engine = start(deterministic=True, attention_backend="flashinfer", prefix_cache=True)
    assert engine.settings["prefix_cache"] is True
    assert engine.resolved()["prefix_cache"] is False
    observed = engine.observed()
    assert (observed["attention_backend"], observed["sampling_backend"], observed["radix_cache"]) == (
        "flashinfer", "pytorch", "off",
    )  # fmt: skip


def test_older_versions_resolve_their_arguments_in_place(start):
    engine = start(deterministic=True)
    engine.engine.server_args = engine.engine.told
    assert engine.resolved()["sampling_backend"] == "pytorch"


def test_the_seed_that_is_drawn_with_when_none_is_sent_is_found_out(start):
    engine = start(deterministic=True)
    assert engine.observed()["default_seed"] == "42"
    assert limits.SAMPLING not in engine.observed()


def test_without_the_flag_seeds_are_ignored_and_that_limits_what_may_be_claimed(start):
    observed = start().observed()
    assert observed["default_seed"] == observed[limits.SAMPLING] == IGNORED


def test_a_seed_is_sent_unless_it_is_taken_away(start):
    hot = requests(temperature=1.0, seed=7, **MANY)
    other = requests(temperature=1.0, seed=8, **MANY)
    fixed = start(deterministic=True)
    assert paths(run(fixed, hot)) == paths(run(fixed, hot)) != paths(run(fixed, other))
    none = start(deterministic=True, seeding="none")
    assert paths(run(none, hot)) == paths(run(none, other))  # 42 for everybody


def test_cached_prompts_are_told_and_the_cache_can_be_emptied(start):
    engine = start(deterministic=True, prefix_cache=True)
    one = (request("p", 40, **MANY),)
    assert run(engine, one).requests.cached_tokens.tolist() == [0]
    assert run(engine, one).requests.cached_tokens.tolist() == [39]
    engine.reset_cache()
    assert run(engine, one).requests.cached_tokens.tolist() == [0]


def test_a_cache_that_does_not_empty_is_an_error(start, monkeypatch):
    engine = start(deterministic=True)
    monkeypatch.setattr(engine.engine, "flush_cache", lambda: None)
    with pytest.raises(EngineError, match="did not empty"):
        engine.reset_cache()


def test_a_companion_that_leaves_is_aborted(start):
    engine = start(deterministic=True)
    traces = run(engine, (*requests(**MANY), request("c", 9, **MANY)), companions=("c",))
    row = traces.requests.id.index("c")
    assert (traces.requests.finish_reason[row], traces.requests.length[row]) == ("abort", 1)
    assert len(engine.engine.aborted) == 1


def test_a_stream_that_is_cut_off_is_an_error_with_the_requests_name(start):
    engine = start(deterministic=True)
    engine.engine.lost = True
    with pytest.raises(EngineError, match=r"'r0'.*cut off"):
        engine.generate(work(requests(**MANY), schedule="alone"), quiet)


def test_sglangs_own_words_reach_the_error(start, monkeypatch):
    engine = start(deterministic=True)

    async def refuse(**_words):
        raise ValueError("Input length exceeds the maximum")

    monkeypatch.setattr(engine.engine, "async_generate", refuse)
    with pytest.raises(EngineError, match="Input length exceeds"):
        engine.generate(work(requests()), quiet)


def test_an_argument_this_version_does_not_know_is_named(start, monkeypatch):
    import sglang

    monkeypatch.setattr(sglang, "KNOWN", sglang.KNOWN - {"mem_fraction_static"})
    with pytest.raises(EngineError, match="mem_fraction_static"):
        ADAPTER.start("tiny", {})


def test_golden_replay_and_logits_are_refused(start):
    assert "no interface that forces" in ADAPTER.refuses("batch", "golden", {})
    assert ADAPTER.refuses("batch", "natural", {}) is None
    assert "prefix_cache" in ADAPTER.refuses("cached_prefix", "natural", {})
    engine = start(deterministic=True)
    with pytest.raises(Unsupported, match="no interface that forces"):
        engine.generate(work(requests(), golden={f"r{i}": (1,) for i in range(4)}), quiet)
    with pytest.raises(Unsupported, match="no logits"):
        engine.generate(work(requests(), digests=True), quiet)


def test_a_path_is_read_as_a_prompt_where_that_is_asked_for(start):
    assert (
        ADAPTER.refuses("scoring", "golden", {}) is ADAPTER.refuses("batch", "golden", {"scoring": "prefill"}) is None
    )
    assert "needs golden replay" in ADAPTER.refuses("scoring", "natural", {})
    decode, prefill = start(deterministic=True), start(deterministic=True, scoring="prefill")
    made = run(decode, requests(**MANY), schedule="alone")
    read = run(prefill, requests(**MANY), golden=paths(made))
    assert compare(made, read, "topk", "golden").outcome == "same"
    assert limits.PICKS in prefill.observed()
    assert limits.PICKS not in decode.observed()
    ordinary = start(scoring="prefill")
    assert compare(made, run(ordinary, requests(**MANY), golden=paths(made)), "topk", "golden").outcome == "different"


def test_sglangs_own_words_reach_the_error_of_a_path_too(start, monkeypatch):
    engine = start(deterministic=True, scoring="prefill")

    async def refuse(**_words):
        raise ValueError("Input length exceeds the maximum")

    monkeypatch.setattr(engine.engine, "async_generate", refuse)
    with pytest.raises(EngineError, match=r"'r0'.*Input length exceeds"):
        engine.generate(work(requests(), golden={f"r{i}": (1, 2) for i in range(4)}), quiet)


def test_choices_that_are_left_to_sglang_are_not_sent():
    found = arguments(open_folder("tiny"), NAMES)
    assert not {"attention_backend", "context_length", "chunked_prefill_size", "page_size"} & set(found)
    assert found["disable_radix_cache"] is True
    sent = arguments(open_folder("tiny"), {**NAMES, "max_num_batched_tokens": -1, "attention_backend": "triton"})
    assert (sent["chunked_prefill_size"], sent["attention_backend"]) == (-1, "triton")


def test_every_axis_exists_and_owns_its_own_setting():
    for name, support in ADAPTER.axes().items():
        assert AXES[name].kind != "setting" or name in NAMES or support.unsupported, name
        if name in NAMES and support.unsupported is None:
            assert {f"config.{name}", f"resolved.{name}"} <= set(support.fields), name


def test_without_sglang_a_start_is_unsupported_and_says_what_there_is_instead(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match="--engine endpoint") as raised:
        ADAPTER.start("tiny", {})
    assert str(raised.value) == NOT_INSTALLED
