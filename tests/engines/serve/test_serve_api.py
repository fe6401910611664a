"""Both APIs over a real socket: shapes, exact numbers, sampling fields, refusals."""

import json

import numpy as np
import pytest
from serving import ask, bits, chat, complete, joined, metrics, running, streaming

from engines.bundled.tokenizer import ByteTokenizer
from harness import __version__
from harness.fingerprint import Fingerprint

TOKENIZER = ByteTokenizer(512)


@pytest.fixture(scope="module")
def port():
    with running() as server:
        yield server.port


def spoken(port, **fields):
    """The ids of one greedy completion."""
    answer = complete(port, return_token_ids=True, **{"max_tokens": 8, "ignore_eos": True, **fields})
    return answer["choices"][0]["token_ids"]


# Shapes


def test_a_completion_has_openais_shape(port):
    answer = complete(port, "hello", max_tokens=4, ignore_eos=True)
    assert list(answer) == ["id", "object", "created", "model", "system_fingerprint", "samebits", "choices", "usage"]
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    assert answer["id"].startswith("cmpl-")
    details = {"cached_tokens": 0}
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9,
                               "prompt_tokens_details": details}  # fmt: skip
    (choice,) = answer["choices"]
    assert list(choice) == ["index", "text", "logprobs", "finish_reason", "stop_reason"]
    assert (choice["index"], choice["logprobs"], choice["finish_reason"]) == (0, None, "length")


