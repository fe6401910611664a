"""Grammars over the tiny model: what may come next, what is refused and where, and that nothing else moves a mask."""

import dataclasses
import json
import re

import numpy as np
import pytest
import tokenizers
from engine_cases import evidence, greedy, kernels, options, request, run_all, scripted_engine

from engines.bundled.arithmetic import open_arithmetic
from engines.bundled.draft import open_drafter
from engines.bundled.engine import Engine
from engines.bundled.errors import ComputeError, NotSupported, RequestError
from engines.bundled.fast import open_fast_path
from engines.bundled.grammar import Grammars
from engines.bundled.models.tiny import TinySource
from engines.bundled.request import Grammar
from engines.bundled.tokenizer import FileTokenizer

MODEL, TOKENIZER = TinySource().model(), TinySource().tokenizer()
END = 257
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
        "size": {"enum": ["small", "large"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "size", "count"],
    "additionalProperties": False,
}
JSON = Grammar(kind="json_schema", text=json.dumps(SCHEMA))
DATE = Grammar(kind="regex", text=r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]")
SUM = Grammar(kind="ebnf", text='start: number ("+" number)~1..3\nnumber: /[1-9][0-9]?/')
GBNF = Grammar(kind="ebnf", text='root ::= word " " word\nword ::= "tick" | "tock"')
LONG = greedy(ignore_eos=False, max_tokens=64)
SEEDED = dataclasses.replace(LONG, temperature=0.9, seed=11, top_p=0.9)
PROMPT = tuple(range(40, 70))


def is_sum(text):
    return re.fullmatch(r"[1-9][0-9]?(\+[1-9][0-9]?){1,3}", text) is not None


def is_record(text):
    value = json.loads(text)
    return (
        list(value) == ["name", "size", "count"]
        and re.fullmatch("[a-z]{1,6}", value["name"]) is not None
        and value["size"] in ("small", "large")
        and type(value["count"]) is int
        and 0 <= value["count"] <= 99
    )


VALID = {
    JSON: is_record,
    DATE: lambda text: re.fullmatch(DATE.text, text) is not None,
    SUM: is_sum,
    GBNF: lambda text: text in {f"{a} {b}" for a in ("tick", "tock") for b in ("tick", "tock")},
}
MIXED = [
    request("json", PROMPT, LONG, grammar=JSON),
    request("plain", PROMPT[5:], dataclasses.replace(SEEDED, ignore_eos=True, max_tokens=20)),
    request("date", PROMPT[:9], SEEDED, grammar=DATE),
    request("sum", PROMPT[3:20], dataclasses.replace(SEEDED, seed=4), grammar=SUM),
    request("sum-again", PROMPT[3:20], dataclasses.replace(SEEDED, seed=5), grammar=SUM, sample=1),
    request("tick", PROMPT[::2], LONG, grammar=GBNF),
]


def open_engine(**changes):
    config = options(**{"num_pages": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64, **changes})
    grammars = Grammars(TOKENIZER, MODEL.config.vocab_size, MODEL.config.eos_token_ids)
    arithmetic = open_arithmetic(MODEL, config)
    return Engine(
        MODEL.config,
        config,
        arithmetic,
        kernels(),
        TOKENIZER.decode,
        model_digest="m",
        drafter=open_drafter(MODEL, config, kernels()),
        fast=open_fast_path(MODEL, config, kernels(), arithmetic),
        grammars=grammars,
    )


def output(sequence):
    return tuple(sequence.tokens[len(sequence.request.prompt) :])


def text(sequence):
    """The output without the end of sequence that must close it."""
    assert output(sequence)[-1] == END
    return TOKENIZER.decode(output(sequence)[:-1])


@pytest.fixture(scope="module")
def alone():
    """What each request gets by itself."""
    return {one.id: run_all(open_engine(), [one])[0] for one in MIXED}


def test_every_output_is_what_its_grammar_says(alone):
    for one in MIXED:
        sequence = alone[one.id]
        if one.grammar is None:
            assert (sequence.masked, sequence.steered) == (0, 0)
            continue
        assert VALID[one.grammar](text(sequence)), text(sequence)
        assert sequence.finish_reason == "stop"
        assert sequence.masked == sequence.generated
        assert 0 < sequence.steered <= sequence.masked


def test_a_random_model_would_not_write_this_by_itself():
    free = run_all(open_engine(), [dataclasses.replace(one, grammar=None) for one in MIXED if one.grammar])
    for one, sequence in zip([one for one in MIXED if one.grammar], free, strict=True):
        with pytest.raises((AssertionError, ValueError)):
            assert VALID[one.grammar](TOKENIZER.decode(output(sequence)))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_num_seqs": 3, "policy": "shortest"},
        {"num_pages": 24, "page_size": 4},
        {"async_scheduling": True},
        {"prefix_cache": True, "page_size": 4},
        {"draft": "lookup"},
        {"draft": "model", "draft_policy": "variable"},
        {"rollback": "all"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())) or "together",
)
def test_features_move_no_bit_of_a_constrained_request(changes, alone):
    together = run_all(open_engine(**changes), MIXED)
    for sequence in together:
        assert evidence(sequence) == evidence(alone[sequence.request.id])
        assert (sequence.masked, sequence.steered) == (
            alone[sequence.request.id].masked,
            alone[sequence.request.id].steered,
        )
    if "num_pages" in changes:
        assert any(sequence.preemptions for sequence in together if sequence.constraint)
    if "draft" in changes or "rollback" in changes:
        assert any(sequence.drafted > sequence.accepted for sequence in together if sequence.constraint)


