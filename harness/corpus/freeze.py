"""Freezing traffic: lines of a user's file become a corpus folder, every field explicit.

It does not know engines; a tokenizer is handed in. Rules:

1. nothing is filled in silently: every default, assigned id, derived seed and dropped field is reported;
2. all mistakes of the file are collected before anything is written;
3. the folder appears whole or not at all, and an existing one is replaced only when that is asked for;
4. the same file and tokenizer give the same digest everywhere.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from harness.corpus import Corpus, note_duplicates, read_folder
from harness.corpus.batch_api import is_batch_line, read_batch_line
from harness.corpus.folder import write_folder
from harness.corpus.json_lines import read_ids, read_sampling, request_line, sampling_json
from harness.corpus.manifest import (
    MANIFEST,
    REQUESTS,
    Manifest,
    TokenizerName,
    content_digest,
    digest_files,
    manifest_bytes,
)
from harness.corpus.traffic import Draft, read_line
from harness.corpus.view import derive_seed
from harness.engine import Tokenizer
from harness.errors import CorpusError, ModelError
from harness.request import Message, Request
from harness.strict_json import MISSING, Place, parse_json, raise_mistakes

SOURCE: Final = "source.jsonl"  # the name a kept source gets in the folder
DEFAULTS: Final[Mapping[str, object]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "seed": None,
    "max_tokens": 64,
    "min_tokens": 0,
    "ignore_eos": False,
    "stop": [],
    "stop_token_ids": [],
    "logit_bias": [],
    "logprobs": 5,
    "n": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to freeze, for which tokenizer. `defaults` win over those of a line's format and `DEFAULTS`."""

    source: Path
    tokenizer: Tokenizer
    tokenizer_name: str
    name: str
    description: str = ""
    defaults: Mapping[str, object]
    arbitrary_ids: tuple[str, ...] = ()
    keep_source: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """One request with nothing left open, and what was filled in for it."""

    request: Request
    draft: Draft
    defaulted: tuple[str, ...]
    seed_derived: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """A frozen corpus, and everything its source left open."""

    corpus: Corpus
    named: tuple[str, ...]  # ids assigned to lines without one
    seeds: tuple[tuple[str, int], ...]  # (request id, derived seed)
    defaulted: tuple[tuple[str, str, int], ...]  # (field, value as JSON, how many requests)
    dropped: tuple[tuple[str, int], ...]  # (field that decides no token, how many requests)


def freeze(order: Order, out: Path, *, force: bool = False) -> Frozen:
    """Freezes `order.source` into the folder `out`.

    Raises:
        CorpusError: every mistake of the source, or a folder that must not be replaced.
        OutputError: a folder that cannot be written.
    """
    raw = read_source(order.source)
    filled = read_source_lines(order, raw)
    files = {REQUESTS: b"".join(request_line(item.request) for item in filled)}
    for picture in (picture for item in filled for picture in item.draft.pictures):
        files[f"images/{picture.image.sha256}"] = picture.data
    if order.keep_source:
        files[SOURCE] = raw
    manifest = make_manifest(order, [item.request for item in filled], files)
    write_folder(
        out,
        {**files, MANIFEST: manifest_bytes(manifest)},
        force=force,
        replaceable=(order.source,) if order.keep_source else (),
    )
    return report(read_folder(out, f"path {out}"), filled)


def read_source(source: Path) -> bytes:
    """The bytes of the source file."""
    try:
        return source.read_bytes()
    except OSError as error:
        raise CorpusError(f"{source}: cannot be read ({error.strerror}); give a JSON Lines file") from error


def read_source_lines(order: Order, raw: bytes) -> list[Filled]:
    """Every line of the source, filled in.

    Raises:
        CorpusError: every mistake of the file, or that it is empty.
    """
    what = f"cannot freeze {order.source}"
    if not raw.strip():
        raise CorpusError(f"{what}: the file is empty; a corpus needs at least one request")
    mistakes: list[str] = []
    filled: list[Filled] = []
    places: list[Place] = []
    for number, line in enumerate(raw.removesuffix(b"\n").split(b"\n"), start=1):
        place = Place(file=order.source.name, line=number, path="$", mistakes=mistakes)
        draft = read_draft(place, parse_json(place, line))
        filled.append(fill(draft, order, f"r{number:04d}"))
        places.append(draft.id_place)
    note_duplicates([item.request for item in filled], places)
    raise_mistakes(what, mistakes)
    return filled


