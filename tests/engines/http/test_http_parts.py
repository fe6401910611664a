"""The pieces: events from bytes, steps from streams, numbers from JSON, dialects from recorded shapes."""

import json
import struct
from itertools import pairwise

import numpy as np
import pytest
from endpoint_cases import request
from hypothesis import given
from hypothesis import strategies as st

from engines.http.answer import Answer, finite, stand_in
from engines.http.company import Stream, build_steps, meetings, shared
from engines.http.dialect import Prompt, ranked
from engines.http.dialects.llamacpp import LlamaCpp
from engines.http.dialects.openai import OpenAi
from engines.http.dialects.sglang import Sglang
from engines.http.dialects.tgi import Tgi
from engines.http.dialects.vllm_generate import VllmGenerate
from engines.http.flavours import FLAVOURS
from engines.http.metrics import Samples, read_labels, read_metric
from engines.http.sse import EventParser
from engines.http.traces import to_float32
from harness.errors import Unsupported
from harness.request import Grammar, Image, Message

STREAM = b': hello\r\n\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata: one\ndata:two\n\nid: 7\n\ndata: [DONE]\n\n'


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_do_not_depend_on_how_bytes_are_cut(cuts):
    parser, found, bounds = EventParser(), [], [0, *sorted(cuts), len(STREAM)]
    for begin, end in pairwise(bounds):
        found += parser.feed(STREAM[begin:end])
    assert found == [b'{"a": 1}', b"one\ntwo", b"[DONE]"]
    assert parser.is_between_events


def test_an_unfinished_event_is_told():
    for rest in (b"data: x", b"data: x\n", b"da"):
        parser = EventParser()
        assert parser.feed(rest) == []
        assert not parser.is_between_events


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_float32_goes_through_json_with_its_bits(value):
    for text in (json.dumps(value), str(np.float32(value))):  # as doubles are written, and as float32s are
        back, inexact = to_float32([finite(json.loads(text), "x")])
        assert struct.pack("<f", back[0]) == struct.pack("<f", value)
        assert inexact == 0


def test_numbers_that_lost_bits_are_counted():
    assert to_float32([-1.2345, -0.5, -1.23456789012345])[1] == 1  # the first is the shortest decimal of a float32


def test_candidates_have_one_order_whatever_the_server_sent():
    pairs = [(7, -1.0), (3, -1.0), (9, -0.5), (1, -9.0)]
    assert ranked(pairs, 3) == ranked(pairs[::-1], 3) == [(9, -0.5), (3, -1.0), (7, -1.0)]
    with pytest.raises(ValueError, match="token 3 is twice"):
        ranked([(3, -1.0), (3, -2.0)], 2)


def stream(times, prompt=4, cached=0):
    return Stream(prompt_tokens=prompt, cached_tokens=cached, times=times)


def company(*streams, **options):
    return shared(build_steps([stream(times) for times in streams], **options))


def test_one_after_another_is_no_company():
    assert company([1, 2, 3], [4, 5, 6]) == 0


def test_waiting_in_line_is_no_company():
    """Both were sent at once, and the second was served after the first: their streams never interleave."""
    assert company([1.0, 1.1, 1.2], [1.3, 1.4, 1.5]) == 0


def test_a_hand_over_that_a_busy_client_saw_late_is_no_company():
    """The first's last token was read between the second's, and once together with them."""
    assert company([1, 2, 3, 4, 6], [5, 7, 8, 9]) == 0
    assert company([1, 2, 3, 5, 6], [5, 5, 7, 8, 9]) == 0
    assert meetings([1, 2, 3, 5, 6], [5, 5, 7, 8, 9]) == 2
    assert meetings([1, 2, 5, 7], [4, 6, 8, 9]) == 5


def test_interleaved_streams_share_steps_but_not_first_tokens():
    steps = build_steps([stream([1, 3, 5, 7]), stream([2, 4, 6, 8])])
    assert shared(steps) == 6  # all but the first tokens, which stand alone
    first = steps.count > 1
    assert first.sum() == 2
    assert all((steps.step == step).sum() == 1 for step in steps.step[first])


def test_tokens_of_one_pass_meet_and_share_steps():
    times = [1, 2, 3, 4, 5, 6, 7]
    assert meetings(times, times) == 7
    assert company(times, times) == 12


def test_two_that_met_and_one_that_did_not_are_kept_apart():
    steps = build_steps([stream([1, 3, 5, 7]), stream([2, 4, 6, 8]), stream([6.5, 9, 10, 11])])
    assert shared(steps) == 6
    assert all((steps.step == step).sum() == 1 for step in steps.step[steps.request == 2])