def test_a_proposal_the_grammar_forbids_is_thrown_away(alone):
    engine = open_engine()
    sequence = engine.submit(MIXED[0])
    while engine.has_work:
        if sequence.remaining == 1 and not sequence.drafts and sequence.most_drafts >= 3:
            right = output(alone["json"])[sequence.generated : sequence.generated + 2]
            sequence.drafts = [*right, 33, 34]  # "!" is never right in this schema
        engine.step()
    assert evidence(sequence) == evidence(alone["json"])
    assert sequence.accepted > 0
    assert sequence.rollbacks > 0


def test_everything_is_recomputed_after_a_step_that_broke(alone):
    engine = open_engine()
    sequences = [engine.submit(one) for one in MIXED]
    for step in range(200):
        if not engine.has_work:
            break
        engine.step()
        if step in (1, 4):
            engine.recover()
    assert [evidence(one) for one in sequences] == [evidence(alone[one.request.id]) for one in sequences]


def test_reported_logprobs_are_raw(alone):
    plain = run_all(open_engine(), [dataclasses.replace(MIXED[0], grammar=None)])[0].positions[0]
    position = alone["json"].positions[0]
    assert plain.topk_logprobs.tobytes() == position.topk_logprobs.tobytes()
    assert position.logprob < position.topk_logprobs.min()  # "{" was never among the best


def test_masks_come_after_penalties_and_bias():
    engine = open_engine()
    sampling = dataclasses.replace(LONG, logit_bias=((ord("t"), -50.0), (ord("o"), 90.0), (ord("i"), -90.0)))
    (sequence,) = run_all(engine, [request("a", PROMPT, sampling, grammar=GBNF)])
    assert text(sequence) == "tock tock"


def test_max_tokens_cuts_a_grammar_short():
    (sequence,) = run_all(open_engine(), [request("a", PROMPT, greedy(ignore_eos=False, max_tokens=3), grammar=DATE)])
    assert sequence.finish_reason == "length"
    assert re.fullmatch("(19|20)[0-9]", TOKENIZER.decode(output(sequence)))


# Forced paths


@pytest.mark.parametrize("scoring", ["decode", "prefill"])
def test_a_forced_path_of_the_same_grammar_shows_the_samplers_own_picks(scoring, alone):
    forced = [dataclasses.replace(one, forced=output(alone[one.id])) for one in MIXED]
    for sequence in run_all(open_engine(scoring=scoring), forced):
        assert evidence(sequence) == evidence(alone[sequence.request.id])
        assert sequence.steered == alone[sequence.request.id].steered


@pytest.mark.parametrize(
    ("path", "place"),
    [
        (b"20x", r"forced token 2 is 120 \('x'\)"),
        (b"2024-01-31a", r"forced token 10 is 97 \('a'\)"),
        ((50, END), rf"forced token 1 is {END} \('<\|end\|>'\)"),
    ],
)
def test_a_forced_path_outside_the_grammar_is_refused(path, place):
    with pytest.raises(RequestError, match=rf"request 'a': {place}, which its grammar \(regex\) forbids there"):
        open_engine().submit(request("a", PROMPT, LONG, grammar=DATE, forced=tuple(path)))