def read_draft(place: Place, value: object) -> Draft:
    """One line, in whichever of the two formats it is written."""
    if is_batch_line(value):
        return read_batch_line(place, value)
    if isinstance(value, dict):
        return read_line(place, value)
    if value is not MISSING:
        place.mistake("an object", value)
    return Draft(place=place, id=None, id_place=place, text="")


def fill(draft: Draft, order: Order, spare_id: str) -> Filled:
    """Fills in what a line leaves open."""
    name = spare_id if draft.id is None else draft.id
    values = {**DEFAULTS, **draft.defaults, **order.defaults, **draft.sampling}
    temperature = values["temperature"]
    drawn = isinstance(temperature, (int, float)) and temperature > 0
    derived = drawn and values["seed"] is None
    if derived:
        values["seed"] = derive_seed(name, prompt_json(draft))
    request = Request(
        id=name,
        prompt_token_ids=prompt_ids(draft, order.tokenizer),
        text=draft.text,
        messages=draft.messages,
        sampling=read_sampling(draft.place, values, vocab_size=order.tokenizer.vocab_size),
        grammar=draft.grammar,
        images=tuple(picture.image for picture in draft.pictures),
    )
    defaulted = tuple(key for key in DEFAULTS if key not in draft.sampling and key != "seed")
    return Filled(request=request, draft=draft, defaulted=defaulted, seed_derived=derived)


def prompt_json(draft: Draft) -> object:
    """The prompt as a JSON value that does not depend on the tokenizer, for deriving a seed."""
    if draft.messages is not None:
        return [[message.role, message.content] for message in draft.messages]
    return draft.ids if draft.text is None else draft.text


def prompt_ids(draft: Draft, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Token ids of a line's prompt; one without tokens is noted as a mistake."""
    if draft.messages is not None:
        return chat_ids(draft, draft.messages, tokenizer)
    if draft.text is not None:
        ids = tokenizer.encode(draft.text)
        if not ids and draft.text:  # an empty text is noted where it is read
            draft.place.say("the prompt has no tokens in this tokenizer; write a longer one or remove the line")
        return ids
    place = draft.place.at("prompt_token_ids")
    return read_ids(place, draft.ids, vocab_size=tokenizer.vocab_size, empty=False)


def chat_ids(draft: Draft, messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Token ids of messages; a template that refuses them is noted as a mistake of the line."""
    try:
        return tokenizer.encode_chat([(message.role, message.content) for message in messages])
    except ModelError as error:
        draft.place.at("messages").say(str(error))
        return ()


def make_manifest(order: Order, requests: Sequence[Request], files: Mapping[str, bytes]) -> Manifest:
    """The manifest of a corpus that is about to be written."""
    tokenizer = TokenizerName(
        name=order.tokenizer_name, digest=order.tokenizer.digest, vocab_size=order.tokenizer.vocab_size
    )
    lengths = [len(request.prompt_token_ids) for request in requests]
    return Manifest(
        name=order.name,
        description=order.description,
        tokenizer=tokenizer,
        arbitrary_ids=tuple(sorted(order.arbitrary_ids)),
        requests=len(requests),
        prompt_tokens=sum(lengths),
        longest_prompt=max(lengths),
        files=digest_files(files),
        digest=content_digest(tokenizer, order.arbitrary_ids, requests),
    )


def report(corpus: Corpus, filled: Sequence[Filled]) -> Frozen:
    """What was filled in, counted."""
    defaulted: Counter[tuple[str, str]] = Counter()
    for item in filled:
        sampling = sampling_json(item.request.sampling)
        defaulted.update((key, json.dumps(sampling[key])) for key in item.defaulted)
    dropped = Counter(key for item in filled for key in item.draft.dropped)
    return Frozen(
        corpus=corpus,
        named=tuple(item.request.id for item in filled if item.draft.id is None),
        seeds=tuple((item.request.id, item.request.sampling.seed or 0) for item in filled if item.seed_derived),
        defaulted=tuple((key, value, count) for (key, value), count in sorted(defaulted.items())),
        dropped=tuple(sorted(dropped.items())),
    )
