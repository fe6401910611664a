"""Freezing OpenAI Batch API input: every body field is carried over, dropped with a report, or refused."""

from __future__ import annotations

import base64
import json

import pytest

from engines.bundled.tokenizer import ByteTokenizer
from harness.corpus import load_corpus
from harness.corpus.freeze import Frozen, Order, freeze
from harness.errors import CorpusError

USER = [{"role": "user", "content": "hi"}]


def completion(body: dict[str, object], name: str = "c1") -> dict[str, object]:
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi", **body}}


def chat(body: dict[str, object], name: str = "c1") -> dict[str, object]:
    messages = {} if "messages" in body else {"messages": USER}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {**messages, **body}}


@pytest.fixture
def freeze_one(tmp_path):
    def run(*lines: dict[str, object]) -> Frozen:
        source = tmp_path / "batch.jsonl"
        source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        order = Order(source=source, tokenizer=ByteTokenizer(512), tokenizer_name="bytes", name="batch", defaults={})
        return freeze(order, tmp_path / "frozen")

    return run


def test_a_completion_gets_the_defaults_of_the_api(freeze_one):
    frozen = freeze_one(completion({}))
    (request,) = frozen.corpus.requests
    assert (request.id, request.text, request.messages) == ("c1", "hi", None)
    assert (request.sampling.temperature, request.sampling.max_tokens) == (1.0, 16)
    assert [name for name, _ in frozen.seeds] == ["c1"]


def test_a_chat_is_encoded_with_the_template(freeze_one):
    (request,) = freeze_one(chat({"seed": 5})).corpus.requests
    assert request.prompt_token_ids == ByteTokenizer(512).encode_chat([("user", "hi")])
    assert (request.text, request.sampling.seed, request.sampling.max_tokens) == (None, 5, 64)


CARRIED = [
    ("temperature", 0.25, "temperature", 0.25),
    ("top_p", 0.5, "top_p", 0.5),
    ("n", 2, "n", 2),
    ("seed", 11, "seed", 11),
    ("stop", "END", "stop", ("END",)),
    ("stop", ["A", "B"], "stop", ("A", "B")),
    ("logit_bias", {"7": -3, "5": 1}, "logit_bias", ((5, 1.0), (7, -3.0))),
    ("presence_penalty", 0.5, "presence_penalty", 0.5),
    ("frequency_penalty", -0.5, "frequency_penalty", -0.5),
    ("max_tokens", 3, "max_tokens", 3),
    ("top_k", 9, "top_k", 9),
    ("top_k", -1, "top_k", 0),
    ("min_p", 0.1, "min_p", 0.1),
    ("repetition_penalty", 1.5, "repetition_penalty", 1.5),
    ("min_tokens", 2, "min_tokens", 2),
    ("ignore_eos", True, "ignore_eos", True),
    ("stop_token_ids", [9], "stop_token_ids", (9,)),
]


@pytest.mark.parametrize("line", [completion, chat])
@pytest.mark.parametrize(("field", "value", "target", "expected"), CARRIED, ids=lambda item: str(item)[:16])
def test_a_field_that_decides_tokens_is_carried_over(freeze_one, line, field, value, target, expected):
    (request,) = freeze_one(line({field: value})).corpus.requests
    assert getattr(request.sampling, target) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (completion({"logprobs": 3}), 3),
        (chat({"logprobs": True, "top_logprobs": 7}), 7),
        (chat({"logprobs": True}), 5),
        (chat({"logprobs": False}), 5),
        (completion({"logprobs": None}), 5),
    ],
)
def test_logprobs(freeze_one, line, expected):
    assert freeze_one(line).corpus.requests[0].sampling.logprobs == expected


def test_max_completion_tokens_is_max_tokens(freeze_one):
    assert freeze_one(chat({"max_completion_tokens": 12})).corpus.requests[0].sampling.max_tokens == 12


def test_null_is_the_default(freeze_one):
    (request,) = freeze_one(completion({"temperature": None, "stop": None, "seed": None})).corpus.requests
    assert (request.sampling.temperature, request.sampling.stop) == (1.0, ())