# Refusals


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("regex", "[0-9]+(ab", r"character 7 of the expression '\[0-9\]\+\(ab': unclosed group"),
        ("regex", "a(?=b)", r"character 2 of the expression 'a\(\?=b\)': look-around"),
        ("ebnf", 'start: a b\nb: "x"', r"line 1, column 8: unknown name: .a."),
        ("ebnf", 'start: "x"\nb: %', r"line 2, column \d+: "),
        ("ebnf", 'root ::= "a" | nope', "line 1, column 16: Rule 'nope' not found"),
        ("ebnf", 'root ::= "x" no-pe?\nno-pe ::= "x-2" | (\n  x-2)', "line 3, column 3: Rule 'x-2' not found"),
        ("ebnf", 'root ::= "a"\n  ("b"', "Expected name at line 2"),
        ("json_schema", '{"type": "objec"}', r"at \$: Invalid type: objec"),
        ("json_schema", '{"properties": {"a": {"items": [{"type": "nil"}]}}}', r"at \$\.properties\.a\.items"),
        ("json_schema", '{"properties": {"a": {"type": "string", "pattern": "("}}}', r"at \$\.properties\.a: char.* 1"),
        ("json_schema", '{"type": "string", "not": {}}', r"at \$: Unimplemented keys: \[.not.\]"),
        ("json_schema", '{"a": ', "line 1 column 6"),
        ("json_schema", "[]", "object"),
    ],
)  # fmt: skip
def test_a_bad_grammar_is_refused_with_its_place(kind, source, message):
    with pytest.raises(RequestError, match=rf"request 'a': grammar \({kind}\): .*{message}") as caught:
        open_engine().submit(request("a", PROMPT, LONG, grammar=Grammar(kind=kind, text=source)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changes", [{"ignore_eos": True}, {"min_tokens": 2}])
def test_fields_that_contradict_a_grammar_are_refused(changes):
    sampling = dataclasses.replace(LONG, **changes)
    with pytest.raises(RequestError, match=rf"request 'a': {next(iter(changes))}: expected \S+ beside a grammar"):
        open_engine().submit(request("a", PROMPT, sampling, grammar=DATE))


def test_an_engine_without_a_tokenizer_refuses_grammars():
    with pytest.raises(RequestError, match="request 'a': has a grammar, and this engine was started without"):
        scripted_engine().submit(request("a", (1, 2), LONG, grammar=DATE))


def test_a_grammar_that_outgrows_the_parser_ends_its_own_request(alone):
    engine = open_engine()
    heavy = Grammar(kind="regex", text="(x|[a-z]*y){1,400}[a-z]*z(x|y|[a-w]*k){1,300}")
    try:
        run_all(engine, [request("heavy", PROMPT, SEEDED, grammar=heavy)])
    except (ComputeError, RequestError) as error:
        assert "request 'heavy'" in str(error)  # noqa: PT017 - within limits it may also pass
        engine.recover()
        engine.abort("heavy")
    assert evidence(run_all(engine, [MIXED[2]])[0]) == evidence(alone["date"])


# The fault


def test_shifted_masks_change_neighbours_and_nobody_alone(alone):
    faulty = run_all(open_engine(fault="shifted-masks"), MIXED)
    assert any(evidence(one) != evidence(alone[one.request.id]) for one in faulty)
    assert evidence(faulty[1]) == evidence(alone["plain"])
    assert all(one.masked == one.generated for one in faulty if one.constraint)
    for one in MIXED:
        assert evidence(run_all(open_engine(fault="shifted-masks"), [one])[0]) == evidence(alone[one.id])


def test_a_token_against_the_grammar_is_an_error_where_no_fault_is_set(monkeypatch):
    monkeypatch.setattr("engines.bundled.engine.pick", lambda *arguments: 33)
    engine = open_engine()
    engine.submit(MIXED[2])
    with pytest.raises(ComputeError, match="request 'date', generated position 0: token 33 was taken against the"):
        engine.step()


# Vocabularies


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    """A byte-level tokenizer whose tokens span borders of grammar symbols."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, '{"', '":', "12", "true"]
    merges = [("{", '"'), ('"', ":"), ("1", "2"), ("t", "r"), ("u", "e"), ("tr", "ue")]
    vocabulary = {piece: index for index, piece in enumerate([*pieces, "tr", "ue"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>", "<turn>"])
    folder = tmp_path_factory.mktemp("merged")
    tokenizer.save(str(folder / "tokenizer.json"))
    return FileTokenizer(folder)


def test_tokens_of_several_characters_and_all_ends(merged):
    end, turn = merged.encode("<end><turn>")
    grammars = Grammars(merged, merged.vocab_size + 6, (turn, end))
    schema = Grammar(kind="json_schema", text='{"type": "object", "properties": {"a": {"type": "boolean"}}, '
                     '"required": ["a"], "additionalProperties": false}')  # fmt: skip
    constraint = grammars.start(request("a", (1,), LONG, grammar=schema))

    def allowed():
        assert constraint.allowed().shape == (merged.vocab_size + 6,)
        return {merged.decode([int(token)]) for token in np.flatnonzero(constraint.allowed())}

    assert allowed() <= {"{", '{"'}  # where only one text can follow, the parser insists on the longest token
    for token in merged.encode('{"a":'):
        assert constraint.advance(token)
    assert allowed() == {"t", "tr", "true", "f"}
    assert not constraint.advance(end)
    for token in merged.encode("true}"):
        assert not constraint.advance(end)
        assert constraint.advance(token)
    assert allowed() == {"<end>", "<turn>"}
    assert constraint.advance(turn)


def test_a_vocabulary_the_parser_cannot_read_is_refused_by_name(merged):
    class Unreadable:
        def definition(self):
            return "{}"

    with pytest.raises(NotSupported, match="grammars over this tokenizer: "):
        Grammars(Unreadable(), 10, (1,)).start(request("a", (1,), LONG, grammar=DATE))


def test_a_grammar_is_compiled_once_per_content(monkeypatch):
    compiled = []
    grammars = Grammars(TOKENIZER, 512, (END,))
    monkeypatch.setattr("engines.bundled.grammar._match", spy(compiled))
    for text in ("a+", "b+", "a+"):
        grammars.start(request("a", (1,), LONG, grammar=Grammar(kind="regex", text=text)))
    assert compiled == ["a+", "b+"]


def spy(seen):
    from engines.bundled.grammar import _match

    def match(vocabulary, grammar):
        seen.append(grammar.text)
        return _match(vocabulary, grammar)

    return match
