"""The corpora that come with samebits are what the documentation says, and can be made again from their sources."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest

from harness.corpus import SHIPPED, Corpus, load_corpus, shipped_names
from harness.corpus.freeze import Order, freeze
from harness.registry import adapter

NAMES = ("pressure", "quick", "ragged", "random", "smoke")  # mixed traffic
FEATURES = (  # each made for one matrix
    "brief", "census", "eval", "near-ties", "repeats", "samples", "shaped", "structured", "uneven", "window",
)  # fmt: skip
COMPONENTS = ("images",)  # not text: tests/engines/test_bundled_vision.py
THRESHOLDS = (16, 32, 64, 128, 192, 220, 256, 300, 512)


@pytest.fixture(scope="module")
def tokenizer():
    return adapter("bundled").tokenizer("smollm2")


def lengths(corpus: Corpus) -> list[int]:
    return [len(request.prompt_token_ids) for request in corpus.requests]


def test_all_corpora_are_looked_at():
    assert set(shipped_names()) == {*NAMES, *FEATURES, *COMPONENTS}


@pytest.mark.parametrize("name", [*NAMES, *FEATURES])
def test_freezing_the_source_again_gives_the_same_corpus(name, tokenizer, tmp_path):
    shipped = load_corpus(name)
    order = Order(
        source=SHIPPED / name / "source.jsonl",
        tokenizer=tokenizer,
        tokenizer_name=shipped.tokenizer.name,
        name=name,
        description=shipped.description,
        defaults={},
        arbitrary_ids=shipped.arbitrary_ids,
        keep_source=True,
    )
    again = freeze(order, tmp_path / name)
    assert again.corpus.digest == shipped.digest
    assert (again.named, again.seeds) == ((), ())  # ids and seeds stand in the source
    for file in ("manifest.json", "requests.jsonl", "source.jsonl"):
        assert (tmp_path / name / file).read_bytes() == (SHIPPED / name / file).read_bytes()


@pytest.mark.parametrize("name", ["quick", "ragged", "smoke"])
def test_text_and_ids_say_the_same(name, tokenizer):
    for request in load_corpus(name).requests:
        if request.text is not None:
            assert tokenizer.encode(request.text) == request.prompt_token_ids
            assert tokenizer.decode(request.prompt_token_ids) == request.text
            assert request.text == request.text.rstrip()
        else:
            assert request.messages is not None
            turns = [(message.role, message.content) for message in request.messages]
            assert tokenizer.encode_chat(turns) == request.prompt_token_ids


@pytest.mark.parametrize("name", NAMES)
def test_greedy_and_seeded_requests_are_mixed(name):
    requests = load_corpus(name).requests
    drawn = [request.sampling for request in requests if request.sampling.temperature > 0]
    assert len(requests) * 0.4 <= len(drawn) <= len(requests) * 0.6
    assert {0.7 <= sampling.temperature <= 1.0 for sampling in drawn} == {True}
    assert len({sampling.seed for sampling in drawn}) == len(drawn)
    assert {request.sampling.seed for request in requests if request.sampling.temperature == 0} == {None}
    assert {request.sampling.ignore_eos for request in requests} == {True}
    assert {request.sampling.stop for request in requests} == {()}


@pytest.mark.parametrize("name", NAMES)
def test_no_prompt_is_a_variation_of_another(name):
    requests = load_corpus(name).requests
    starts = [request.text[:12] if request.text else request.prompt_token_ids[:64] for request in requests]
    assert len(set(starts)) == len(requests)
    assert len({request.prompt_token_ids[-12:] for request in requests}) == len(requests)


def test_smoke():
    corpus = load_corpus("smoke")
    assert len(corpus.requests) == 8
    assert corpus.longest_prompt <= 40
    assert {request.sampling.max_tokens for request in corpus.requests} == {16}
    assert corpus.weak is not None


def test_quick():
    corpus = load_corpus("quick")
    assert len(corpus.requests) == 12
    assert corpus.prompt_tokens <= 1_700
    assert sorted(lengths(corpus))[-3:] == [220, 300, 512]
    assert {30 <= length <= 110 for length in sorted(lengths(corpus))[:-3]} == {True}
    assert {request.sampling.max_tokens for request in corpus.requests} == {24}
    assert min(request.sampling.logprobs for request in corpus.requests) >= 5
    assert corpus.weak is None


def test_the_first_four_of_quick_serve_as_controls():
    corpus = load_corpus("quick")
    first, drawn = lengths(corpus)[:4], [request.sampling.temperature > 0 for request in corpus.requests[:4]]
    assert sorted(first)[-2:] == [220, 300]
    assert sorted(draws for length, draws in zip(first, drawn, strict=True) if length < 220) == [False, True]
    assert lengths(corpus).index(512) >= 4


def test_quick_exercises_every_kind_of_sampling():
    samplings = [request.sampling for request in load_corpus("quick").requests]
    for field, off in (
        ("top_p", 1.0),
        ("top_k", 0),
        ("min_p", 0.0),
        ("repetition_penalty", 1.0),
        ("frequency_penalty", 0.0),
        ("presence_penalty", 0.0),
        ("logit_bias", ()),
        ("min_tokens", 0),
    ):
        assert {getattr(sampling, field) == off for sampling in samplings} == {True, False}, field


def test_ragged():
    corpus = load_corpus("ragged")
    assert len(corpus.requests) == 64
    assert set(lengths(corpus)) >= {value + step for value in THRESHOLDS for step in (-1, 0, 1)}
    assert sum(length > 1_000 for length in lengths(corpus)) == 1
    assert min(request.sampling.max_tokens for request in corpus.requests) >= 64
    assert Counter(request.sampling.temperature > 0 for request in corpus.requests) == {True: 32, False: 32}


def test_structured_holds_every_kind_greedy_and_seeded_beside_plain_requests():
    corpus = load_corpus("structured")
    kinds = {
        (request.grammar.kind if request.grammar else None, request.sampling.temperature > 0)
        for request in corpus.requests
    }
    assert kinds == {(kind, drawn) for kind in ("json_schema", "regex", "ebnf", None) for drawn in (True, False)}
    assert corpus.weak is None
    for request in corpus.requests:
        assert request.sampling.ignore_eos is (request.grammar is None), "a grammar ends by itself"
        assert request.sampling.logprobs == 5


def drawn(*parts: object) -> int:
    text = " ".join(str(part) for part in ("samebits random", *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def test_random_is_drawn_by_hash():
    corpus = load_corpus("random")
    assert len(corpus.requests) == 64
    assert lengths(corpus)[:6] == [24, 340, 60, 150, 33, 410]
    assert (min(lengths(corpus)), max(lengths(corpus))) == (5, 700)
    for number, request in enumerate(corpus.requests):
        ids = tuple(drawn("token", number, index) % 49_152 for index in range(len(request.prompt_token_ids)))
        assert (request.id, request.prompt_token_ids) == (f"ids-{number:02d}", ids)
        assert (request.text, request.messages, request.sampling.max_tokens) == (None, None, 32)
        assert request.sampling.seed in (None, drawn("seed", number))


def test_pressure_is_drawn_by_hash_and_needs_as_many_pages_in_every_vocabulary():
    corpus = load_corpus("pressure")
    assert lengths(corpus) == [220, 61, 140, 300, 45, 180, 97, 256, 120, 33, 210, 75]
    assert corpus.arbitrary_ids == ("prompt_token_ids",)
    for number, request in enumerate(corpus.requests):
        for index, token in enumerate(request.prompt_token_ids):
            text = f"samebits pressure token {number} {index}"
            assert token == int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 49_152
        assert (request.id, request.sampling.max_tokens) == (f"press-{number:02d}", 24)