def test_tokens_that_came_in_one_piece_share_a_step_once():
    steps = build_steps([stream([1, 2, 2, 2, 3, 4, 5]), stream([1.5, 2.5, 3.5, 4.5, 5.5])])
    pairs = list(zip(steps.step.tolist(), steps.request.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)
    assert shared(steps) > 0


def test_a_server_that_was_never_seen_with_two_requests_gives_no_company():
    assert company([1, 3, 5, 7], [2, 4, 6, 8]) == 6
    assert company([1, 3, 5, 7], [2, 4, 6, 8], apart=True) == 0
    assert Samples(running=[1.0] * 10).never_together
    assert not Samples(running=[1.0] * 9 + [2.0]).never_together
    assert not Samples(running=[1.0] * 9).never_together  # too few to say


def test_rows_cover_prompt_and_output_without_gaps():
    steps = build_steps([stream([1, 2, 3], prompt=5, cached=2)])
    assert steps.start.tolist() == [2, 5, 6]
    assert steps.count.tolist() == [3, 1, 1]


METRICS = '# HELP a b\nvllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 1.0\nx_y 3\n'


def test_metrics_are_added_over_labels_and_missing_is_not_zero():
    assert read_metric(METRICS, "vllm:num_requests_running") == 3.0
    assert read_metric(METRICS, "x_y") == 3.0
    assert read_metric(METRICS, "x") is None
    assert read_labels('c{a="1",b="two, three"} 1.0\n', "c") == {"a": "1", "b": "two, three"}


def answered(dialect, *events, candidates=2):
    answer = Answer(candidates=candidates)
    for at, event in enumerate(events):
        dialect.read(event, [answer], float(at))
    answer.close()
    return answer


def test_sglang_lists_may_be_cumulative_or_not():
    def event(n, lists, reason=None):
        meta = {"prompt_tokens": 3, "cached_tokens": 1, "completion_tokens": n, "finish_reason": reason}
        tops = [[[logprob, token, None], [-9.0, 99, None]] for logprob, token, _ in lists]
        meta |= {"output_token_logprobs": lists, "output_top_logprobs": tops}
        return {"text": "x", "output_ids": [token for _, token, _ in lists], "meta_info": meta}

    one, two = [-0.5, 11, None], [-0.25, 12, None]
    end = {"type": "length", "length": 2}
    for events in ([event(1, [one]), event(2, [one, two], end)], [event(1, [one]), event(2, [two], end)]):
        answer = answered(Sglang(), *events)
        assert answer.tokens == [11, 12]
        assert answer.logprobs == [-0.5, -0.25]
        assert answer.tops[1] == [(12, -0.25), (99, -9.0)]
        assert (answer.finish, answer.cached_tokens, answer.times) == ("length", 1, [0.0, 1.0])
    with pytest.raises(ValueError, match="entries for 3 tokens, 1 of them known"):
        answered(Sglang(), event(1, [one]), event(3, [one, two, one, one]))
    with pytest.raises(ValueError, match="'abort': expected stop or length"):
        answered(Sglang(), event(1, [one], {"type": "abort"}))


def test_sglang_is_always_sent_the_seed():
    body = Sglang().body(request(temperature=0.8, seed=2**40 + 5), Prompt(ids=(1, 2)), "m")
    assert body["sampling_params"]["sampling_seed"] == 5
    assert body["input_ids"] == [1, 2]
    assert "sampling_seed" not in Sglang().body(request(), Prompt(ids=(1,)), "m")["sampling_params"]


def test_llamacpp_events():
    def entry(i, logprob):
        return {"id": i, "token": "x", "bytes": [120], "logprob": logprob, "top_logprobs": [
            {"id": i, "logprob": logprob}, {"id": 5, "logprob": -7.0}]}  # fmt: skip

    events = [
        {"content": "x", "tokens": [i], "stop": False, "completion_probabilities": [entry(i, -0.5)]} for i in (3, 4)
    ]
    last = {
        "content": "",
        "tokens": [],
        "stop": True,
        "stop_type": "limit",
        "tokens_predicted": 2,
        "tokens_evaluated": 7,
    }
    answer = answered(LlamaCpp(), *events, last)
    assert (answer.tokens, answer.finish, answer.prompt_tokens) == ([3, 4], "length", 7)
    assert answer.tops[0] == [(3, -0.5), (5, -7.0)]
    body = LlamaCpp().body(request(temperature=1.0, seed=2**32), Prompt(ids=(1,)), "m")
    assert (body["seed"], body["cache_prompt"], body["n_probs"]) == (1, False, 3)
    LlamaCpp().body(request(min_tokens=2), Prompt(ids=(1,)), "m")  # ignore_eos bans the end altogether
    with pytest.raises(Unsupported, match="min_tokens"):
        LlamaCpp().body(request(min_tokens=2, ignore_eos=False), Prompt(ids=(1,)), "m")
    assert body["repeat_last_n"] >= 3 + 6  # penalties look back on everything; -1 is refused by newer builds


def test_tgi_events():
    def event(i, **more):
        return {"index": i, "token": {"id": i, "text": "x", "logprob": -0.5, "special": False},
                "top_tokens": [{"id": i, "logprob": -0.5}, {"id": 9, "logprob": -2.0}], **more}  # fmt: skip

    details = {"finish_reason": "eos_token", "generated_tokens": 2, "input_length": 3, "seed": 1}
    answer = answered(Tgi(), event(1), event(2, generated_text="xx", details=details))
    assert (answer.tokens, answer.finish, answer.tops[1]) == ([1, 2], "stop", [(2, -0.5), (9, -2.0)])
    with pytest.raises(Unsupported, match="ignore_eos: TGI"):
        Tgi().body(request(), Prompt(text="x"), "m")
    body = Tgi().body(request(ignore_eos=False), Prompt(text="x"), "m")
    assert body["parameters"]["temperature"] is None
    assert body["parameters"]["do_sample"] is False


def test_vllm_generate_events():
    def event(i, finish=None):
        best = [{"token_id": i, "logprob": -2.5}, {"token_id": 8, "logprob": -0.5}, {"token_id": 9, "logprob": -0.75}]
        content = [{"token_id": i, "logprob": -2.5, "rank": 7, "top_logprobs": best}]
        return {"choices": [{"index": 0, "token_ids": [i], "logprobs": {"content": content}, "finish_reason": finish}]}

    usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    answer = answered(VllmGenerate(), event(3), event(4, "length"), usage)
    assert (answer.tokens, answer.logprobs, answer.times) == ([3, 4], [-2.5, -2.5], [0.0, 1.0])
    assert answer.tops == [[(8, -0.5), (9, -0.75)]] * 2  # the chosen token pushed none of the best two out
    assert (answer.finish, answer.prompt_tokens) == ("length", 3)
    body = VllmGenerate().body(request(logprobs=20), Prompt(ids=(1,)), "m")
    assert (body["stream"], body["sampling_params"]["logprobs"]) == (True, 20)
    assert VllmGenerate().body(request(), Prompt(ids=(1,)), "m")["sampling_params"]["logprobs"] == 4
    wrong = event(3)
    wrong["choices"][0]["token_ids"] = [5]
    with pytest.raises(ValueError, match="came with logprobs of"):
        answered(VllmGenerate(), wrong)


def test_chat_tokens_are_told_by_their_bytes():
    def entry(octets, logprob):
        told = {"token": "\ufffd", "bytes": octets, "logprob": logprob}
        return told | {"top_logprobs": [told, {"token": "y", "bytes": [121], "logprob": -3.0}]}

    def event(octets, finish=None):
        return {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": finish,
                             "logprobs": {"content": [entry(octets, -0.5)]}}]}  # fmt: skip

    chat = OpenAi(chat=True, additions=False)
    answer = answered(chat, event([240]), event([159], "stop"))
    assert answer.tokens == [stand_in(b"\xf0"), stand_in(b"\x9f")]  # the same text, two tokens
    assert answer.offer == ("names", True, True)
    body = chat.body(request(ignore_eos=False), Prompt(messages=(Message(role="user", content="hi"),)), "m")
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert "top_k" not in body  # a hosted endpoint would refuse it