def test_a_chat_completion_has_openais_shape(port):
    answer = chat(port, max_tokens=3, ignore_eos=True, return_token_ids=True)
    assert (answer["object"], answer["id"][:9]) == ("chat.completion", "chatcmpl-")
    assert answer["prompt_token_ids"] == list(TOKENIZER.encode_chat([("user", "hello")]))
    (choice,) = answer["choices"]
    assert list(choice["message"]) == ["role", "content", "refusal"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == TOKENIZER.decode(choice["token_ids"])


def test_content_may_come_in_parts(port):
    whole = chat(port, return_token_ids=True)
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    split = chat(port, return_token_ids=True, messages=[{"role": "user", "content": parts}])
    assert split["choices"] == whole["choices"]
    assert split["prompt_token_ids"] == whole["prompt_token_ids"]


def test_max_completion_tokens_is_the_newer_name(port):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": 0, "ignore_eos": True}
    answer = ask(port, "/v1/chat/completions", {**body, "max_completion_tokens": 3})
    assert answer.json["usage"]["completion_tokens"] == 3


def test_the_fingerprint_is_in_the_header_and_on_its_page(port):
    page = ask(port, "/samebits/fingerprint")
    record = Fingerprint.from_json(page.json)  # checks the digest against the fields
    answer = ask(port, "/v1/completions", {"model": "tiny", "prompt": "x", "temperature": 0})
    assert answer.headers["x-samebits-fingerprint"] == record.digest
    assert answer.json["system_fingerprint"] == "fp_" + record.digest.removeprefix("sha256:")[:16]
    names = {field.name: field.value for field in record.fields}
    assert names["arithmetic.name"] == "portable"
    assert names["config.max_num_seqs"] == 8
    assert names["lineage.served"] >= 0
    with streaming(port, "/v1/completions", {"model": "tiny", "prompt": "x", "temperature": 0}) as stream:
        assert {event["system_fingerprint"] for event in stream} == {answer.json["system_fingerprint"]}


def test_the_small_pages(port):
    assert ask(port, "/health").json == {"status": "ok"}
    assert ask(port, "/version").json == {"version": __version__}
    (card,) = ask(port, "/v1/models").json["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 8192)
    assert ask(port, "/v1/models/tiny").json == card
    assert ask(port, "/v1/models/tinny").error["code"] == "model_not_found"


def test_the_metrics_count_what_was_done(port):
    before = metrics(port)
    complete(port, "hello", n=2, max_tokens=3, ignore_eos=True)
    after = metrics(port)
    moved = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert moved.pop("samebits_steps_total") >= 3
    assert moved.pop("samebits_computed_tokens_total") == 2 * (5 + 2)  # the last token is never computed
    assert moved == {
        "samebits_requests_admitted_total": 2,
        "samebits_prompt_tokens_total": 10,
        "samebits_generation_tokens_total": 6,
        'samebits_requests_total{outcome="length"}': 2,
    } | ({"samebits_requests_running_max": 1} if before["samebits_requests_running_max"] == 1 else {})
    assert (after["samebits_requests_running"], after["samebits_kv_pages_held"]) == (0, 0)
    assert (after["samebits_kv_pages"], after["samebits_cached_tokens_total"]) == (1200, 0)


# Prompts


def test_prompts_of_all_kinds(port):
    ids = list(b"hello")
    alone = spoken(port, prompt="hello")
    assert spoken(port, prompt=["hello"]) == alone
    assert spoken(port, prompt=ids) == alone
    assert spoken(port, prompt=[ids]) == alone


def test_a_list_of_prompts_is_served_as_if_each_came_alone(port):
    fields = {"temperature": 0.9, "seed": 3, "n": 2, "logprobs": 2, "return_token_ids": True, "max_tokens": 6}
    together = complete(port, ["one", "two, longer", "three"], **fields)["choices"]
    assert [choice["index"] for choice in together] == list(range(6))
    for number, prompt in enumerate(["one", "two, longer", "three"]):
        alone = complete(port, prompt, **fields)["choices"]
        assert [{**choice, "index": 0} for choice in alone] == [
            {**choice, "index": 0} for choice in together[2 * number : 2 * number + 2]
        ]
        assert alone[0]["prompt_token_ids"] == list(prompt.encode())
        assert alone[0]["token_ids"] != alone[1]["token_ids"], "n samples are clones"


# Log-probabilities


@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_completion_logprobs(port, k):
    fields = {"max_tokens": 5, "ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True}
    (choice,) = complete(port, "hello there", logprobs=k, temperature=1.0, seed=4, **fields)["choices"]
    logprobs = choice["logprobs"]
    assert list(logprobs) == ["text_offset", "token_logprobs", "tokens", "top_logprobs"]
    assert logprobs["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert len(top) in (k, k + 1)
        assert bits(top[token]) == bits(logprob)
        ordered = list(top.values())[:k]
        assert ordered == sorted(ordered, reverse=True)
        assert sum(np.exp(ordered)) <= 1 + 1e-5


def test_offsets_point_into_the_text(port):
    (choice,) = complete(port, "hello there", logprobs=0, max_tokens=12, ignore_eos=True)["choices"]
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    assert offsets[-1] <= len(choice["text"])


def test_names_that_are_taken_lose_no_candidate(port):
    """Single bytes of characters all read U+FFFD."""
    (choice,) = complete(port, "hello there", logprobs=20, max_tokens=6, ignore_eos=True)["choices"]
    sizes = [len(top) for top in choice["logprobs"]["top_logprobs"]]
    assert sizes == [20] * 6
    assert any(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for name in top)


def test_chat_logprobs_are_the_completions(port):
    """The same ids as a prompt of the other API: the same numbers in the other shape."""
    answer = chat(port, logprobs=True, top_logprobs=20, ignore_eos=True, return_token_ids=True, max_tokens=6)
    (choice,) = answer["choices"]
    (other,) = complete(
        port, answer["prompt_token_ids"], logprobs=20, ignore_eos=True, max_tokens=6, return_tokens_as_token_ids=True
    )["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == other["logprobs"]["token_logprobs"]
    for entry, token, top in zip(content, choice["token_ids"], other["logprobs"]["top_logprobs"], strict=True):
        assert list(entry) == ["token", "logprob", "bytes", "top_logprobs"]
        assert entry["token"] == TOKENIZER.decode([token])
        assert entry["bytes"] == (None if "�" in entry["token"] else list(entry["token"].encode()))
        assert [one["logprob"] for one in entry["top_logprobs"]] == list(top.values())


def test_asking_for_logprobs_changes_no_token(port):
    fields = {"temperature": 1.0, "seed": 8}
    assert spoken(port, **fields) == spoken(port, logprobs=20, **fields)


# Streams


@pytest.mark.parametrize("fields", [{}, {"stop": ["e"]}, {"temperature": 1.2, "seed": 1, "n": 3}])
def test_a_completion_stream_carries_the_whole_answer(port, fields):
    body = {"model": "tiny", "prompt": ["hello", "you"], "temperature": 0, "max_tokens": 24, "logprobs": 3,
            "return_token_ids": True, **fields}  # fmt: skip
    whole = ask(port, "/v1/completions", body).json
    with streaming(port, "/v1/completions", {**body, "stream_options": {"include_usage": True}}) as stream:
        *chunks, last = list(stream)
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert all(chunk["usage"] is None for chunk in chunks)
    for expected in whole["choices"]:
        mine = [one for chunk in chunks for one in chunk["choices"] if one["index"] == expected["index"]]
        assert [one["finish_reason"] for one in mine] == [None] * (len(mine) - 1) + [expected["finish_reason"]]
        assert "".join(one["text"] for one in mine) == expected["text"]
        assert joined(one["token_ids"] for one in mine) == expected["token_ids"]
        assert mine[0]["prompt_token_ids"] == expected["prompt_token_ids"]
        for key, values in expected["logprobs"].items():
            assert joined(one["logprobs"][key] for one in mine) == values


def test_a_chat_stream_carries_the_whole_answer(port):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0.8, "seed": 2, "n": 2,
            "max_tokens": 9, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}  # fmt: skip
    whole = ask(port, "/v1/chat/completions", body).json
    with streaming(port, "/v1/chat/completions", body) as stream:
        chunks = list(stream)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    for expected in whole["choices"]:
        mine = [one for chunk in chunks for one in chunk["choices"] if one["index"] == expected["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(one["delta"]["content"] for one in mine) == expected["message"]["content"]
        assert mine[-1]["finish_reason"] == expected["finish_reason"]
        assert joined(one["logprobs"]["content"] for one in mine[1:]) == expected["logprobs"]["content"]


# Sampling fields


def test_stop_ids_end_a_request_and_are_no_text(port):
    ids = spoken(port, max_tokens=12)
    end = next(token for token in ids if ids.index(token) > 2)
    (choice,) = complete(port, stop_token_ids=[end], max_tokens=12, ignore_eos=True, return_token_ids=True)["choices"]
    assert choice["token_ids"] == ids[: ids.index(end) + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", end)
    assert choice["text"] == TOKENIZER.decode(ids[: ids.index(end)])


def test_a_stop_string_ends_a_request_before_it(port):
    fields = {"max_tokens": 40, "ignore_eos": True, "temperature": 1.0, "seed": 5}
    (free,) = complete(port, **fields)["choices"]
    stop = next(char for char in free["text"][3:] if char.isascii() and char.isprintable())
    (choice,) = complete(port, stop=stop, **fields)["choices"]
    assert choice["text"] == free["text"][: free["text"].index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    (kept,) = complete(port, stop=[stop], include_stop_str_in_output=True, **fields)["choices"]
    assert kept["text"] == choice["text"] + stop


def test_ignore_eos_and_min_tokens(port):
    eos = str(TOKENIZER.END)
    pushed = {"logit_bias": {eos: 100}, "max_tokens": 6}
    assert spoken(port, ignore_eos=False, **pushed) == [TOKENIZER.END]
    assert len(spoken(port, **pushed)) == 6
    least = spoken(port, ignore_eos=False, min_tokens=4, **pushed)
    assert (len(least), least[-1], least.count(TOKENIZER.END)) == (5, TOKENIZER.END, 1)
    (choice,) = complete(port, **pushed)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", None)


@pytest.mark.parametrize(
    "fields",
    [{"repetition_penalty": 1.5}, {"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"logit_bias": {"300": 100}}],
)
def test_fields_reach_the_sampler(port, fields):
    assert spoken(port, max_tokens=48, **fields) != spoken(port, max_tokens=48)


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_filters_down_to_one_candidate_are_greedy(port, fields):
    assert spoken(port, temperature=1.0, seed=1, **fields) == spoken(port)
    assert spoken(port, temperature=1.0, seed=1) != spoken(port)


def test_seeds_decide_draws(port):
    assert spoken(port, temperature=1.0, seed=2**64 - 1) == spoken(port, temperature=1.0, seed=2**64 - 1)
    assert spoken(port, temperature=1.0, seed=2) != spoken(port, temperature=1.0, seed=1)
    assert complete(port, temperature=1.0, seed=1)["samebits"] == {"seeds": [1], "seed_source": "request"}
    assert complete(port)["samebits"] == {"seeds": [None], "seed_source": "none"}


def test_derived_seeds_are_reported_and_repeat():
    with running(policy="derive") as server:
        body = {"model": "tiny", "prompt": ["a", "b"], "return_token_ids": True}
        first, again = (ask(server.port, "/v1/completions", body).json for _ in range(2))
        assert first["samebits"]["seed_source"] == "derived"
        assert len(set(first["samebits"]["seeds"])) == 2
        assert first["choices"] == again["choices"]
        seed = first["samebits"]["seeds"][1]
        given = complete(server.port, "b", temperature=1.0, seed=seed, return_token_ids=True)
        assert given["choices"][0]["token_ids"] == first["choices"][1]["token_ids"]


def test_an_order_free_arithmetic_draws_a_seed_and_reports_it():
    with running(arithmetic="free") as server:
        body = {"model": "tiny", "prompt": "a"}
        assert ask(server.port, "/v1/completions", body).json["samebits"] == {"seeds": [77], "seed_source": "random"}


# Refusals

BASE = {"model": "tiny", "prompt": "x", "temperature": 0}


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"temperature": -1}, "temperature", "greater than or equal to 0, got -1"),
        ({"temperature": "0"}, "temperature", "valid number, got '0'"),
        ({"temperature": 1e-40}, "temperature", "0, or at least 1e-30"),
        ({"temperature": 1}, "seed", "send seed"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_k": 1.5}, "top_k", "integer"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": True}, "max_tokens", "integer"),
        ({"max_tokens": 9000}, "max_tokens", "exceed the 8192"),
        ({"min_tokens": 17}, "min_tokens", "at most max_tokens, which is 16"),
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"n": 128, "prompt": ["x"] * 9}, "n", "at most 1024 choices"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"seed": 2**64}, "seed", "less than 18446744073709551616"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"logprobs": True}, "logprobs", "integer"),
        ({"stop": ["a", ""]}, "stop", "a string or a list of strings"),
        ({"stop": 5}, "stop", "a string or a list of strings, got 5"),
        ({"stop_token_ids": [512]}, "stop_token_ids[0]", "below 512"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "greater than or equal to 0"),
        ({"stop_token_ids": list(range(512)), "min_tokens": 1}, "stop_token_ids", "one token left"),
        ({"logit_bias": {"512": 1}}, "logit_bias[0]", "below 512"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "keys must be token ids, 'x' is none"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "less than or equal to 100"),
        ({"prompt": ""}, "prompt", "at least one token"),
        ({"prompt": []}, "prompt", "at least one token"),
        ({"prompt": ["x", ""]}, "prompt[1]", "at least one token"),
        ({"prompt": [1, "x"]}, "prompt", "a string, a list of strings, a list of token ids"),
        ({"prompt": [512]}, "prompt", "token ids below 512, got 512"),
        ({"prompt": [-1]}, "prompt", "a list of token ids"),
        ({"prompt": "x" * 8192}, "prompt", "leave no room to answer"),
        ({"prompt": "\ud800"}, "prompt", "whole characters"),
        ({"stop": ["\udfff"]}, "stop", "whole characters"),
        ({"x" * 500: 1}, "x" * 60, "no such field"),
        ({"prompt": None}, "prompt", "a string"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream to be true"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "no such field"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "less than or equal to 20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream to be false"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "'text', 'json_object' or 'json_schema'"),
        ({"echo": True, "stream": True}, "echo", "stream to be false beside it"),
        ({"best_of": 2}, "best_of", "use n"),
        ({"skip_special_tokens": True}, "skip_special_tokens", "text shows every token"),
        ({"tools": []}, "tools", "calls no tools"),
        ({"temprature": 1}, "temprature", "did you mean 'temperature'?"),
        ({"top_logprobs": 1}, "top_logprobs", "no such field; did you mean 'logprobs'?"),
    ],
)
def test_a_bad_field_is_named(port, change, param, words):
    answer = ask(port, "/v1/completions", {**BASE, **change})
    assert answer.status == 400, answer.raw
    assert answer.error["param"] == param
    assert words in answer.error["message"]
    assert answer.error["type"] == "invalid_request_error"
    assert len(answer.error["message"]) < 700


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "a string or a list of text parts"),
        ({"messages": [{"role": "\ud800", "content": "x"}]}, "messages[0].role", "whole characters"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "text parts"),
        ({"messages": [{"role": "user", "content": "x", "nam": 1}]}, "messages[0].nam", "no such field"),
        ({"messages": [{"role": "user", "content": "x" * 8192}]}, "messages", "leave no room"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs to be true"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "both equal"),
        ({"prompt": "x"}, "prompt", "no such field"),
    ],
)
def test_a_bad_field_of_a_chat_is_named(port, change, param, words):
    base = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": 0}
    answer = ask(port, "/v1/chat/completions", {**base, **change})
    assert (answer.status, answer.error["param"]) == (400, param), answer.raw
    assert words in answer.error["message"]


