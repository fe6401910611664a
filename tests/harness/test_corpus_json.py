"""Requests as JSON: every mistake is found with its place; what is written is read back."""

from __future__ import annotations

import json
import math

import pytest
from corpus_making import SAMPLING, VOCAB_SIZE, request_value
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.corpus.json_lines import read_request, request_from_json, request_json, request_line
from harness.errors import CorpusError
from harness.request import Grammar, Image, Message, Request, Sampling
from harness.strict_json import Place, parse_json, raise_mistakes


def mistakes_of(value: object) -> list[str]:
    place = Place(file="f.jsonl", line=3, path="$", mistakes=[])
    read_request(place, value, vocab_size=VOCAB_SIZE)
    return place.mistakes


def test_a_valid_request_has_no_mistakes():
    assert mistakes_of(request_value()) == []


SAMPLING_MISTAKES = [
    ("temperature", math.nan, "expected a finite number of at least 0, found NaN (float)"),
    ("temperature", math.inf, "expected a finite number of at least 0, found Infinity (float)"),
    ("temperature", -0.1, "expected a finite number of at least 0, found -0.1 (float)"),
    ("temperature", 10**400, "expected a finite number of at least 0, found 1000"),
    ("temperature", "8", 'expected a finite number of at least 0, found "8" (str)'),
    ("temperature", True, "found true (bool)"),
    ("temperature", None, "found null"),
    ("top_p", 0.0, "expected a finite number above 0 and at most 1, found 0.0 (float)"),
    ("top_p", 1.01, "at most 1, found 1.01"),
    ("top_k", 8.0, "expected an integer of at least 0 and at most 2147483647, found 8.0 (float)"),
    ("top_k", "8", 'found "8" (str)'),
    ("min_p", 1.5, "at most 1"),
    ("repetition_penalty", 0, "above 0"),
    ("frequency_penalty", "x", "expected a finite number, found"),
    ("seed", -1, "expected an integer of at least 0"),
    ("seed", 2**64, "at most 18446744073709551615, found 18446744073709551616 (int)"),
    ("max_tokens", 0, "of at least 1"),
    ("min_tokens", 9, "expected at most max_tokens (8), found 9"),
    ("ignore_eos", 1, "expected true or false, found 1 (int)"),
    ("stop", "x", 'expected a list, found "x" (str)'),
    ("stop_token_ids", [VOCAB_SIZE], f"expected a token id from 0 to {VOCAB_SIZE - 1}"),
    ("logit_bias", [[VOCAB_SIZE, 1.0]], f"expected a token id from 0 to {VOCAB_SIZE - 1}"),
    ("logit_bias", [[1, 1.0], [1, 2.0]], "token id 1 is biased twice"),
    ("logprobs", 21, "expected an integer of at least 0 and at most 20, found 21 (int)"),
    ("n", 0, "of at least 1"),
    ("n", True, "found true (bool)"),
]


@pytest.mark.parametrize(("field", "value", "expected"), SAMPLING_MISTAKES, ids=lambda item: str(item)[:24])
def test_a_mistake_in_sampling_is_placed(field, value, expected):
    found = mistakes_of(request_value(**{field: value}))
    assert len(found) == 1
    assert found[0].startswith(f"f.jsonl:3 $.sampling.{field}: ")
    assert expected in found[0]


@pytest.mark.parametrize(
    ("field", "value", "path", "expected"),
    [
        ("stop", ["a", ""], "stop[1]", "expected a string that is not empty"),
        ("stop_token_ids", [1, -1], "stop_token_ids[1]", "expected an integer of at least 0, found -1"),
        ("logit_bias", [[1, 1.0, 1]], "logit_bias[0]", "expected a pair [token id, bias]"),
        ("logit_bias", [[1, math.nan]], "logit_bias[0][1]", "expected a finite number, found NaN"),
    ],
)
def test_a_mistake_inside_a_list_is_placed(field, value, path, expected):
    found = mistakes_of(request_value(**{field: value}))
    assert found[0].startswith(f"f.jsonl:3 $.sampling.{path}: ")
    assert expected in found[0]


REQUEST_MISTAKES = [
    ("id", "", "$.id: expected a string that is not empty"),
    ("id", " a", "$.id: expected a printable id"),
    ("id", "a\nb", "$.id: expected a printable id"),
    ("id", 7, "$.id: expected a string that is not empty, found 7 (int)"),
    ("prompt_token_ids", [], "$.prompt_token_ids: expected a list that is not empty"),
    ("prompt_token_ids", [1, -2], "$.prompt_token_ids[1]: expected a token id from 0 to 511"),
    ("prompt_token_ids", [1, 512], "$.prompt_token_ids[1]: expected a token id from 0 to 511"),
    ("prompt_token_ids", [True], "$.prompt_token_ids[0]: expected a token id"),
    ("prompt_token_ids", ["1"], "$.prompt_token_ids[0]: expected a token id"),
    ("text", "\ud800", "$.text: the text holds half of a surrogate pair"),
    ("messages", [{"role": "user", "content": "x"}], "$: both text and messages are given"),
    ("messages", [{"role": "wizard"}], "$.messages[0].content: required key is missing"),
    ("grammar", {"kind": "yacc", "text": "x"}, "$.grammar.kind: expected one of 'json_schema', 'regex', 'ebnf'"),
    ("images", [{"sha256": "AB", "media_type": "image/png"}], "$.images[0].sha256: expected a SHA-256"),
    ("sampling", [], "$.sampling: expected an object, found [] (list)"),
]