def test_text_alone_is_cut_into_as_many_slices_as_the_server_counts():
    plain = OpenAi(chat=False, additions=False)
    chunk = {"choices": [{"index": 0, "text": "hello world", "finish_reason": "stop", "logprobs": None}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 3}}
    answer = answered(plain, chunk, usage)
    assert answer.offer == ("text", False, False)
    assert answer.tokens == [stand_in(part) for part in ("hel", "lo w", "orld")]
    with pytest.raises(ValueError, match="holds no token"):
        answered(plain, chunk)


def test_every_interface_refuses_images_and_sends_the_prompt():
    prompt = Prompt(ids=(1,), text="x", messages=(Message(role="user", content="x"),))
    picture = request()
    picture = type(picture)(**{name: getattr(picture, name) for name in picture.__slots__} | {
        "images": (Image(sha256="0" * 64, media_type="image/png"),)})  # fmt: skip
    for flavour in FLAVOURS.values():
        for api, dialect in flavour.interfaces.items():
            given_ = (
                Prompt(messages=prompt.messages)
                if dialect.path.endswith("chat/completions")
                else prompt._replace(messages=None)
            )
            with pytest.raises(Unsupported, match="images"):
                dialect.body(picture, given_, "m")
            body = json.dumps(dialect.body(request(ignore_eos=False), given_, "m"))
            assert '"x"' in body or "[1]" in body, (flavour.name, api)


