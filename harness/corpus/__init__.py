"""A corpus: a frozen, content-hashed set of requests; loading, checking, subsets and views.

It does not know engines or schedules. Rules:

1. a folder whose bytes differ from its manifest is an error, and so is an empty corpus;
2. the digest is taken over content (ids, text, sampling, tokenizer), never over file formatting;
3. a subset or view is a corpus of its own, with its own digest;
4. an existing path wins over a shipped name, and the corpus says which it is;
5. a corpus of short prompts says that it is weak.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from harness.corpus.json_lines import read_request
from harness.corpus.manifest import MANIFEST, REQUESTS, Manifest, TokenizerName, content_digest, read_manifest
from harness.corpus.retokenise import check_fits, retokenise
from harness.corpus.view import VIEWS, take, with_requests
from harness.errors import CorpusError
from harness.request import Request
from harness.strict_json import Place, parse_json, raise_mistakes
from harness.suggest import did_you_mean

__all__ = [
    "Corpus",
    "check_fits",
    "load_corpus",
    "read_folder",
    "retokenise",
    "shipped_names",
    "take",
    "with_requests",
]

STRONG_PROMPT: Final = 200  # tokens; a public measurement: 108-136 never diverged where 220 mostly did
SHIPPED: Final = Path(__file__).resolve().parents[2] / "corpora"


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Requests in a fixed order, and the SHA-256 over their content."""

    name: str  # with the view, for example "quick:greedy"
    description: str
    digest: str
    tokenizer: TokenizerName
    arbitrary_ids: tuple[str, ...]  # fields whose token ids carry no meaning and may be folded into a vocabulary
    requests: tuple[Request, ...]
    path: Path
    origin: str  # a sentence: which folder was used, and why

    @property
    def tokenizer_digest(self) -> str:
        """SHA-256 of the tokenizer that made the ids."""
        return self.tokenizer.digest

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(request.prompt_token_ids) for request in self.requests)

    @property
    def weak(self) -> str | None:
        """Why a PASS over this corpus says little; None when its longest prompt is long enough."""
        if self.longest_prompt >= STRONG_PROMPT:
            return None
        return (
            f"weak corpus: its longest prompt has {self.longest_prompt} tokens, under {STRONG_PROMPT}; "
            "short prompts have passed where longer ones diverged"
        )


def load_corpus(name_or_path: str) -> Corpus:
    """Loads and verifies a corpus, optionally one view of it (`quick:greedy`).

    Raises:
        CorpusError: no such corpus or view, or everything that is wrong with it.
    """
    folder, view, origin = locate(name_or_path)
    corpus = read_folder(folder, origin)
    return VIEWS[view](corpus) if view else corpus


def locate(name_or_path: str) -> tuple[Path, str | None, str]:
    """Folder, view and origin sentence of a name or path. An existing path wins over a shipped name."""
    name, view = split_view(name_or_path)
    shipped = shipped_names()
    if name and Path(name).exists():
        beside = "; it wins over the shipped corpus of that name" if name in shipped else ""
        return Path(name), view, f"path {name}{beside}"
    if name not in shipped:
        raise CorpusError(f"corpus {name!r}: neither a folder nor a shipped corpus; {did_you_mean(name, shipped)}")
    return SHIPPED / name, view, f"shipped corpus {name}"


def split_view(name_or_path: str) -> tuple[str, str | None]:
    """`quick:greedy` is corpus `quick` and view `greedy`, unless a path of that very name exists."""
    name, colon, view = name_or_path.rpartition(":")
    if not colon or Path(name_or_path).exists():
        return name_or_path, None
    if view not in VIEWS:
        raise CorpusError(f"corpus {name_or_path!r}: unknown view {view!r}; {did_you_mean(view, VIEWS)}")
    return name, view


def shipped_names() -> tuple[str, ...]:
    """Names of the corpora that come with samebits."""
    return tuple(sorted(manifest.parent.name for manifest in SHIPPED.glob(f"*/{MANIFEST}")))


def read_folder(folder: Path, origin: str) -> Corpus:
    """Reads one corpus folder and checks it against its manifest.

    Raises:
        CorpusError: everything that is wrong with it, in one message.
    """
    what = f"corpus {folder}"
    mistakes: list[str] = []
    manifest = read_manifest(folder, what)
    check_files(folder, manifest, mistakes)
    requests = read_requests(folder / REQUESTS, manifest.tokenizer.vocab_size, mistakes)
    raise_mistakes(what, mistakes)
    corpus = Corpus(
        name=manifest.name,
        description=manifest.description,
        digest=content_digest(manifest.tokenizer, manifest.arbitrary_ids, requests),
        tokenizer=manifest.tokenizer,
        arbitrary_ids=manifest.arbitrary_ids,
        requests=requests,
        path=folder,
        origin=origin,
    )
    check_claims(corpus, manifest, mistakes)
    raise_mistakes(what, mistakes)
    return corpus


def check_files(folder: Path, manifest: Manifest, mistakes: list[str]) -> None:
    """Notes files of the manifest that are absent or hold other bytes."""
    for name, expected in manifest.files:
        place = Place(file=name, line=0, path="", mistakes=mistakes)
        try:
            found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        except OSError as error:
            place.say(f"the manifest lists this file, but it cannot be read ({error.strerror}); restore it")
            continue
        if found != expected:
            place.say(
                f"its bytes do not match the manifest: expected SHA-256 {expected}, found {found}; "
                "restore the file, or freeze the corpus again from its source"
            )


def read_requests(path: Path, vocab_size: int, mistakes: list[str]) -> tuple[Request, ...]:
    """All requests of a `requests.jsonl`; mistakes are noted, those of one line beside those of the next."""
    try:
        raw = path.read_bytes()
    except OSError:  # noted by check_files
        return ()
    requests: list[Request] = []
    places: list[Place] = []
    for number, line in enumerate(raw.removesuffix(b"\n").split(b"\n") if raw else [], start=1):
        place = Place(file=path.name, line=number, path="$", mistakes=mistakes)
        requests.append(read_request(place, parse_json(place, line), vocab_size=vocab_size))
        places.append(place.at("id"))
    note_duplicates(requests, places)
    if not requests:
        mistakes.append(f"{path.name}: the corpus is empty; it needs at least one request")
    return tuple(requests)


def note_duplicates(requests: Sequence[Request], places: Sequence[Place]) -> None:
    """Notes every id that an earlier line has already used; `places` are those of the ids."""
    first: dict[str, int] = {}
    for request, place in zip(requests, places, strict=True):
        if request.id and request.id in first:
            place.say(f"the id {request.id!r} is already used in line {first[request.id]}; ids are unique")
        first.setdefault(request.id, place.line)


def check_claims(corpus: Corpus, manifest: Manifest, mistakes: list[str]) -> None:
    """Notes where the manifest's numbers and digest are not those of the requests, and images not listed."""
    place = Place(file=MANIFEST, line=0, path="$", mistakes=mistakes)
    claims = (
        ("requests", manifest.requests, len(corpus.requests)),
        ("prompt_tokens", manifest.prompt_tokens, corpus.prompt_tokens),
        ("longest_prompt", manifest.longest_prompt, corpus.longest_prompt),
        ("digest", manifest.digest, corpus.digest),
    )
    for key, claimed, found in claims:
        if claimed != found:
            place.at(key).say(f"the requests give {found}, the manifest says {claimed}; freeze the corpus again")
    listed = dict(manifest.files)
    for request in corpus.requests:
        for image in request.images:
            if listed.get(f"images/{image.sha256}") != image.sha256:
                place.at("files").say(f"images/{image.sha256} of request {request.id!r} is not listed")