@pytest.mark.parametrize(("field", "value", "expected"), REQUEST_MISTAKES, ids=lambda item: str(item)[:24])
def test_a_mistake_in_a_request_is_placed(field, value, expected):
    found = mistakes_of({**request_value(), field: value})
    assert any(line.startswith(f"f.jsonl:3 {expected}") for line in found), found


@pytest.mark.parametrize("field", sorted(SAMPLING))
def test_every_sampling_field_is_required(field):
    value = request_value()
    del value["sampling"][field]
    assert mistakes_of(value) == [f"f.jsonl:3 $.sampling.{field}: required key is missing; add it"]


def test_a_draw_without_a_seed_is_a_mistake():
    (found,) = mistakes_of(request_value(temperature=0.5))
    assert "$.sampling.seed: expected a seed, because temperature is above 0, found null" in found


def test_unknown_keys_get_a_suggestion():
    value = request_value(topk=5)
    value["zzz"] = []
    assert mistakes_of(value) == [
        "f.jsonl:3 $.zzz: unknown key; known: grammar, id, images, messages, prompt_token_ids, sampling, text",
        "f.jsonl:3 $.sampling.topk: unknown key; did you mean 'top_k'?",
    ]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'{"a": 1, "a": 2}', "the key 'a' appears twice"),
        (b"\xff{}", "expected UTF-8, found byte 0xff at byte 0"),
        (b"", "expected one JSON value"),
        (b"{} {}", "expected one JSON value"),
        (b"[" * 100_000, "expected one JSON value"),
        (b"1" * 10_000, "expected one JSON value"),
    ],
)
def test_what_is_no_json_value_is_said_once(raw, expected):
    place = Place(file="f", line=1, path="$", mistakes=[])
    parse_json(place, raw)
    assert len(place.mistakes) == 1
    assert expected in place.mistakes[0]


def test_a_long_list_of_mistakes_is_counted():
    with pytest.raises(CorpusError, match="70 mistakes") as caught:
        raise_mistakes("corpus x", [f"line {number}" for number in range(70)])
    assert str(caught.value).endswith("... and 20 more")
    raise_mistakes("corpus x", [])


def test_negative_zero_is_stored_as_zero():
    request = request_from_json(request_value(temperature=-0.0))
    assert math.copysign(1.0, request.sampling.temperature) == 1.0


def test_from_json_refuses_mistakes():
    with pytest.raises(CorpusError, match="logprobs"):
        request_from_json(request_value(logprobs=99))


token = st.integers(0, VOCAB_SIZE - 1)
number = st.floats(allow_nan=False, allow_infinity=False, width=64).map(lambda value: value + 0.0)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
samplings = st.builds(
    Sampling,
    temperature=st.floats(0, 10).map(abs),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 100),
    min_p=st.floats(0, 1).map(abs),
    repetition_penalty=st.floats(0, 10, exclude_min=True),
    frequency_penalty=number,
    presence_penalty=number,
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.integers(100, 200),
    min_tokens=st.integers(0, 100),
    ignore_eos=st.booleans(),
    stop=st.lists(texts, max_size=3).map(tuple),
    stop_token_ids=st.lists(token, max_size=3).map(tuple),
    logit_bias=st.dictionaries(token, number, max_size=3).map(lambda biases: tuple(sorted(biases.items()))),
    logprobs=st.integers(0, 20),
    n=st.integers(1, 4),
)
messages = st.lists(
    st.builds(Message, role=st.sampled_from(["system", "user", "assistant", "tool"]), content=texts), min_size=1
).map(tuple)
prompts = st.one_of(st.tuples(texts, st.none()), st.tuples(st.none(), messages), st.just((None, None)))
requests = st.builds(
    lambda prompt, **fields: Request(text=prompt[0], messages=prompt[1], **fields),
    prompt=prompts,
    id=st.from_regex(r"[a-zA-Z0-9._:-]{1,30}", fullmatch=True),
    prompt_token_ids=st.lists(token, min_size=1, max_size=20).map(tuple),
    sampling=samplings,
    grammar=st.none() | st.builds(Grammar, kind=st.sampled_from(["json_schema", "regex", "ebnf"]), text=texts),
    images=st.lists(st.builds(Image, sha256=st.just("0f" * 32), media_type=texts), max_size=2).map(tuple),
)


@settings(max_examples=150, deadline=None)
@given(request=requests)
def test_a_request_survives_writing_and_reading(request):
    line = request_line(request)
    assert line.count(b"\n") == 1
    place = Place(file="f", line=1, path="$", mistakes=[])
    again = read_request(place, parse_json(place, line), vocab_size=VOCAB_SIZE)
    assert place.mistakes == []
    assert again == request
    assert request_from_json(json.loads(json.dumps(request_json(request)))) == request