def test_a_prompt_of_token_ids(freeze_one):
    (request,) = freeze_one(completion({"prompt": [3, 4]})).corpus.requests
    assert (request.prompt_token_ids, request.text) == ((3, 4), None)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}, {"type": "array"}),
    ],
)
def test_a_response_format_becomes_a_grammar(freeze_one, value, expected):
    grammar = freeze_one(chat({"response_format": value})).corpus.requests[0].grammar
    assert (grammar and json.loads(grammar.text)) == expected
    assert grammar is None or grammar.kind == "json_schema"


def test_fields_that_decide_no_token_are_reported(freeze_one):
    frozen = freeze_one(chat({"model": "m", "stream": True}, "a"), completion({"model": "m"}, "b"))
    assert frozen.dropped == (("model", 2), ("stream", 1))


def test_an_image_url_is_kept_by_digest(freeze_one):
    url = "data:image/jpeg;base64," + base64.b64encode(b"jpeg").decode()
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}}, {"type": "text", "text": "?"}]
    corpus = freeze_one(chat({"messages": [{"role": "user", "content": parts}]})).corpus
    (image,) = load_corpus(str(corpus.path)).requests[0].images
    assert (corpus.path / "images" / image.sha256).read_bytes() == b"jpeg"


def picture(url: str) -> dict[str, object]:
    return chat({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]})


MISTAKES = [
    (completion({"echo": True}), "$.body: unsupported fields: echo; supported: frequency_penalty, ignore_eos"),
    (chat({"tools": []}), "$.body: unsupported fields: tools; supported:"),
    (completion({"messages": USER}), "$.body: unsupported fields: messages;"),
    (completion({"prompt": ["a", "b"]}), "$.body.prompt: expected one prompt, found a list of prompts"),
    (completion({"prompt": None}), "$.body: expected exactly one of text, prompt, messages"),
    (chat({"top_logprobs": 3}), "$.body.top_logprobs: top_logprobs needs logprobs: true"),
    (chat({"max_tokens": 1, "max_completion_tokens": 2}), "$.body.max_tokens: max_tokens and max_completion"),
    (chat({"response_format": {"type": "xml"}}), "$.body.response_format.type: expected one of 'text'"),
    (
        chat({"response_format": {"type": "json_schema"}}),
        "$.body.response_format.json_schema.schema: required key is missing",
    ),
    (completion({"temperature": "hot"}), "$.body.temperature: expected a finite number"),
    (completion({"logit_bias": {"600": 1}}), "$.body.logit_bias: expected a token id from 0 to 511"),
    (picture("https://example.org/cat.png"), "image_url.url: expected a data: URL"),
    (picture("data:text/html;base64,AAAA"), "image_url.url: expected data:TYPE;base64,BYTES"),
    (picture("data:image/png;base64,"), "image_url.url: the image is empty"),
    ({**completion({}), "method": "GET"}, "$.method: expected one of 'POST', found \"GET\" (str)"),
    ({**completion({}), "url": "/v1/embeddings"}, "$.url: expected one of '/v1/completions'"),
    ({"custom_id": "a", "method": "POST", "url": "/v1/completions"}, "$.body: required key is missing"),
    ({**completion({}), "body": [1]}, "$.body: expected an object, found [1] (list)"),
]


@pytest.mark.parametrize(("line", "expected"), MISTAKES, ids=[part for _, part in MISTAKES])
def test_everything_else_is_refused(freeze_one, line, expected):
    with pytest.raises(CorpusError) as caught:
        freeze_one(line)
    assert f"batch.jsonl:1 {expected}" in str(caught.value).replace("$.body.messages[0].content[0].", "")


def test_the_same_custom_id_twice_is_refused(freeze_one):
    with pytest.raises(CorpusError, match=r"batch.jsonl:2 \$.custom_id: the id 'c1' is already used in line 1"):
        freeze_one(completion({}), chat({}))