@pytest.mark.parametrize("field", ["temperature", "top_p", "presence_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", ["NaN", "Infinity"])
def test_numbers_that_are_none_are_refused(port, field, value):
    body = json.dumps({**BASE, field: 0}).replace(f'"{field}": 0', f'"{field}": {value}')
    answer = ask(port, "/v1/completions", body)
    assert (answer.status, answer.error["param"]) == (400, field)
    assert "finite number" in answer.error["message"]


def test_too_long_and_unknown_have_openais_codes(port):
    assert ask(port, "/v1/completions", {**BASE, "prompt": "x" * 9000}).error["code"] == "context_length_exceeded"
    assert ask(port, "/v1/completions", {**BASE, "max_tokens": 8192}).error["code"] == "context_length_exceeded"
    unknown = ask(port, "/v1/completions", {**BASE, "model": "huge"})
    assert (unknown.status, unknown.error["code"], unknown.error["param"]) == (404, "model_not_found", "model")
    assert "'tiny' is" in unknown.error["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("{", "no JSON"),
        ('{"\\ud800": 1}', "JSON object"),
        ("[]", "JSON object"),
        ("7", "JSON object"),
        ("[" * 50000, "body"),
    ],
)
def test_a_body_that_is_no_object(port, body, words):
    answer = ask(port, "/v1/completions", body)
    assert answer.status == 400
    assert words in answer.error["message"]


def test_a_body_that_is_not_said_to_be_json(port):
    answer = ask(port, "/v1/completions", json.dumps(BASE), headers={"content-type": "text/plain"})
    assert answer.status == 400
    assert "application/json" in answer.error["message"]


def test_unknown_paths_and_methods(port):
    assert ask(port, "/v1/embeddings", {}).status == 404
    assert ask(port, "/v1/embeddings", {}).error["code"] == "not_found"
    wrong = ask(port, "/v1/completions", method="GET")
    assert (wrong.status, wrong.error["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


def test_a_pool_smaller_than_the_context_is_the_limit():
    with running(num_pages=4) as server:  # 32 tokens and the last one
        assert complete(server.port, "x" * 20, max_tokens=13, ignore_eos=True)["usage"]["total_tokens"] == 33
        answer = ask(server.port, "/v1/completions", {**BASE, "prompt": "x" * 20, "max_tokens": 14})
        assert (answer.status, answer.error["param"]) == (400, "max_tokens")
        assert ask(server.port, "/v1/completions", {**BASE, "prompt": "x" * 33}).error["param"] == "prompt"


def test_bodies_are_bounded():
    with running(max_body_bytes=500) as server:
        assert ask(server.port, "/v1/completions", {**BASE, "prompt": "x" * 300}).status == 200
        announced = ask(server.port, "/v1/completions", {**BASE, "prompt": "x" * 600})
        chunks = iter([b'{"model": "tiny", "prompt": "', b"x" * 600, b'"}'])
        grown = ask_chunked(server.port, chunks)
        for answer in (announced, grown):
            assert (answer.status, answer.error["code"]) == (413, "body_too_large")
            assert "500 bytes" in answer.error["message"]


def ask_chunked(port, chunks):
    import http.client

    from serving import DEADLINE_S, Answer

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    connection.request("POST", "/v1/completions", chunks, {"content-type": "application/json"}, encode_chunked=True)
    response = connection.getresponse()
    answer = Answer(response.status, dict(response.getheaders()), response.read())
    connection.close()
    return answer
