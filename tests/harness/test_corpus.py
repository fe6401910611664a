"""Loading, verifying, views and subsets of corpora."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from pathlib import Path

import pytest
from corpus_making import manifest_value, request_value, write_corpus, write_lines, write_raw
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.corpus import check_fits, load_corpus, shipped_names, take, with_requests
from harness.corpus.json_lines import request_from_json, request_json
from harness.errors import CorpusError


def values() -> list[dict[str, object]]:
    return [request_value("a"), request_value("b", temperature=0.7, seed=7), request_value("c")]


def message_of(folder: Path) -> str:
    with pytest.raises(CorpusError) as caught:
        load_corpus(str(folder))
    return str(caught.value)


def test_loads_what_was_written(tmp_path):
    corpus = load_corpus(str(write_corpus(tmp_path / "c", values())))
    assert [request_json(request) for request in corpus.requests] == [
        request_json(request_from_json(value)) for value in values()
    ]
    assert (corpus.name, corpus.prompt_tokens, corpus.longest_prompt) == ("hand-made", 9, 3)
    assert corpus.tokenizer_digest == "ab" * 32
    assert corpus.origin == f"path {tmp_path / 'c'}"


def test_the_digest_does_not_depend_on_formatting(tmp_path):
    plain = load_corpus(str(write_corpus(tmp_path / "plain", values())))
    spaced = "".join(
        json.dumps(dict(reversed(value.items())), separators=(" ,  ", " : "), ensure_ascii=True) + "\n"
        for value in values()
    ).encode()
    folder = write_raw(tmp_path / "spaced", spaced, manifest_value(values(), spaced))
    assert load_corpus(str(folder)).digest == plain.digest


CHANGES = [
    ("id", "other"),
    ("prompt_token_ids", [1, 2, 4]),
    ("text", "another text"),
    ("grammar", {"kind": "regex", "text": "a+"}),
    ("images", [{"sha256": "0" * 64, "media_type": "image/png"}]),
]
SAMPLING_CHANGES = [
    ("temperature", 0.5),
    ("top_p", 0.5),
    ("top_k", 5),
    ("min_p", 0.1),
    ("repetition_penalty", 1.1),
    ("frequency_penalty", 0.1),
    ("presence_penalty", 0.1),
    ("seed", 8),
    ("max_tokens", 9),
    ("min_tokens", 1),
    ("ignore_eos", False),
    ("stop", ["x"]),
    ("stop_token_ids", [5]),
    ("logit_bias", [[5, 0.5]]),
    ("logprobs", 6),
    ("n", 2),
]


@pytest.mark.parametrize(("key", "value"), [*CHANGES, *SAMPLING_CHANGES], ids=lambda item: str(item)[:12])
def test_the_digest_depends_on_every_field(tmp_path, key, value):
    corpus = load_corpus(str(write_corpus(tmp_path / "c", [request_value(seed=7)])))
    changed = request_value(seed=7)
    target = changed["sampling"] if key in dict(SAMPLING_CHANGES) else changed
    target[key] = value
    assert with_requests(corpus, [request_from_json(changed)]).digest != corpus.digest


def test_every_field_of_a_request_is_among_the_digest_tests():
    request = request_from_json(request_value())
    named = {key for key, _ in [*CHANGES, *SAMPLING_CHANGES]} | {"messages", "sampling"}
    assert {field.name for part in (request, request.sampling) for field in dataclasses.fields(part)} == named


def test_the_digest_depends_on_order_and_tokenizer(tmp_path):
    corpus = load_corpus(str(write_corpus(tmp_path / "c", values())))
    tokenizer = dataclasses.replace(corpus.tokenizer, digest="cd" * 32)
    other = with_requests(dataclasses.replace(corpus, tokenizer=tokenizer), corpus.requests)
    assert len({corpus.digest, with_requests(corpus, corpus.requests[::-1]).digest, other.digest}) == 3


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_one_flipped_bit_anywhere_is_found(data):
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_corpus(Path(scratch) / "c", values())
        raw = bytearray((folder / "requests.jsonl").read_bytes())
        position = data.draw(st.integers(0, len(raw) - 1))
        raw[position] ^= 1 << data.draw(st.integers(0, 7))
        (folder / "requests.jsonl").write_bytes(bytes(raw))
        message = message_of(folder)
        assert "requests.jsonl : its bytes do not match the manifest: expected SHA-256" in message
        assert hashlib.sha256(bytes(raw)).hexdigest() in message


def test_a_digest_that_is_not_that_of_the_content_is_an_error(tmp_path):
    message = message_of(write_corpus(tmp_path / "c", values(), digest="0" * 64, prompt_tokens=10))
    assert "manifest.json $.digest: the requests give" in message
    assert "manifest.json $.prompt_tokens: the requests give 9, the manifest says 10" in message


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        (0, "schema 0 is older than 1"),
        (2, "schema 2 is newer than 1, which this samebits reads; upgrade samebits"),
        ("1", 'expected the integer 1, found "1" (str)'),
        (True, "expected the integer 1, found true (bool)"),
    ],
)
def test_another_schema_is_named(tmp_path, schema, sentence):
    assert sentence in message_of(write_corpus(tmp_path / "c", values(), schema=schema))


def test_a_missing_schema_has_its_own_sentence(tmp_path):
    raw = b"{}\n"
    assert "the schema number is missing" in message_of(write_raw(tmp_path / "c", raw, {"name": "x"}))


def test_all_mistakes_of_a_manifest_are_listed(tmp_path):
    folder = write_corpus(
        tmp_path / "c",
        values(),
        requests="3",
        digest="abc",
        arbitrary_ids=["everything"],
        files={"../secret": "0" * 64},
        extra=1,
    )
    message = message_of(folder)
    for part in (
        "$.extra: unknown key",
        '$.requests: expected an integer of at least 1, found "3" (str)',
        '$.digest: expected a SHA-256 of 64 lower-case hexadecimal digits, found "abc" (str)',
        "$.arbitrary_ids[0]: expected one of 'prompt_token_ids', 'logit_bias', 'stop_token_ids'",
        "$.files.requests.jsonl: required key is missing",
        "$.files.../secret: a file's name must stay inside the corpus folder",
    ):
        assert part in message


def test_all_mistakes_of_a_file_are_listed_with_their_lines(tmp_path):
    lines = [
        request_value("a", temperature="8"),
        request_value("b"),
        request_value("b", top_k=-1, seed=1.5),
        "{broken",
    ]
    message = message_of(write_lines(tmp_path / "c", lines))
    for part in (
        'requests.jsonl:1 $.sampling.temperature: expected a finite number of at least 0, found "8" (str)',
        "requests.jsonl:3 $.sampling.top_k: expected an integer of at least 0",
        "requests.jsonl:3 $.sampling.seed: expected an integer",
        "requests.jsonl:3 $.id: the id 'b' is already used in line 2",
        "requests.jsonl:4 $: expected one JSON value",
    ):
        assert part in message
    assert "5 mistakes" in message


def test_an_empty_corpus_is_an_error(tmp_path):
    assert "the corpus is empty" in message_of(write_lines(tmp_path / "c", []))


def test_a_listed_file_that_is_absent_is_named(tmp_path):
    folder = write_corpus(tmp_path / "c", values())
    (folder / "requests.jsonl").unlink()
    assert "requests.jsonl : the manifest lists this file, but it cannot be read" in message_of(folder)


def test_an_image_that_the_manifest_does_not_list_is_an_error(tmp_path):
    value = request_value()
    value["images"] = [{"sha256": "0" * 64, "media_type": "image/png"}]
    message = message_of(write_corpus(tmp_path / "c", [value]))
    assert f"images/{'0' * 64} of request 'a' is not listed" in message


def test_a_folder_without_manifest_says_how_to_make_one(tmp_path):
    assert "samebits corpus freeze" in message_of(tmp_path)


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(CorpusError, match="did you mean 'quick'"):
        load_corpus("quik")


def test_an_existing_path_wins_over_a_shipped_name(tmp_path, monkeypatch):
    shipped = load_corpus("smoke")
    write_corpus(tmp_path / "smoke", values())
    monkeypatch.chdir(tmp_path)
    assert shipped.origin == "shipped corpus smoke"
    assert load_corpus("smoke").origin == "path smoke; it wins over the shipped corpus of that name"
    assert load_corpus("smoke").name == "hand-made"


def test_a_path_with_a_colon_is_a_path(tmp_path):
    assert load_corpus(str(write_corpus(tmp_path / "c:greedy", values()))).name == "hand-made"


def test_the_greedy_view_is_the_same_requests_without_draws(tmp_path):
    folder = write_corpus(tmp_path / "c", values())
    corpus, view = load_corpus(str(folder)), load_corpus(f"{folder}:greedy")
    assert [request.prompt_token_ids for request in view.requests] == [
        request.prompt_token_ids for request in corpus.requests
    ]
    assert {(request.sampling.temperature, request.sampling.seed) for request in view.requests} == {(0.0, None)}
    assert view.name == "hand-made:greedy"
    assert view.digest != corpus.digest


def test_the_seeded_view_draws_everywhere_and_keeps_what_drew(tmp_path):
    folder = write_corpus(tmp_path / "c", values())
    corpus, view = load_corpus(str(folder)), load_corpus(f"{folder}:seeded")
    assert view.requests[1] == corpus.requests[1]
    drawn = [request.sampling for request in view.requests]
    assert [sampling.temperature for sampling in drawn] == [0.8, 0.7, 0.8]
    assert len({sampling.seed for sampling in drawn}) == 3
    assert load_corpus(f"{folder}:seeded").digest == view.digest


@pytest.mark.parametrize("view", ["gredy", ""])
def test_an_unknown_view_is_an_error(view):
    with pytest.raises(CorpusError, match="unknown view"):
        load_corpus(f"smoke:{view}")


def test_take_by_count_and_by_id(tmp_path):
    corpus = load_corpus(str(write_corpus(tmp_path / "c", values())))
    assert [request.id for request in take(corpus, 2).requests] == ["a", "b"]
    assert [request.id for request in take(corpus, ["c", "a"]).requests] == ["a", "c"]
    assert take(corpus, 3).digest == corpus.digest != take(corpus, 2).digest


@pytest.mark.parametrize("wanted", [0, 4, ["a", "x"], []])
def test_take_refuses_what_is_not_there(tmp_path, wanted):
    corpus = load_corpus(str(write_corpus(tmp_path / "c", values())))
    with pytest.raises(CorpusError, match="corpus hand-made"):
        take(corpus, wanted)


@pytest.mark.parametrize(("length", "weak"), [(199, True), (200, False)])
def test_short_prompts_make_a_weak_corpus(tmp_path, length, weak):
    value = request_value()
    value["prompt_token_ids"] = [1] * length
    corpus = load_corpus(str(write_corpus(tmp_path / "c", [request_value("short"), value])))
    assert (corpus.weak is not None) == weak
    assert not weak or "its longest prompt has 199 tokens, under 200" in str(corpus.weak)


def test_check_fits_names_every_request_that_does_not(tmp_path):
    corpus = load_corpus(str(write_corpus(tmp_path / "c", [request_value("a"), request_value("b", max_tokens=9)])))
    check_fits(corpus, 4, 12)
    with pytest.raises(CorpusError) as caught:
        check_fits(corpus, 3, 11)
    message = str(caught.value)
    assert "request 'b': 3 prompt tokens and up to 9 new ones need 12 positions, the model has 11" in message
    assert "request 'a': 1 token ids are outside the model's vocabulary of 3, the first is 3" in message
    assert "request 'a': 3 prompt tokens" not in message


def test_shipped_names_are_sorted():
    names = shipped_names()  # which they are, test_corpus_shipped says
    assert list(names) == sorted({*names, "quick", "smoke"})
