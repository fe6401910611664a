"""Paths read as prompts: what is sent, what is believed, what may be claimed, and cells that rest on it."""

import dataclasses
import json

import pytest
from endpoint_cases import SETTINGS, endpoint, generate, ignore, request, work
from scripted import Model, Reply, page, scripted
from test_http_endpoint import assignments

from engines.http.adapter import EndpointAdapter
from engines.http.dialects.prompt_logprobs import CompletionScorer, SglangScorer, VllmScorer
from engines.http.flavours import FLAVOURS
from harness import limits
from harness.choose import choose_plan
from harness.claims import check_claims
from harness.compare import compare
from harness.errors import EngineError, Unsupported
from harness.progress import Quiet
from harness.request import Grammar
from harness.run import RunRequest, run
from harness.witness import witnessed

PATH = {"a": (5, 6, 7, 8, 9, 10)}


def replay(engine, *requests, path=PATH, **options):
    return generate(engine, *(requests or (request(),)), replay="golden", golden=path, **options)


@pytest.mark.parametrize(("salt", "outcome"), [("", "same"), ("other kernels", "different")])
def test_a_generated_path_is_read_as_a_prompt_in_one_row(salt, outcome):
    with scripted(Model(prefill_salt=salt)) as server:
        with endpoint(server.url) as decode, endpoint(server.url, scoring="prefill") as prefill:
            made = generate(decode, request())
            path = {"a": tuple(made.positions.token.tolist())}
            read = replay(prefill, path=path)
        sent = server.posts()[-1].body
    assert (sent["prompt"], sent["max_tokens"], sent["prompt_logprobs"]) == ([1, 2, 3, *path["a"]], 1, 3)
    assert check_claims(read) == ()
    assert compare(made, read, "topk", "golden").outcome == outcome
    assert int(witnessed(made, read, "drafts").mask.sum()) == 5  # the first token follows the prompt in both
    assert read.requests.finish_reason == ("length",)


def test_in_natural_replay_what_was_generated_is_read():
    with scripted(Model(prefill_salt="other kernels")) as server, endpoint(server.url, scoring="prefill") as engine:
        natural = generate(engine, request())
        golden = replay(engine, path={"a": tuple(natural.positions.token.tolist())})
        assert engine.observed()["requests_sent"] == 3
        assert "read together as a prompt" in engine.observed()[limits.PICKS]
    assert compare(natural, golden, "topk", "golden").outcome == "same"
    assert check_claims(natural) == ()


def test_companions_are_served_as_ever_beside_paths():
    schedule = work(request("a"), request("b")).schedule
    first, second = schedule.arrivals
    mixed = dataclasses.replace(schedule, arrivals=(first, dataclasses.replace(second, companion=True)))
    with scripted(Model()) as server, endpoint(server.url, scoring="prefill") as engine:
        made = work(request("a"), request("b"), replay="golden", golden=PATH)
        traces = engine.generate(dataclasses.replace(made, schedule=mixed), ignore)
    assert traces.requests.companion.tolist() == [False, True]
    assert traces.requests.drafted.tolist() == [5, 0]
    best = [next(iter(Model().candidates([1, 2, 3, *PATH["a"][:i]], ""))) for i in range(6)]
    assert traces.positions.pick.tolist()[:6] == best != list(PATH["a"]) == traces.positions.token.tolist()[:6]
    assert check_claims(traces) == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": 0.8, "seed": 1}, "'a': temperature: a path read as a prompt does not say"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": ((3, 1.0),)}, "logit_bias"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"n": 2}, "'a': n"),
        ({"ignore_eos": False}, "'a': ignore_eos: whether a path of max_tokens was stopped"),
    ],
)
def test_a_request_whose_pick_or_end_is_not_told_is_refused_before_anything_is_sent(changes, words):
    with scripted(Model()) as server, endpoint(server.url, scoring="prefill") as engine:
        sent = len(server.posts())
        with pytest.raises(Unsupported, match=words):
            replay(engine, request(**changes))
        if "ignore_eos" not in changes:  # what was generated has an end of its own
            with pytest.raises(Unsupported, match=words):
                generate(engine, request(**changes))
        assert len(server.posts()) == sent


def test_a_grammar_hides_the_pick_and_a_shorter_path_ended_by_itself():
    shaped = dataclasses.replace(request(), grammar=Grammar(kind="regex", text="[ab]+"))
    with scripted(Model()) as server, endpoint(server.url, scoring="prefill") as engine:
        with pytest.raises(Unsupported, match="grammar"):
            replay(engine, shaped)
        short = replay(engine, request(ignore_eos=False), path={"a": (5, 6)})
        assert short.requests.finish_reason == ("stop",)
        with pytest.raises(EngineError, match="no golden path was given"):
            replay(engine, request("b"))


def spoil_score(change):
    """Changes the answer to what is read, not to what is generated."""

    def spoil(number, call, reply):
        if "prompt_logprobs" not in call.body:
            return reply
        value = json.loads(reply.parts[0])
        change(value["choices"][0]["prompt_logprobs"], value)
        return page(value)

    return Model(spoil=spoil)


def other_token(listed, value):
    listed[5] = {"499": {"logprob": -1.0, "rank": 1}}


def null_logprob(listed, value):
    next(iter(listed[5].values()))["logprob"] = None


def nothing(listed, value):
    del value["choices"][0]["prompt_logprobs"]


def named(listed, value):
    listed[5] = {"word": {"logprob": -1.0, "rank": 1}}


