"""Freezing samebits' own line format: what is kept, what is filled in, and how the folder appears."""

from __future__ import annotations

import base64
import errno
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.bundled.tokenizer import ByteTokenizer
from harness.corpus import load_corpus
from harness.corpus.freeze import DEFAULTS, Frozen, Order, freeze
from harness.errors import CorpusError, ModelError, OutputError

TOKENIZER = ByteTokenizer(512)


def order_of(source: Path, **changes: object) -> Order:
    fields = {
        "source": source,
        "tokenizer": TOKENIZER,
        "tokenizer_name": "bytes",
        "name": "mine",
        "defaults": {},
        **changes,
    }
    return Order(**fields)


def write_source(folder: Path, lines: Sequence[object]) -> Path:
    source = folder / "traffic.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return source


def freeze_lines(folder: Path, lines: Sequence[object], **changes: object) -> Frozen:
    return freeze(order_of(write_source(folder, lines), **changes), folder / "frozen")


def mistakes_of(folder: Path, lines: Sequence[object]) -> str:
    with pytest.raises(CorpusError) as caught:
        freeze_lines(folder, lines)
    assert sorted(path.name for path in folder.iterdir()) == ["traffic.jsonl"]
    return str(caught.value)


def test_text_messages_and_ids_are_frozen(tmp_path):
    frozen = freeze_lines(
        tmp_path,
        [
            {"id": "t", "text": "hé"},
            {"id": "p", "prompt": "x"},
            {"id": "m", "messages": [{"role": "user", "content": "hi"}]},
            {"id": "i", "prompt_token_ids": [5, 6, 511]},
        ],
    )
    text, prompt, messages, ids = frozen.corpus.requests
    assert (text.text, text.prompt_token_ids) == ("hé", (0x68, 0xC3, 0xA9))
    assert (prompt.text, prompt.prompt_token_ids) == ("x", (0x78,))
    assert messages.prompt_token_ids == TOKENIZER.encode_chat([("user", "hi")])
    assert [(message.role, message.content) for message in messages.messages or ()] == [("user", "hi")]
    assert (ids.prompt_token_ids, ids.text, ids.messages) == ((5, 6, 511), None, None)


def test_a_line_keeps_its_sampling_and_defaults_fill_the_rest(tmp_path):
    frozen = freeze_lines(
        tmp_path,
        [
            {"text": "a", "temperature": 0.5, "seed": 3, "stop": "END", "logit_bias": {"7": -1}, "top_k": 4},
            {"text": "b"},
        ],
        defaults={"max_tokens": 9},
    )
    first, second = (request.sampling for request in frozen.corpus.requests)
    assert (first.temperature, first.seed, first.stop, first.logit_bias) == (0.5, 3, ("END",), ((7, -1.0),))
    assert (first.top_k, first.max_tokens) == (4, 9)
    assert (second.temperature, second.seed, second.top_k, second.logprobs) == (0.0, None, 0, 5)
    counts = {(field, value): count for field, value, count in frozen.defaulted}
    assert counts["max_tokens", "9"] == 2
    assert counts["temperature", "0.0"] == 1
    assert counts["top_k", "0"] == 1
    assert ("stop", "[]") in counts
    assert ("temperature", "0.5") not in counts
    assert ("top_k", "4") not in counts
    assert {field for field, _ in counts} == set(DEFAULTS) - {"seed"}


def test_defaults_that_are_asked_for_win_over_those_of_the_format(tmp_path):
    (request,) = freeze_lines(tmp_path, [{"text": "a"}], defaults={"temperature": 0.6}).corpus.requests
    assert request.sampling.temperature == 0.6
    assert request.sampling.seed is not None


def test_missing_ids_are_assigned_and_reported(tmp_path):
    frozen = freeze_lines(tmp_path, [{"text": "a"}, {"id": "x", "text": "b"}, {"text": "c"}])
    assert [request.id for request in frozen.corpus.requests] == ["r0001", "x", "r0003"]
    assert frozen.named == ("r0001", "r0003")


def test_missing_seeds_are_derived_from_id_and_content(tmp_path):
    lines = [
        {"id": "a", "text": "one", "temperature": 1},
        {"id": "b", "text": "one", "temperature": 1},
        {"id": "c", "text": "two", "temperature": 1, "seed": None},
        {"id": "d", "text": "two", "temperature": 1, "seed": 0},
    ]
    frozen = freeze_lines(tmp_path, lines)
    seeds = dict(frozen.seeds)
    assert sorted(seeds) == ["a", "b", "c"]
    assert len(set(seeds.values())) == 3
    assert [request.sampling.seed for request in frozen.corpus.requests] == [*seeds.values(), 0]
    assert seeds["a"] == 2160488857866611257  # SHA-256 of ["samebits-seed-1","a","one"], first 64 bits


