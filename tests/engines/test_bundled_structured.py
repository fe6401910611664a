"""The shipped `structured` corpus on the tiny model: every constrained answer is valid, judged by other means."""

import json
import re

import pytest

from engines.bundled_adapter import BundledAdapter
from harness.claims import check_claims
from harness.corpus import load_corpus, retokenise
from harness.engine import Work
from harness.expected import expected_of, missing_from
from harness.schedules import build_schedule

ADAPTER = BundledAdapter()
TOKENIZER = ADAPTER.tokenizer("tiny")
END = 257
EBNF = {  # the corpus's two grammars as expressions of their own
    "sums": r"T(\+T){1,5}=[0-9]{1,3}".replace("T", r"([1-9][0-9]?|\(.+-.+\))"),
    "course": r"L(, then L)?".replace("L", "[NESW] for [1-9][0-9]? miles"),
}
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "null": type(None)}


def fits(value, schema):
    """Whether a JSON value is what a schema says, for the keywords that the corpus uses; any other is an error."""
    checks = {
        "type": lambda kind: type(value) is TYPES[kind],
        "enum": lambda values: value in values,
        "anyOf": lambda schemas: any(fits(value, one) for one in schemas),
        "pattern": lambda pattern: re.search(pattern, value) is not None,
        "minimum": lambda low: value >= low,
        "maximum": lambda high: value <= high,
        "minItems": lambda low: len(value) >= low,
        "maxItems": lambda high: len(value) <= high,
        "items": lambda inner: all(fits(item, inner) for item in value),
        "required": lambda names: set(names) <= set(value),
        "properties": lambda named: all(fits(value[name], named[name]) for name in set(value) & set(named)),
        "additionalProperties": lambda allowed: allowed or set(value) <= set(schema["properties"]),
    }
    return all(checks[keyword](argument) for keyword, argument in schema.items())


def is_valid(request, text):
    kind, source = request.grammar.kind, request.grammar.text
    if kind == "json_schema":
        return fits(json.loads(text), json.loads(source))
    return re.fullmatch(source if kind == "regex" else EBNF[request.id], text) is not None


@pytest.fixture(scope="module")
def corpus():
    return retokenise(load_corpus("structured"), TOKENIZER, name="tiny")


@pytest.fixture(scope="module")
def spoken(corpus):
    """(request, finish reason, ids) of every row, and the tables."""
    engine = ADAPTER.start("tiny", {"threads": 1})
    schedule = build_schedule("together", [one.id for one in corpus.requests])
    work = Work(requests=corpus.requests, schedule=schedule, replay="natural", golden={}, logits_digests=False)
    traces = engine.generate(work, lambda requests, tokens: None)
    assert check_claims(traces) == ()
    assert missing_from(traces, expected_of(corpus.requests, [one.id for one in corpus.requests])) == ()
    by_id, begin, rows = {one.id: one for one in corpus.requests}, 0, []
    for name, length, reason in zip(
        traces.requests.id, traces.requests.length, traces.requests.finish_reason, strict=True
    ):
        rows.append((by_id[name], reason, traces.positions.token[begin : begin + length].tolist()))
        begin += int(length)
    return rows, traces


def test_every_constrained_answer_is_complete_and_valid(spoken):
    rows, _ = spoken
    assert len(rows) == 13
    for request, reason, ids in rows:
        if request.grammar is None:
            assert reason == "length"
        elif request.sampling.stop:
            assert TOKENIZER.decode(ids).endswith("; ")
            assert re.fullmatch("[a-z]{3,8}( [a-z]{2,8}){1,3}; ", TOKENIZER.decode(ids)), "a beginning, up to the stop"
        else:
            assert (reason, ids[-1]) == ("stop", END)
            assert is_valid(request, TOKENIZER.decode(ids[:-1])), TOKENIZER.decode(ids)


def test_the_masks_were_needed(spoken):
    rows, traces = spoken
    for (request, _, ids), masked, steered in zip(rows, traces.requests.masked, traces.requests.steered, strict=True):
        assert masked == (len(ids) if request.grammar else 0)
        assert bool(steered > 0) is (request.grammar is not None)


@pytest.mark.parametrize(
    ("value", "good"),
    [({"a": 1}, True), ({"a": True}, False), ({"a": 1, "b": 2}, False), ({}, False), ({"a": 7}, False), ([], False)],
)
def test_the_validator_can_say_no(value, good):
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 6}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    assert fits(value, schema) is good