def recount(listed, value):
    value["usage"]["prompt_tokens"] = 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda listed, value: listed.pop(), r"has 8 entries for 9 tokens"),
        (other_token, r"prompt_logprobs\[5\]: token 7, which was sent there, is not among \[499\]"),
        (null_logprob, "is null, which stands for NaN"),
        (nothing, r"prompt_logprobs: expected list, found None"),
        (named, "expected token ids as keys, found 'word'"),
        (lambda listed, value: listed.__setitem__(5, None), r"\[5\]: expected an object"),
        (recount, "the server counts 3 prompt tokens, 9 were sent"),
    ],
)
def test_an_answer_that_is_not_about_the_path_is_an_error(change, words):
    wrong = pytest.raises(EngineError, match=words)
    with scripted(spoil_score(change)) as server, endpoint(server.url, scoring="prefill") as engine, wrong:
        replay(engine)


def test_the_pick_is_the_servers_own_first_of_equals():
    listed = [None, None, {"7": {"logprob": -1.0, "rank": 2}, "9": {"logprob": -1.0, "rank": 1},
                           "4": {"logprob": -2.0, "rank": 3}}]  # fmt: skip
    answer = {"choices": [{"prompt_logprobs": listed}]}
    (told,) = CompletionScorer().tell(answer, (1, 2, 4), 2, 2)
    assert told == (-2.0, [(7, -1.0), (9, -1.0)], 9)


def test_vllm_and_sglang_are_asked_in_their_own_words():
    text, first = (1, 2, 3, 5, 6), 3
    asked = VllmScorer().ask(text, first, 4, "m")
    assert asked["sampling_params"] == {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 4}
    entry = {"5": {"logprob": -0.5, "rank": 1, "decoded_token": "x"}, "6": {"logprob": -0.75, "rank": 2}}
    told = VllmScorer().tell({"choices": [], "prompt_logprobs": [None, {}, {}, entry, entry]}, text, first, 1)
    assert [(one.logprob, one.pick) for one in told] == [(-0.5, 5), (-0.75, 5)]
    asked = SglangScorer().ask(text, first, 0, "m")
    assert (asked["input_ids"], asked["logprob_start_len"], asked["top_logprobs_num"]) == ([1, 2, 3, 5, 6], 2, 1)
    own = [[None, 3, None], [-0.5, 5, None], [-0.75, 6, None]]
    tops = [None, [[-0.5, 5, None]], [[-0.25, 9, None]]]
    meta = {"prompt_tokens": 5, "input_token_logprobs": own, "input_top_logprobs": tops}
    told = SglangScorer().tell({"meta_info": meta}, text, first, 1)
    assert told == [(-0.5, [(5, -0.5)], 5), (-0.75, [(9, -0.25)], 9)]
    with pytest.raises(ValueError, match="2 tokens and 3 lists of candidates came, 3 were asked for"):
        SglangScorer().tell({"meta_info": meta | {"input_token_logprobs": own[1:]}}, text, first, 1)
    with pytest.raises(ValueError, match=r"logprobs came for tokens \[6, 5\]"):
        SglangScorer().tell({"meta_info": meta | {"input_token_logprobs": [own[0], *own[:0:-1]]}}, text, first, 1)


def test_where_paths_cannot_be_read_the_plan_says_so():
    adapter = EndpointAdapter()
    for flavour in FLAVOURS.values():
        for api in flavour.interfaces:
            values = {**SETTINGS, "url": "http://127.0.0.1:1", "flavour": flavour.name, "api": api}
            refused = adapter.refuses("scoring", "golden", values)
            if api in flavour.scorers:
                assert refused is None
                assert "with scoring=prefill" in adapter.refuses("restart", "golden", {**values, "url": ""})
            else:
                assert f"{api} of flavour {flavour.name!r} returns no logprobs of a prompt" in refused
            assert "needs golden replay" in adapter.refuses("scoring", "natural", values)


@pytest.mark.parametrize(
    ("model", "verdict", "fired"),
    [
        (Model(), "PASS", True),
        (Model(prefill_salt="other kernels"), "FAIL", True),
    ],
)
def test_the_shipped_cell_holds_a_servers_decode_against_its_prefill(tmp_path, model, verdict, fired):
    with scripted(model) as server:
        plan = choose_plan(["endpoint"], cells=["endpoint-decode-vs-prefill"], engine="endpoint", model="tiny",
                           mode=None, assignments=assignments(server.url))  # fmt: skip
        made = RunRequest(plan=plan, adapter=EndpointAdapter(), folder=tmp_path / "out", progress=Quiet(),
                          deadline_s=60, overwrite=False, begun=0.0)  # fmt: skip
        (found,) = run(made, lambda record, folder: None)["verdicts"]
    assert (found["verdict"], found["control"]["fired"]) == (verdict, fired), found["reason"]
    assert any("read together as a prompt" in cap for cap in found["caps"])
    if verdict == "FAIL":
        assert found["diagnosis"]["layer"] == "forward"


def test_an_answer_without_ids_leaves_no_path():
    refused = pytest.raises(Unsupported, match="'a': its answer holds no token ids")
    with scripted(Model(ids=False)) as server, endpoint(server.url, scoring="prefill") as engine, refused:
        generate(engine, request())


def test_reading_is_not_serving_by_the_clock():
    refused = pytest.raises(Unsupported, match="nothing is served by the clock")
    with scripted(Model()) as server, endpoint(server.url, scoring="prefill") as engine, refused:
        engine.open_timed([request()])


def test_a_reply_that_is_a_stream_is_not_read_as_a_page():
    def streamed(number, call, reply):
        return Reply(parts=[b"data: {}\n\n"]) if "prompt_logprobs" in call.body else reply

    wrong = pytest.raises(EngineError, match="malformed JSON")
    with scripted(Model(spoil=streamed)) as server, endpoint(server.url, scoring="prefill") as engine, wrong:
        replay(engine)