def test_the_same_file_gives_the_same_digest(tmp_path):
    digests = set()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        digests.add(freeze_lines(tmp_path / name, [{"text": "a", "temperature": 1}]).corpus.digest)
    assert len(digests) == 1


def test_images_are_kept_by_digest(tmp_path):
    url = "data:image/png;base64," + base64.b64encode(b"pixels").decode()
    parts = [
        {"type": "text", "text": "what"},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "is it?"},
    ]
    corpus = freeze_lines(tmp_path, [{"messages": [{"role": "user", "content": parts}]}]).corpus
    (request,) = corpus.requests
    (image,) = request.images
    assert (corpus.path / "images" / image.sha256).read_bytes() == b"pixels"
    assert image.media_type == "image/png"
    assert request.messages is not None
    assert request.messages[0].content == "what\nis it?"
    (corpus.path / "images" / image.sha256).write_bytes(b"pixelt")
    with pytest.raises(CorpusError, match=f"images/{image.sha256} : its bytes do not match"):
        load_corpus(str(corpus.path))


def test_all_mistakes_are_listed_and_nothing_is_written(tmp_path):
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,!!"}}
    message = mistakes_of(
        tmp_path,
        [
            {"id": "a", "text": "x", "temperatur": 1},
            {"id": "a", "text": "x", "prompt": "y"},
            {"text": ""},
            [1],
            {"prompt_token_ids": [512]},
            {"text": "x", "temperature": float("nan"), "logit_bias": {"x": 1}},
            {"messages": [{"role": "user", "content": [picture, {"type": "audio"}]}]},
            {"text": "x", "logprobs": 30},
        ],
    )
    for part in (
        "traffic.jsonl:1 $.temperatur: unknown key; did you mean 'temperature'?",
        "traffic.jsonl:2 $: expected exactly one of text, prompt, messages, prompt_token_ids",
        "traffic.jsonl:2 $.id: the id 'a' is already used in line 1",
        "traffic.jsonl:3 $.text: expected a string that is not empty",
        "traffic.jsonl:4 $: expected an object, found [1] (list)",
        "traffic.jsonl:5 $.prompt_token_ids[0]: expected a token id from 0 to 511",
        "traffic.jsonl:6 $.temperature: expected a finite number of at least 0, found NaN (float)",
        "traffic.jsonl:6 $.logit_bias.x: expected a token id in digits",
        "traffic.jsonl:7 $.messages[0].content[0].image_url.url: the image is not valid base64",
        "traffic.jsonl:7 $.messages[0].content[1].type: expected a part of type 'text' or 'image_url'",
        "traffic.jsonl:8 $.logprobs: expected an integer of at least 0 and at most 20, found 30 (int)",
    ):
        assert part in message
    assert "11 mistakes" in message


@pytest.mark.parametrize("raw", [b"", b"\n", b"  \n\n"])
def test_an_empty_file_is_an_error(tmp_path, raw):
    source = tmp_path / "traffic.jsonl"
    source.write_bytes(raw)
    with pytest.raises(CorpusError, match="the file is empty"):
        freeze(order_of(source), tmp_path / "frozen")


def test_an_unreadable_file_is_an_error(tmp_path):
    with pytest.raises(CorpusError, match="cannot be read"):
        freeze(order_of(tmp_path / "absent.jsonl"), tmp_path / "frozen")


def test_a_template_that_refuses_is_a_mistake_of_its_line(tmp_path):
    class Refusing(ByteTokenizer):
        def encode_chat(self, messages):
            raise ModelError("the chat template refuses these messages")

    with pytest.raises(CorpusError, match=r"traffic.jsonl:1 \$.messages: the chat template refuses"):
        freeze_lines(tmp_path, [{"messages": [{"role": "user", "content": "x"}]}], tokenizer=Refusing(512))


def test_an_existing_corpus_is_replaced_only_with_force(tmp_path):
    old = freeze_lines(tmp_path, [{"text": "old"}]).corpus
    source = write_source(tmp_path, [{"text": "new"}])
    with pytest.raises(CorpusError, match="already holds a corpus; add --force"):
        freeze(order_of(source), old.path)
    assert load_corpus(str(old.path)).digest == old.digest
    new = freeze(order_of(source), old.path, force=True).corpus
    assert (new.requests[0].text, load_corpus(str(old.path)).digest) == ("new", new.digest)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["frozen", "traffic.jsonl"]


