"""The bundled engine through the harness's protocol: what it offers, what it runs, what it refuses."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from engines import bundled_lifetime
from engines.bundled.kernels.interface import KernelError
from engines.bundled_adapter import BundledAdapter
from engines.bundled_lifetime import default_pages
from engines.bundled_refusals import NOT_OFFERED
from harness.axis import AXES
from harness.engine import Work
from harness.errors import EngineError, ModelError, Unsupported
from harness.fingerprint import fingerprint_of
from harness.fingerprint.host import host_fields
from harness.request import Grammar, Image, Request, Sampling
from harness.schedule import Arrival, Schedule
from harness.traces import NO_TOKEN

ADAPTER = BundledAdapter()
TOKENIZER = ADAPTER.tokenizer("tiny")
SAMPLING = Sampling(
    temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, frequency_penalty=0.0,
    presence_penalty=0.0, seed=None, max_tokens=6, min_tokens=0, ignore_eos=True, stop=(), stop_token_ids=(),
    logit_bias=(), logprobs=3, n=1,
)  # fmt: skip


def request(name, text="some words", **changes):
    sampling = dataclasses.replace(SAMPLING, **changes)
    ids = TOKENIZER.encode(text)
    return Request(id=name, prompt_token_ids=ids, text=text, messages=None, sampling=sampling, grammar=None, images=())


def work(requests, arrivals=None, golden=None, digests=False):
    arrivals = arrivals or [Arrival(request=one.id) for one in requests]
    return Work(
        requests=tuple(requests),
        schedule=Schedule(name="s", arrivals=tuple(arrivals)),
        replay="natural" if golden is None else "golden",
        golden=golden or {},
        logits_digests=digests,
    )


def quiet(requests, tokens):
    """A progress that says nothing."""


@pytest.fixture(scope="module")
def engine():
    return ADAPTER.start("tiny", {"max_num_batched_tokens": 32, "max_num_seqs": 4, "page_size": 8})


def rows_of(traces, name):
    """The rows of the position table that belong to a request."""
    index = traces.requests.id.index(name)
    start = int(traces.requests.length[:index].sum())
    return slice(start, start + int(traces.requests.length[index]))


# What is offered


def test_every_setting_has_a_default_of_its_choices_and_above_its_minimum():
    for setting in ADAPTER.settings():
        assert not setting.choices or setting.default in setting.choices
        assert setting.minimum is None or setting.default >= setting.minimum
        assert setting.meaning


def test_modes_are_settings():
    settings = {setting.name: setting for setting in ADAPTER.settings()}
    assert ADAPTER.modes()["deterministic"] == {"arithmetic": "portable"}
    assert ADAPTER.modes()["ordinary"] == {"arithmetic": "free"}
    for values in ADAPTER.modes().values():
        assert all(value in settings[name].choices for name, value in values.items())


def test_every_axis_of_the_harness_is_answered():
    """Environment axes vary nothing by themselves and name their own fields; the engine has no say in them."""
    axes = ADAPTER.axes()
    asked = {name: axis for name, axis in AXES.items() if axis.kind != "environment"}
    assert len(asked) >= 11
    assert set(asked) <= set(axes)
    refused = {name for name, support in axes.items() if support.unsupported}
    assert refused == set(NOT_OFFERED)
    for name, axis in asked.items():
        offered = name not in refused
        assert bool(axes[name].fields) == (offered and axis.kind not in ("schedule", "history")), name


@pytest.mark.parametrize(
    ("axis", "value"),
    [("max_num_seqs", 1), ("max_num_batched_tokens", 8), ("page_size", 32), ("threads", 1), ("tuning", 1),
     ("isa", "generic"), ("compiler", "none"), ("arithmetic", "free"), ("arithmetic", "native")],
)  # fmt: skip
def test_an_axis_owns_every_field_that_moves_with_it(axis, value):
    """The fields that differ between two lifetimes, against those the axis says move."""
    base = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "page_size": 8, "threads": 2}
    varied = ADAPTER.start("tiny", {**base, axis: value})
    start = ADAPTER.start("tiny", base)
    before, after = facts(start), facts(varied)
    moved = {name for name in {**before, **after} if before.get(name) != after.get(name)}
    owned = ADAPTER.axes()["restart" if axis == "tuning" else axis].fields
    assert moved, "nothing moved"
    assert [name for name in sorted(moved) if not owns(owned, name)] == []


def facts(engine):
    fields = {field.name: field.value for field in engine.fingerprint() if field.field_class == "identity"}
    return {**fields, **{f"resolved.{name}": value for name, value in engine.resolved().items()}}


def owns(owned, name):
    return any(name == one or (one.endswith(".*") and name.startswith(one[:-1])) for one in owned)


def test_the_environment_follows_the_threads():
    environment = ADAPTER.environment({"threads": 3})
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "3"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    moved = {f"env.{name}" for name in environment if environment[name] != ADAPTER.environment({"threads": 1})[name]}
    assert moved <= set(ADAPTER.axes()["threads"].fields)


def test_models_and_facts():
    models = {model.name: model for model in ADAPTER.models()}
    assert models["tiny"].available
    facts = ADAPTER.model_facts("tiny")
    assert (facts.vocab_size, facts.max_position_embeddings) == (512, 8192)
    assert ADAPTER.model_facts("smollm2").max_position_embeddings == 8192
    with pytest.raises(ModelError, match=r"model 'tinny'.*did you mean 'tiny'"):
        ADAPTER.model_facts("tinny")
    with pytest.raises(ModelError):
        ADAPTER.tokenizer("nowhere")


def test_the_tokenizer_speaks_the_protocol():
    assert TOKENIZER.decode(TOKENIZER.encode("wörds")) == "wörds"
    assert TOKENIZER.vocab_size == 512
    assert len(TOKENIZER.digest) == 64
    assert TOKENIZER.encode_chat([("user", "a")])


def test_asking_the_adapter_brings_in_nothing_heavy():
    program = (
        "import sys; from engines.bundled_adapter import BundledAdapter as A; a = A();"
        "a.settings(), a.modes(), a.axes(), a.environment({});"
        "print(sorted({'torch', 'numpy', 'tokenizers', 'gguf', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_running_brings_in_no_torch():
    program = (
        "import sys; from engines.bundled_adapter import BundledAdapter as A;"
        "e = A().start('tiny', {'arithmetic': 'free'}); print('torch' in sys.modules, e.observed()['torch_imported'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


# Starting


def test_resolved_observed_and_fingerprint(engine):
    resolved, observed = engine.resolved(), engine.observed()
    assert resolved["arithmetic"] == "portable"
    assert resolved["num_pages"] == 4 * 8192 // 8
    assert "threads_seen" not in resolved
    assert observed["page_size"] == 8
    assert observed["threads"] >= 1
    fields = {field.name: field for field in engine.fingerprint()}
    assert fields["arithmetic.torch"].value in (
        "not applicable",
        *([sys.modules["torch"].__version__] if "torch" in sys.modules else []),
    )
    assert fields["model.quantisation"].value == "none"
    assert fields["process.peak_memory_kib"].field_class == "context"
    assert all(field.value is not None and field.source for field in fields.values())
    fingerprint_of(engine.fingerprint(), host_fields({}))  # no name is given twice


def test_unknown_settings_and_models_are_errors():
    with pytest.raises(EngineError, match="no setting 'max_seqs'"):
        ADAPTER.start("tiny", {"max_seqs": 3})
    with pytest.raises(ModelError):
        ADAPTER.start("nowhere", {})


def test_what_was_asked_for_by_name_and_cannot_be_had_is_unsupported(monkeypatch):
    def refuse(isa, compiler):
        raise KernelError(f"isa {isa}: this CPU lacks avx512f")

    monkeypatch.setattr(bundled_lifetime.library, "load", refuse)
    with pytest.raises(Unsupported, match="this CPU lacks avx512f"):
        ADAPTER.start("tiny", {"isa": "x86-64-v4"})
    with pytest.raises(EngineError, match="this CPU lacks") as caught:
        ADAPTER.start("tiny", {})
    assert not isinstance(caught.value, Unsupported)


def test_pages_fit_the_seats_within_the_memory_and_hold_one_context():
    config = bundled_lifetime.open_source("tiny").config()
    token_bytes = 2 * 2 * 2 * 16 * 4
    assert default_pages(config, 3, 16) == 3 * 512
    assert default_pages(config, 10_000, 16) == (3 << 29) // (token_bytes * 16)
    huge = dataclasses.replace(config, max_position_embeddings=1 << 24)
    assert default_pages(huge, 4, 16) == (1 << 24) // 16


# Generating


def test_a_work_comes_back_in_the_schedules_order_with_every_table_filled(engine):
    requests = [request("a", max_tokens=4), request("b", "other", logprobs=5), request("c", logprobs=0)]
    arrivals = [Arrival(request="c", at_step=2), Arrival(request="a"), Arrival(request="b", companion=True)]
    traces = engine.generate(work(requests, arrivals, digests=True), quiet)
    assert traces.requests.id == ("c", "a", "b")
    assert traces.requests.companion.tolist() == [False, False, True]
    assert traces.requests.length.tolist() == [6, 4, 6]
    assert traces.requests.finish_reason == ("length",) * 3
    assert traces.requests.prompt_tokens.tolist() == [10, 10, 5]
    assert (traces.requests.arrival_s <= traces.requests.first_token_s).all()
    assert (traces.requests.first_token_s <= traces.requests.finish_s).all()
    positions = traces.positions
    assert positions.token.shape == positions.pick.shape == positions.logprob.shape == (16,)
    assert positions.topk_ids.shape == positions.topk_logprobs.shape == (16, 5)
    assert (positions.topk_ids[rows_of(traces, "c")] == NO_TOKEN).all()
    assert np.isnan(positions.topk_logprobs[rows_of(traces, "a")][:, 3:]).all()
    assert (positions.topk_ids[rows_of(traces, "b")] >= 0).all()
    assert positions.logits_digest.shape == (16, 2)
    assert len(np.unique(positions.logits_digest)) == 24  # c begins as a does: they share a prompt
    assert dict(traces.counters)["max_running"] == 3


def test_steps_say_what_ran(engine):
    long = request("long", "x" * 50)
    traces = engine.generate(
        work([request("a"), long], [Arrival(request="a"), Arrival(request="long", at_step=1)]), quiet
    )
    steps = traces.steps
    rows = [
        (int(step), int(start), int(count))
        for step, index, start, count in zip(steps.step, steps.request, steps.start, steps.count, strict=True)
        if traces.requests.id[index] == "long"
    ]
    assert rows == [(1, 0, 31), (2, 31, 19), (3, 50, 1), (4, 51, 1), (5, 52, 1), (6, 53, 1), (7, 54, 1)]
    assert dict(traces.counters)["steps"] == 8
    assert dict(traces.counters)["tokens_computed"] == int(steps.count.sum())
    assert (np.diff(steps.step) >= 0).all()


def test_works_in_one_lifetime_do_not_see_each_other(engine):
    first = engine.generate(work([request("a"), request("b", "zz")]), quiet)
    again = engine.generate(work([request("a"), request("b", "zz")]), quiet)
    assert first.positions.logprob.tobytes() == again.positions.logprob.tobytes()
    assert first.steps.step.tolist() == again.steps.step.tolist()
    assert first.counters == again.counters


def test_a_failed_work_leaves_the_engine_ready(engine):
    def interrupt(requests, tokens):
        if tokens == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(work([request("a"), request("b", "x" * 90)]), interrupt)
    traces = engine.generate(work([request("a")]), quiet)
    assert traces.requests.length.tolist() == [6]
    assert traces.steps.step.tolist() == list(range(6))


def test_a_late_request_that_cannot_run_is_refused_before_anything_runs(engine):
    arrivals = [Arrival(request="a"), Arrival(request="big", after="a")]
    seen = []
    with pytest.raises(EngineError, match="request 'big': the prompt has 9000 tokens"):
        engine.generate(work([request("a"), request("big", "x" * 9000)], arrivals), lambda *counts: seen.append(counts))
    assert seen == []


def test_an_idle_engine_jumps_to_the_next_arrival(engine):
    traces = engine.generate(work([request("a")], [Arrival(request="a", at_step=40)]), quiet)
    assert traces.steps.step.tolist() == list(range(40, 46))
    assert dict(traces.counters)["steps"] == 6


def test_arrivals_follow_the_progress_of_others(engine):
    requests = [request(name) for name in "abc"]
    arrivals = [
        Arrival(request="a"), Arrival(request="b", after="a", after_tokens=3), Arrival(request="c", after="b"),
    ]  # fmt: skip
    traces = engine.generate(work(requests, arrivals), quiet)
    first = {name: int(traces.steps.step[traces.steps.request == i].min()) for i, name in enumerate("abc")}
    assert first == {"a": 0, "b": 3, "c": 9}


def test_progress_counts_up(engine):
    seen = []
    engine.generate(work([request("a"), request("b")]), lambda requests, tokens: seen.append((requests, tokens)))
    assert seen == sorted(seen)
    assert seen[-1] == (2, 12)


def test_the_arithmetics_agree_closely_and_not_in_every_bit():
    """The same forced tokens in all three: nearly the same logprobs, so the models are the same; other bits."""
    one, golden = request("a", "x" * 300), {"a": (5, 99, 300, 7, 410, 33)}
    logprobs = {
        name: ADAPTER.start("tiny", {"arithmetic": name}).generate(work([one], golden=golden), quiet).positions.logprob
        for name in ("portable", "free", "native")
    }
    for name in ("free", "native"):
        assert np.abs(logprobs[name] - logprobs["portable"]).max() < 1e-3
        assert logprobs[name].tobytes() != logprobs["portable"].tobytes()


def test_golden_replay_forces_the_path_and_reports_the_pick(engine):
    natural = engine.generate(work([request("a"), request("b", "zz")]), quiet)
    path = natural.positions.token[rows_of(natural, "a")].tolist()
    bent = [*path[:2], (path[2] + 1) % 512, *path[3:]]
    golden = {"a": tuple(bent)}
    arrivals = [Arrival(request="a"), Arrival(request="b", companion=True)]
    forced = engine.generate(work([request("a"), request("b", "zz")], arrivals, golden), quiet)
    assert forced.positions.token[rows_of(forced, "a")].tolist() == bent
    assert forced.positions.pick[rows_of(forced, "a")].tolist()[:3] == path[:3]
    rows = slice(0, 2)
    assert forced.positions.logprob[rows].tobytes() == natural.positions.logprob[rows].tobytes()
    b = rows_of(natural, "b")
    assert forced.positions.logprob[b].tobytes() == natural.positions.logprob[b].tobytes()


def test_samples_are_rows_of_their_own(engine):
    sampled = request("a", temperature=1.0, seed=5, n=2)
    traces = engine.generate(work([sampled, request("b")]), quiet)
    assert traces.requests.id == ("a", "a", "b")
    assert traces.requests.sample.tolist() == [0, 1, 0]
    assert traces.positions.token[:6].tolist() != traces.positions.token[6:12].tolist()
    single = engine.generate(
        work([dataclasses.replace(sampled, sampling=dataclasses.replace(sampled.sampling, n=1))]), quiet
    )
    assert single.positions.token.tolist() == traces.positions.token[:6].tolist()


GRAMMAR = Grammar(kind="regex", text="[0-9]+")
IMAGE = Image(sha256="0" * 64, media_type="image/png")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (dataclasses.replace(request("a"), images=(IMAGE,)), r"request 'a': 1 image"),
    ],
)
def test_what_the_engine_cannot_do_is_unsupported(engine, bad, message):
    with pytest.raises(Unsupported, match=message):
        engine.generate(work([bad]), quiet)


def test_a_grammar_is_followed_and_counted(engine):
    constrained = dataclasses.replace(request("a", ignore_eos=False), grammar=GRAMMAR)
    traces = engine.generate(work([constrained, request("b")]), quiet)
    assert all(48 <= token < 58 for token in traces.positions.token[:5])
    assert traces.requests.masked.tolist() == [int(traces.requests.length[0]), 0]
    assert 0 < traces.requests.steered[0] <= traces.requests.masked[0]
    assert dict(traces.counters)["masked"] == traces.requests.masked[0]
    path = tuple(traces.positions.token[:2].tolist())
    again = engine.generate(work([constrained], golden={"a": path}), quiet)
    assert again.positions.pick.tolist() == list(path)
    with pytest.raises(EngineError, match=r"request 'a': forced token 1 is 97 \('a'\), which its grammar"):
        engine.generate(work([constrained], golden={"a": (path[0], 97)}), quiet)


def test_a_bad_grammar_is_refused_before_anything_runs(engine):
    bad = dataclasses.replace(request("b", ignore_eos=False), grammar=Grammar(kind="regex", text="x{2,1}"))
    with pytest.raises(EngineError, match=r"request 'b': grammar \(regex\): character 2 of the expression 'x\{2,1\}'"):
        engine.generate(work([request("a"), bad]), lambda requests, tokens: pytest.fail("it ran"))


def test_golden_replay_of_several_samples_is_unsupported(engine):
    with pytest.raises(Unsupported, match="golden replay of n = 2 samples"):
        engine.generate(work([request("a", n=2)], golden={"a": (1,)}), quiet)


BROKEN = [
    (work([request("a"), request("a")]), "request id 'a' is given twice"),
    (work([request("a")], golden={"b": (1,)}), "request 'a': golden replay was asked for, but no golden path"),
    (work([request("a", temperature=1.0)]), "request 'a': temperature 1.0 needs a seed"),
    (work([request("a", n=0)]), "request 'a': n: expected 1 or more"),
    (work([request("a")], [Arrival(request="a", after="z")]), "'a' waits for 'z', which never arrives"),
    (work([request("a"), request("b")], [Arrival(request="a")]), "request 'b' never arrives"),
]


@pytest.mark.parametrize(("broken", "message"), BROKEN, ids=[row[1][:30] for row in BROKEN])
def test_a_work_that_cannot_run_is_an_error_that_says_why(engine, broken, message):
    with pytest.raises(EngineError, match=message):
        engine.generate(broken, quiet)


def test_a_row_that_is_no_number_is_an_error_naming_request_and_position():
    engine = ADAPTER.start("tiny", {})
    forward = engine.engine.arithmetic.forward

    def spoiled(batch):
        logits = forward(batch)
        if len(logits) and batch.position[-1] >= 12:
            logits[-1, 3] = np.nan
        return logits

    engine.engine.arithmetic.forward = spoiled
    with pytest.raises(EngineError, match="request 'a', generated position 3: logit of token 3 is nan"):
        engine.generate(work([request("a")]), quiet)


def test_smollm2_answers():
    tokenizer = ADAPTER.tokenizer("smollm2")
    ids = tokenizer.encode_chat([("user", "What is the capital of France?")])
    engine = ADAPTER.start("smollm2", {})
    one = dataclasses.replace(request("a", max_tokens=16, ignore_eos=False), prompt_token_ids=ids)
    traces = engine.generate(work([one]), quiet)
    assert tokenizer.decode(traces.positions.token.tolist()) == "The capital of France is Paris.<|im_end|>"
    assert traces.requests.finish_reason == ("stop",)
    engine.stop()
