"""Structured outputs over HTTP: valid under both names, the same in company, refused with the field and the place."""

import json
import re
import threading

import pytest
from serving import ask, chat, complete, joined, metrics, running, streaming

SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["size", "count"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
DATE = "(19|20)[0-9]{2}-(0[1-9]|1[0-2])"
LARK = 'start: "tick" (" " WORD)~1..2\nWORD: /t[io]ck/'
DRAW = {"temperature": 0.9, "seed": 3, "max_tokens": 60, "return_token_ids": True}


@pytest.fixture(scope="module")
def port():
    with running() as server:
        yield server.port


def is_thing(text):
    value = json.loads(text)
    return list(value) == ["size", "count"] and value["size"] in ("small", "large") and 0 <= value["count"] <= 99


@pytest.mark.parametrize(
    ("fields", "valid"),
    [
        ({"response_format": FORMAT}, is_thing),
        ({"structured_outputs": {"json": SCHEMA}}, is_thing),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, is_thing),
        ({"structured_outputs": {"regex": DATE}}, lambda text: re.fullmatch(DATE, text)),
        ({"structured_outputs": {"choice": ["yes", 'a "no"', "né"]}}, lambda text: text in ("yes", 'a "no"', "né")),
        ({"structured_outputs": {"grammar": LARK}}, lambda text: re.fullmatch("tick( t[io]ck){1,2}", text)),
        ({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, lambda text: text in ("a", "b")),
    ],
)
def test_what_comes_back_is_what_was_asked_for(port, fields, valid):
    for answer, text in ((complete(port, **fields, **DRAW), "text"), (chat(port, **fields, **DRAW), "message")):
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "stop"
        spoken = choice[text] if text == "text" else choice["message"]["content"]
        assert valid(spoken), spoken


@pytest.mark.parametrize("fields", [{"response_format": {"type": "json_object"}},
                                    {"structured_outputs": {"json_object": True}}])  # fmt: skip
def test_any_object_may_be_asked_for(port, fields):
    (choice,) = complete(port, **fields, **{**DRAW, "max_tokens": 12})["choices"]
    assert choice["text"].startswith("{")


def test_plain_text_and_null_constrain_nothing(port):
    plain = complete(port, **DRAW)["choices"]
    assert complete(port, response_format={"type": "text"}, structured_outputs=None, **DRAW)["choices"] == plain


def test_streams_company_and_samples_change_nothing(port):
    fields = {"response_format": FORMAT, "logprobs": 4, **DRAW}
    alone = complete(port, "beside", **fields)["choices"][0]
    whole = complete(port, ["else", "beside"], n=2, **fields)["choices"]
    assert [choice["token_ids"] for choice in whole[2:3]] == [alone["token_ids"]]
    assert whole[2]["logprobs"] == alone["logprobs"]
    assert all(is_thing(choice["text"]) for choice in whole)
    assert len({choice["text"] for choice in whole}) > 1
    found = []
    others = [threading.Thread(target=lambda: found.append(complete(port, "beside", **fields)["choices"][0]))
              for _ in range(3)]  # fmt: skip
    for thread in others:
        thread.start()
    body = {"model": "tiny", "prompt": "beside", **fields}
    with streaming(port, "/v1/completions", body) as stream:
        pieces = [event["choices"][0] for event in stream]
    for thread in others:
        thread.join()
    assert joined(piece["token_ids"] for piece in pieces) == alone["token_ids"]
    assert "".join(piece["text"] for piece in pieces) == alone["text"]
    assert found == [alone] * 3


def outputs(**fields):
    return {"structured_outputs": fields}


def schema(**named):
    return {"response_format": {"type": "json_schema", "json_schema": named}}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (outputs(regex="a(b"), "structured_outputs.regex", "character 2 of the expression 'a(b': unclosed"),
        (outputs(grammar="start: a"), "structured_outputs.grammar", "line 1, column 8: unknown name"),
        (outputs(grammar='root ::= "a" nope'), "structured_outputs.grammar", "'nope' not found"),
        (outputs(json='{"type": '), "structured_outputs.json", "line 1 column 9"),
        (outputs(json={"items": {"type": "nil"}}), "structured_outputs.json", "at $.items: Invalid"),
        (outputs(json=3), "structured_outputs.json", "expected a JSON schema, as an object or as its text"),
        (outputs(regex="a", choice=["b"]), "structured_outputs.choice", "expected one constraint"),
        ({**outputs(regex="a"), "response_format": FORMAT}, "structured_outputs.regex", "one constraint"),
        (outputs(), "structured_outputs", "one of json, regex, choice, grammar and json_object"),
        (outputs(choice=[]), "structured_outputs.choice", "at least 1 item"),
        (outputs(rexeg="a"), "structured_outputs.rexeg", "no such field"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "a name and a schema"),
        ({"response_format": {**FORMAT, "type": "text"}}, "response_format.type", "'json_schema' where a schema"),
        (schema(schema={}), "response_format.json_schema.name", "is required"),
        (schema(name="x", schema={"not": {}}), "response_format.json_schema.schema", "at $: Unimplemented keys"),
        ({"guided_regex": "a+"}, "guided_regex", "it is structured_outputs.regex now"),
        ({"response_format": FORMAT, "ignore_eos": True}, "ignore_eos", "false beside response_format.json_schema"),
        ({"response_format": FORMAT, "min_tokens": 3}, "min_tokens", "0 beside response_format.json_schema"),
    ],
)
def test_a_bad_constraint_is_refused_by_field_and_place(port, fields, param, message):
    body = {"model": "tiny", "temperature": 0}
    for path, prompt in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        answer = ask(port, path, {**body, **prompt, **fields})
        assert (answer.status, answer.error["param"]) == (400, param), answer.raw
        assert answer.error["type"] == "invalid_request_error"
        assert message in answer.error["message"]
    assert metrics(port)["samebits_requests_running"] == 0


def test_a_derived_seed_hangs_on_the_grammar():
    with running(policy="derive") as server:
        seeds = [
            complete(server.port, temperature=1, max_tokens=2, **fields)["samebits"]["seeds"]
            for fields in ({}, {"structured_outputs": {"regex": "a+"}}, {"structured_outputs": {"regex": "b+"}})
        ]
    assert len({*map(tuple, seeds)}) == 3