SCHEMA = '{"type": "object"}'
TEXTS = {"json_schema": SCHEMA, "regex": "[ab]+", "ebnf": 'root ::= "a"'}
AS_OBJECT = {"type": "object"}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": AS_OBJECT}}
SPELLED = {  # (flavour, api): where a grammar stands in a body, by kind; what is missing is refused
    ("openai", "completions"): {},
    ("openai", "chat"): {"json_schema": ("response_format", FORMAT)},
    ("samebits", "completions"): {"json_schema": ("structured_outputs", {"json": SCHEMA}),
                                  "regex": ("structured_outputs", {"regex": "[ab]+"}),
                                  "ebnf": ("structured_outputs", {"grammar": TEXTS["ebnf"]})},
    ("sglang", "generate"): {kind: ("sampling_params", kind, text) for kind, text in TEXTS.items()},
    ("sglang", "completions"): {kind: (kind, text) for kind, text in TEXTS.items()},
    ("sglang", "chat"): {"json_schema": ("response_format", FORMAT), "regex": ("regex", "[ab]+"),
                         "ebnf": ("ebnf", TEXTS["ebnf"])},
    ("llamacpp", "generate"): {"json_schema": ("json_schema", AS_OBJECT), "ebnf": ("grammar", TEXTS["ebnf"])},
    ("llamacpp", "completions"): {},
    ("llamacpp", "chat"): {"json_schema": ("response_format", FORMAT)},
    ("tgi", "generate"): {"json_schema": ("parameters", "grammar", {"type": "json", "value": AS_OBJECT}),
                          "regex": ("parameters", "grammar", {"type": "regex", "value": "[ab]+"})},
    ("tgi", "chat"): {},
}  # fmt: skip
SPELLED |= {("samebits", "chat"): SPELLED["samebits", "completions"]}
SPELLED |= {("vllm", api): SPELLED["samebits", "completions"] for api in ("completions", "chat")}
SPELLED |= {("vllm", "generate"): {kind: ("sampling_params", *way)
                                   for kind, way in SPELLED["samebits", "completions"].items()}}  # fmt: skip


def shaped(kind, text):
    wanted = request(ignore_eos=False)
    return type(wanted)(**{name: getattr(wanted, name) for name in wanted.__slots__} | {
        "grammar": Grammar(kind=kind, text=text)})  # fmt: skip


@pytest.mark.parametrize(("flavour", "api"), [(one.name, api) for one in FLAVOURS.values() for api in one.interfaces])
@pytest.mark.parametrize("kind", TEXTS)
def test_a_grammar_stands_where_the_interface_reads_it_or_is_refused_by_its_kind(flavour, api, kind):
    dialect = FLAVOURS[flavour].interfaces[api]
    prompt = Prompt(messages=(Message(role="user", content="x"),)) if api == "chat" else Prompt(ids=(1,), text="x")
    wanted = shaped(kind, TEXTS[kind])
    if kind not in SPELLED[flavour, api]:
        with pytest.raises(Unsupported, match=rf"'a': grammar \({kind}\): this interface has no word for it"):
            dialect.body(wanted, prompt, "m")
        return
    *way, value = SPELLED[flavour, api][kind]
    found = dialect.body(wanted, prompt, "m")
    for key in way:
        found = found[key]
    assert found == value


def test_llamacpp_reads_no_lark_and_a_schema_must_be_json():
    with pytest.raises(Unsupported, match=r"grammar \(ebnf\)"):
        LlamaCpp().body(shaped("ebnf", 'start: "a"'), Prompt(ids=(1,)), "m")
    with pytest.raises(Unsupported, match="its text is no JSON"):
        LlamaCpp().body(shaped("json_schema", "{"), Prompt(ids=(1,)), "m")