@pytest.mark.parametrize("force", [False, True])
def test_files_that_are_no_part_of_a_corpus_are_never_lost(tmp_path, force):
    folder = tmp_path / "frozen"
    if force:
        freeze_lines(tmp_path, [{"text": "old"}])
    folder.mkdir(exist_ok=True)
    (folder / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(CorpusError, match=r"holds files that are no part of a corpus \(.*notes.txt\)"):
        freeze(order_of(write_source(tmp_path, [{"text": "x"}])), folder, force=force)
    assert (folder / "notes.txt").read_text(encoding="utf-8") == "mine"


def test_a_source_inside_the_folder_is_kept_with_its_digest(tmp_path):
    source = tmp_path / "mine" / "source.jsonl"
    source.parent.mkdir()
    source.write_text('{"text": "x"}\n', encoding="utf-8")
    for force in (False, True):
        corpus = freeze(order_of(source, keep_source=True), source.parent, force=force).corpus
    assert source.read_text(encoding="utf-8") == '{"text": "x"}\n'
    source.write_text('{"text": "y"}\n', encoding="utf-8")
    with pytest.raises(CorpusError, match=r"source.jsonl : its bytes do not match"):
        load_corpus(str(corpus.path))


@pytest.mark.parametrize("force", [False, True])
def test_a_full_disk_leaves_the_old_state(tmp_path, monkeypatch, force):
    old = freeze_lines(tmp_path, [{"text": "old"}]).corpus if force else None
    source = write_source(tmp_path, [{"text": "new"}])
    before = sorted(path.name for path in tmp_path.iterdir())
    original = Path.write_bytes

    def full(self: Path, data: bytes) -> int:
        if self.name == "requests.jsonl":
            original(self, data[:5])
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(self, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OutputError, match="No space left on device"):
        freeze(order_of(source), tmp_path / "frozen", force=force)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert old is None or load_corpus(str(old.path)).digest == old.digest


def test_a_rename_that_fails_puts_the_old_corpus_back(tmp_path, monkeypatch):
    old = freeze_lines(tmp_path, [{"text": "old"}]).corpus
    source = write_source(tmp_path, [{"text": "new"}])
    original = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise OSError(errno.EACCES, "Permission denied")
        return original(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OutputError, match="Permission denied"):
        freeze(order_of(source), old.path, force=True)
    assert load_corpus(str(old.path)).digest == old.digest


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_no_folder_is_never_replaced(tmp_path, kind):
    source, out = write_source(tmp_path, [{"text": "x"}]), tmp_path / "taken"
    if kind == "file":
        out.write_text("mine", encoding="utf-8")
    else:
        out.symlink_to(tmp_path)
    with pytest.raises(CorpusError, match="exists and is no folder"):
        freeze(order_of(source), out, force=True)
    assert out.is_symlink() == (kind == "link")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken", "traffic.jsonl"]


def test_a_parent_that_is_a_file_is_an_output_error(tmp_path):
    source = write_source(tmp_path, [{"text": "x"}])
    with pytest.raises(OutputError, match="cannot be written"):
        freeze(order_of(source), source / "frozen")


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
prompts = st.one_of(
    texts.map(lambda text: {"text": text}),
    st.lists(st.integers(0, 511), min_size=1, max_size=30).map(lambda ids: {"prompt_token_ids": ids}),
    st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": texts}),
        min_size=1,
        max_size=3,
    ).map(lambda messages: {"messages": messages}),
)
samplings = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0.01, 1),
        "seed": st.integers(0, 2**64 - 1),
        "max_tokens": st.integers(1, 50),
        "stop": st.lists(texts, max_size=2),
        "logit_bias": st.dictionaries(st.integers(0, 511).map(str), st.floats(-5, 5), max_size=3),
        "logprobs": st.integers(0, 20),
    },
)
lines = st.lists(st.builds(lambda prompt, sampling: prompt | sampling, prompts, samplings), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(lines=lines)
def test_what_is_frozen_is_loaded(lines):
    with tempfile.TemporaryDirectory() as scratch:
        frozen = freeze_lines(Path(scratch), lines)
        again = load_corpus(str(frozen.corpus.path))
        assert again.requests == frozen.corpus.requests
        assert again.digest == frozen.corpus.digest
        for line, request in zip(lines, again.requests, strict=True):
            assert request.text == line.get("text")
            assert request.prompt_token_ids == expected_ids(line)
            assert request.sampling.temperature == line.get("temperature", 0.0)
            assert (request.sampling.seed is None) <= (request.sampling.temperature == 0)
            assert line.get("seed", request.sampling.seed) == request.sampling.seed


def expected_ids(line: dict[str, object]) -> tuple[int, ...]:
    if "messages" in line:
        return TOKENIZER.encode_chat([(message["role"], message["content"]) for message in line["messages"]])
    return TOKENIZER.encode(line["text"]) if "text" in line else tuple(line["prompt_token_ids"])
