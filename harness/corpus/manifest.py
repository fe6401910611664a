"""The manifest of a corpus folder: what the corpus is, and the digests of its files and content.

It does not know how requests are read. Rules: the schema number is read before anything else, and an old, a
newer and a missing one get three different sentences; every key is required; file names stay inside the
folder; the digest is taken over content in its canonical spelling, never over the bytes of a file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from harness.canonical import canonical
from harness.corpus.json_lines import MAX_TOKEN_ID, read_digest, request_json
from harness.errors import CorpusError
from harness.request import Request
from harness.strict_json import (
    MISSING,
    Place,
    parse_json,
    raise_mistakes,
    read_choice,
    read_integer,
    read_items,
    read_object,
    read_string,
)

SCHEMA = 1
MANIFEST = "manifest.json"
REQUESTS = "requests.jsonl"
ARBITRARY_IDS = ("prompt_token_ids", "logit_bias", "stop_token_ids")
KEYS = (
    "schema",
    "name",
    "description",
    "tokenizer",
    "arbitrary_ids",
    "requests",
    "prompt_tokens",
    "longest_prompt",
    "files",
    "digest",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerName:
    """The tokenizer a corpus was frozen for."""

    name: str
    digest: str
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """`manifest.json`; `files` are (name inside the folder, SHA-256), by name."""

    name: str
    description: str
    tokenizer: TokenizerName
    arbitrary_ids: tuple[str, ...]
    requests: int
    prompt_tokens: int
    longest_prompt: int
    files: tuple[tuple[str, str], ...]
    digest: str


def read_manifest(folder: Path, what: str) -> Manifest:
    """The manifest of a corpus folder.

    Raises:
        CorpusError: no folder, no manifest, another schema, or every mistake of the manifest.
    """
    try:
        raw = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise CorpusError(
            f"{what}: expected a folder with {MANIFEST} and {REQUESTS}, but {MANIFEST} cannot be read "
            f"({error.strerror}); `samebits corpus freeze` makes such a folder"
        ) from error
    place = Place(file=MANIFEST, line=0, path="$", mistakes=[])
    value = parse_json(place, raw)
    if isinstance(value, dict):
        check_schema(value.get("schema", MISSING), place)
        raise_mistakes(what, place.mistakes)
    manifest = manifest_of(place, value)
    raise_mistakes(what, place.mistakes)
    return manifest


def check_schema(schema: object, place: Place) -> None:
    """Notes a schema number that is not ours."""
    if schema is MISSING:
        place.at("schema").say(f"the schema number is missing; expected {SCHEMA}: is this a corpus manifest?")
    elif not isinstance(schema, int) or isinstance(schema, bool):
        place.at("schema").mistake(f"the integer {SCHEMA}", schema)
    elif schema < SCHEMA:
        place.at("schema").say(f"schema {schema} is older than {SCHEMA}; freeze the corpus again from its source")
    elif schema > SCHEMA:
        place.at("schema").say(f"schema {schema} is newer than {SCHEMA}, which this samebits reads; upgrade samebits")


def manifest_of(place: Place, value: object) -> Manifest:
    """The manifest in a JSON value; mistakes are noted."""
    fields = read_object(place, value, required=KEYS)

    def count(key: str) -> int:
        return read_integer(place.at(key), fields[key], low=1)

    arbitrary = read_items(place.at("arbitrary_ids"), fields["arbitrary_ids"])
    return Manifest(
        name=read_string(place.at("name"), fields["name"]),
        description=read_string(place.at("description"), fields["description"], empty=True),
        tokenizer=read_tokenizer(place.at("tokenizer"), fields["tokenizer"]),
        arbitrary_ids=tuple(sorted({read_choice(at, item, ARBITRARY_IDS) for at, item in arbitrary})),
        requests=count("requests"),
        prompt_tokens=count("prompt_tokens"),
        longest_prompt=count("longest_prompt"),
        files=read_files(place.at("files"), fields["files"]),
        digest=read_digest(place.at("digest"), fields["digest"]),
    )


def read_tokenizer(place: Place, value: object) -> TokenizerName:
    """Name, digest and vocabulary size of the tokenizer."""
    fields = read_object(place, value, required=("name", "digest", "vocab_size"))
    return TokenizerName(
        name=read_string(place.at("name"), fields["name"]),
        digest=read_digest(place.at("digest"), fields["digest"]),
        vocab_size=read_integer(place.at("vocab_size"), fields["vocab_size"], low=1, high=MAX_TOKEN_ID),
    )


def read_files(place: Place, value: object) -> tuple[tuple[str, str], ...]:
    """File names and their SHA-256; `requests.jsonl` is among them, and none leads out of the folder."""
    members = value if isinstance(value, dict) else {}
    read_object(place, value, required=(REQUESTS,), optional=tuple(members))
    for name in members:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name:
            place.at(name).say("a file's name must stay inside the corpus folder")
    return tuple((name, read_digest(place.at(name), members[name])) for name in sorted(members))


def content_digest(tokenizer: TokenizerName, arbitrary_ids: Sequence[str], requests: Sequence[Request]) -> str:
    """SHA-256 over the canonical content: one header line, then one line per request in order."""
    header: dict[str, object] = {
        "samebits-corpus": 1,
        "tokenizer": tokenizer.digest,
        "vocab_size": tokenizer.vocab_size,
        "arbitrary_ids": sorted(arbitrary_ids),
    }
    sha = hashlib.sha256(f"{canonical(header)}\n".encode())
    for request in requests:
        sha.update(f"{canonical(request_json(request))}\n".encode())
    return sha.hexdigest()


def digest_files(files: Mapping[str, bytes]) -> tuple[tuple[str, str], ...]:
    """(name, SHA-256) of each file, by name."""
    return tuple((name, hashlib.sha256(files[name]).hexdigest()) for name in sorted(files))


def manifest_bytes(manifest: Manifest) -> bytes:
    """`manifest.json` as it is written."""
    value = {"schema": SCHEMA, **asdict(manifest), "files": dict(manifest.files)}
    return (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode()
