"""The fake engine: honest where it must be, wrong where it is told to be, and found out every time."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from engines.fake import FakeAdapter
from engines.fake_faults import CRASH_STATUS
from engines.fake_model import hash_logits, log_softmax, rank
from engines.fake_names import EOS, FAULTS, VOCAB
from harness.axis import AXES
from harness.claims import check_claims
from harness.compare import compare
from harness.engine import RULES, Work
from harness.errors import EngineError, ModelError, Unsupported
from harness.judged import ComparisonError
from harness.request import Grammar, Request, Sampling
from harness.schedule import Arrival, Schedule
from harness.witness import witnessed

GREEDY = Sampling(
    temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0,
    seed=None, max_tokens=6, min_tokens=0, ignore_eos=True, stop=(), stop_token_ids=(), logit_bias=(), logprobs=5, n=1,
)  # fmt: skip
SEEDED = replace(GREEDY, temperature=1.0, seed=7)


def request(name: str, prompt: int = 10, sampling: Sampling = GREEDY, **fields) -> Request:
    ids = tuple((sum(name.encode()) * 31 + 7 * i) % 256 for i in range(prompt))
    plain = {"text": None, "messages": None, "grammar": None, "images": ()}
    return Request(id=name, prompt_token_ids=ids, sampling=sampling, **{**plain, **fields})


REQUESTS = (
    request("a", 30),
    request("b", 5, SEEDED),
    request("c", 17),
    request("d", 40, replace(SEEDED, seed=2**64 - 1)),
)


def alone(requests=REQUESTS) -> Schedule:
    chain = [Arrival(request=after.id, after=before.id) for before, after in pairwise(requests)]
    return Schedule(name="alone", arrivals=(Arrival(request=requests[0].id), *chain))


def together(requests=REQUESTS, companions=()) -> Schedule:
    beside = [Arrival(request=one.id, companion=True) for one in companions]
    return Schedule(
        name="together", arrivals=(*beside, *(Arrival(request=r.id, at_step=i) for i, r in enumerate(requests)))
    )


def start(**settings):
    return FakeAdapter().start("fake", settings)


def generate(engine, schedule=None, requests=REQUESTS, golden=None, digests=False):
    work = Work(
        requests=tuple(requests), schedule=schedule or together(requests), replay="golden" if golden else "natural",
        golden=golden or {}, logits_digests=digests,
    )  # fmt: skip
    return engine.generate(work, lambda *_: None)


def paths(traces) -> dict[str, tuple[int, ...]]:
    ends = np.cumsum(traces.requests.length)
    parts = np.split(traces.positions.token, ends[:-1])
    return {name: tuple(part.tolist()) for name, part in zip(traces.requests.id, parts, strict=True)}


REFERENCE = generate(start(), alone(), digests=True)


def test_results_follow_the_request_alone():
    companion = request("x", 25, replace(GREEDY, logprobs=9, max_tokens=30))
    for engine, schedule, requests in (
        (start(), together(), REQUESTS),
        (start(max_num_seqs=1), together(REQUESTS[::-1]), REQUESTS),
        (start(max_num_batched_tokens=7), together(), REQUESTS),
        (start(threads=4, tuning=1), together(REQUESTS, [companion]), (*REQUESTS, companion)),
    ):
        traces = generate(engine, schedule, requests, digests=True)
        assert compare(REFERENCE, traces, "tensors", "natural").outcome == "same"
        assert check_claims(traces) == ()
    assert REFERENCE.positions.topk_ids.shape == (24, 5)


def test_company_moves_results_where_invariant_is_off():
    free = {"invariant": False}
    own = generate(start(**free), alone(), digests=True)
    assert compare(own, generate(start(**free), alone(), digests=True), "tensors", "natural").outcome == "same"
    for settings in ({}, {"max_num_batched_tokens": 7}, {"threads": 2}, {"tuning": 1}):
        schedule = alone() if settings else together()
        moved = generate(start(**free, **settings), schedule, golden=paths(own), digests=True)
        result = compare(own, moved, "tensors", "golden")
        assert result.differing_positions > 12, settings
        assert check_claims(moved) == ()


def test_golden_replay_follows_the_path_and_reports_its_own_picks():
    path = {name: tuple((token + 1) % 256 for token in tokens) for name, tokens in paths(REFERENCE).items()}
    forced = generate(start(), together(), golden=path)
    assert paths(forced) == path
    assert forced.requests.finish_reason == ("length",) * 4
    again = generate(start(max_num_seqs=2), alone(), golden=path)
    assert compare(forced, again, "topk", "golden").outcome == "same"
    assert (forced.positions.pick != forced.positions.token).any()
    same = generate(start(), together(), golden=paths(REFERENCE))
    assert compare(REFERENCE, same, "topk", "golden").outcome == "same"


def test_a_forced_path_may_end_early():
    short = generate(start(), together(), golden={name: tokens[:2] for name, tokens in paths(REFERENCE).items()})
    assert short.requests.length.tolist() == [2, 2, 2, 2]


def test_steps_hold_to_seats_and_tokens():
    traces = generate(start(max_num_seqs=2, max_num_batched_tokens=16), together())
    steps = traces.steps
    assert np.bincount(steps.step).max() == 2 == dict(traces.counters)["max_running"]
    assert np.bincount(steps.step, weights=steps.count).max() == 16
    assert steps.count[steps.request == 0][:2].tolist() == [16, 14]


def test_arrivals_follow_steps_and_progress():
    schedule = Schedule(name="s", arrivals=(
        Arrival(request="a"), Arrival(request="b", after="a", after_tokens=3), Arrival(request="c", at_step=20),
        Arrival(request="d", after="b"),
    ))  # fmt: skip
    steps = generate(start(), schedule).steps
    first = {j: int(steps.step[steps.request == j].min()) for j in range(4)}
    assert first == {0: 0, 1: 3, 2: 9, 3: 20}  # rows in order of arrival: a, b, d (after b), c


def test_reported_values():
    table = REFERENCE.positions
    assert (table.topk_logprobs[:, :-1] >= table.topk_logprobs[:, 1:]).all()
    assert (table.pick == table.token).all()
    greedy = np.repeat([s.sampling.temperature == 0 for s in REQUESTS], 6)
    assert (table.token[greedy] == table.topk_ids[greedy, 0]).all()
    assert (table.logprob[greedy] == table.topk_logprobs[greedy, 0]).all()
    assert (table.token[~greedy] != table.topk_ids[~greedy, 0]).any()


def test_logits_are_a_distribution_in_a_total_order():
    q = hash_logits(list(range(1, 200)), [0] * 199)
    assert np.exp(log_softmax(q).astype(np.float64)).sum(axis=1) == pytest.approx(1, abs=1e-5)
    expected = [sorted(range(VOCAB), key=lambda v, row=row: (-row[v], v))[:20] for row in q.tolist()]
    assert rank(q).tolist() == expected
    ties = (np.sort(q, axis=1)[:, -1] == np.sort(q, axis=1)[:, -2]).sum()
    assert 0 <= ties < 20


def test_batch_size_does_not_reach_the_bits():
    states = list(range(1, 40))
    whole = log_softmax(hash_logits(states, [0] * 39))
    single = np.concatenate([log_softmax(hash_logits([state], [0])) for state in states])
    assert whole.tobytes() == single.tobytes()


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"temperature": 1.0, "seed": 1, "top_k": 1}, "greedy"),
        ({"temperature": 1.0, "seed": 1, "top_p": 1e-9}, "greedy"),
        ({"temperature": 1.0, "seed": 1, "min_p": 1.0}, "greedy"),
        ({"temperature": 1e-6, "seed": 1}, "greedy"),
        ({"temperature": 1.0, "seed": 1}, "other"),
        ({"logit_bias": ((65, 100.0),)}, "A"),
        ({"logit_bias": ((65, 9.0),), "frequency_penalty": 50.0}, "once"),
        ({"logit_bias": ((65, 9.0),), "presence_penalty": 50.0}, "once"),
    ],
)
def test_sampling_parameters_act(change, check):
    plain = paths(generate(start(), requests=(request("a"),)))["a"]
    found = paths(generate(start(), requests=(request("a", sampling=replace(GREEDY, **change)),)))["a"]
    if check == "greedy":
        assert found == plain
    elif check == "other":
        assert found != plain
    elif check == "A":
        assert found == (65,) * 6
    else:
        assert found.count(65) == 1


def test_ends_of_the_text():
    biased = replace(GREEDY, logit_bias=((EOS, 100.0),), ignore_eos=False)
    ended = generate(start(), requests=(request("a", sampling=biased),))
    assert (ended.requests.finish_reason, ended.requests.length.tolist()) == (("stop",), [1])
    held = generate(start(), requests=(request("a", sampling=replace(biased, min_tokens=3)),))
    assert held.requests.length.tolist() == [4]
    word = replace(GREEDY, logit_bias=((65, 100.0),), stop=("AAA",))
    assert generate(start(), requests=(request("a", sampling=word),)).requests.length.tolist() == [3]
    by_id = replace(GREEDY, logit_bias=((65, 100.0),), stop_token_ids=(65,))
    assert generate(start(), requests=(request("a", sampling=by_id),)).requests.finish_reason == ("stop",)


def test_several_samples():
    traces = generate(start(), requests=(request("a", sampling=replace(SEEDED, n=3)),))
    assert traces.requests.sample.tolist() == [0, 1, 2]
    assert len({traces.positions.token[6 * i : 6 * i + 6].tobytes() for i in range(3)}) == 3
    with pytest.raises(Unsupported, match="golden replay of several samples"):
        generate(start(), requests=(request("a", sampling=replace(SEEDED, n=2)),), golden={"a": (1, 2)})


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (
            request("a", grammar=Grammar(kind="regex", text="x")),
            Unsupported,
            "request 'a': the fake engine has neither",
        ),
        (replace(request("a"), prompt_token_ids=()), EngineError, "request 'a': expected at least one token id"),
        (replace(request("a"), prompt_token_ids=(300,)), EngineError, "each from 0 to 256"),
        (request("a", 4_095), EngineError, "prompt and output of 4101 tokens exceed the context of 4096"),
    ],
)
def test_requests_that_cannot_be_run(bad, error, message):
    with pytest.raises(error, match=message):
        generate(start(), requests=(bad,))


FOUND_BY_COMPARISON = {"one-ulp": "logprob", "swap": "topk_ids", "nan": "logprob", "topk-order": "topk_ids"}


@pytest.mark.parametrize("position", [0, 3, -1])
@pytest.mark.parametrize("target", ["", "c"])
@pytest.mark.parametrize("fault", sorted(FOUND_BY_COMPARISON))
def test_faults_in_values_are_located(fault, target, position):
    engine = start(fault=fault, fault_request=target, fault_position=position)
    wrong = generate(engine, golden=paths(REFERENCE))
    result = compare(REFERENCE, wrong, "topk", "golden")
    assert (result.first.request, result.first.position) == (target or "a", position % 6)
    assert result.differing_positions == 1
    assert result.differing(FOUND_BY_COMPARISON[fault]) == 1
    assert bool(check_claims(wrong)) == (fault in ("nan", "topk-order"))


def test_lost_requests_and_positions_are_found():
    with pytest.raises(ComparisonError, match="is missing: 'c'"):
        compare(REFERENCE, generate(start(fault="drop", fault_request="c")), "topk", "natural")
    short = generate(start(fault="truncate", fault_request="d"))
    assert check_claims(short) == ()
    result = compare(REFERENCE, short, "topk", "natural")
    assert (result.first.request, result.first.position, result.first.field) == ("d", 5, "length")


def test_lies_about_the_batch_are_found():
    (claim,) = check_claims(generate(start(fault="lie-batch")))
    assert claim == "counter max_running claims 4, the tables show 1"
    lied = check_claims(generate(start(fault="lie-steps")))
    assert any(sentence.startswith("counter max_running claims 1") for sentence in lied)
    honest = generate(start(max_num_seqs=1))
    assert witnessed(REFERENCE, honest, "beside").positions == 0
    assert witnessed(REFERENCE, generate(start()), "beside").positions > 0


def test_a_copied_capture_shows_no_company():
    engine = start(fault="copy")
    first = generate(engine, alone())
    assert generate(engine, together()) is first
    assert witnessed(REFERENCE, first, "beside").positions == 0


def test_noise_differs_from_itself():
    engine = start(fault="noise")
    result = compare(generate(engine), generate(engine), "topk", "natural")
    assert result.outcome == "different"


def test_exceptions_slowness_and_hanging(monkeypatch):
    naps = []
    monkeypatch.setattr("engines.fake_faults.time.sleep", naps.append)
    with pytest.raises(RuntimeError, match="raises on purpose"):
        generate(start(fault="raise", fault_request="b", fault_position=2))
    assert compare(REFERENCE, generate(start(fault="slow")), "topk", "natural").outcome == "same"
    assert len(naps) == 9  # one per step
    naps.clear()
    generate(start(fault="hang", fault_position=3))
    assert naps[0] >= 3600


def test_a_crash_ends_the_process():
    code = (
        "import sys; sys.path[:0] = ['tests/engines']\n"
        "from test_fake import generate, start\n"
        "generate(start(fault='crash', fault_position=-1))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == CRASH_STATUS
    assert "about to crash on purpose" in ended.stderr


def test_every_fault_has_a_test_here():
    tested = {*FOUND_BY_COMPARISON, "none", "drop", "truncate", "lie-batch", "lie-steps", "copy", "noise", "raise",
              "slow", "hang", "crash", "die"}  # fmt: skip
    assert set(FAULTS) == tested


def test_the_adapter_answers_without_numpy():
    code = (
        "import sys; from engines.fake import FakeAdapter; a = FakeAdapter(); a.settings(); a.axes(); a.models();"
        "a.tokenizer('fake').encode('x'); a.model_facts('fake'); a.environment({});"
        "print(sorted({'numpy', 'torch', 'pyarrow'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_adapter_answers():
    adapter = FakeAdapter()
    assert set(adapter.axes()) <= set(AXES)
    names = {setting.name for setting in adapter.settings()}
    for support in adapter.axes().values():
        assert support.unsupported or all(
            field.partition(".")[2] in names for field in support.fields if not field.startswith("env.")
        )
    for settings in adapter.modes().values():
        assert set(settings) <= names
    assert adapter.strongest_rule() in RULES
    with pytest.raises(ModelError, match="model 'gpt': expected 'fake'"):
        adapter.start("gpt", {})
    with pytest.raises(EngineError, match="no setting 'bananas'"):
        adapter.start("fake", {"bananas": 1})
    with pytest.raises(EngineError, match="setting 'max_num_seqs': expected int"):
        generate(adapter.start("fake", {"max_num_seqs": "8"}))


def test_resolved_and_observed():
    engine = start(max_num_seqs=3)
    assert engine.resolved()["max_num_seqs"] == 3
    assert engine.observed()["max_running"] == 0
    generate(engine)
    assert engine.observed()["max_running"] == 3
    assert {field.field_class for field in engine.fingerprint()} == {"identity"}


def test_bytes_are_the_tokens():
    tokenizer = FakeAdapter().tokenizer("fake")
    assert tokenizer.decode(tokenizer.encode("Grüße")) == "Grüße"
    assert tokenizer.decode((72, EOS, 105)) == "Hi"
    assert tokenizer.decode((0xFF,)) == "\N{REPLACEMENT CHARACTER}"
    assert tokenizer.decode(tokenizer.encode_chat([("user", "hi")])) == "<user>hi\n<assistant>"
    assert tokenizer.vocab_size == VOCAB
    assert len(tokenizer.digest) == 64
