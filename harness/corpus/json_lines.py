"""Requests as JSON: one line of `requests.jsonl` to a `Request` and back.

It does not know files, folders or tokenizers. Rules: every key of a request and every sampling field is
written out; a line is read completely before anything is raised, so that all its mistakes are known;
writing and reading again gives the same request; the canonical form has one spelling per request.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any, get_args

from harness.request import MAX_TOP_LOGPROBS, Grammar, Image, Message, Request, Sampling
from harness.strict_json import (
    MISSING,
    Place,
    raise_mistakes,
    read_choice,
    read_flag,
    read_integer,
    read_items,
    read_number,
    read_object,
    read_string,
)

ROLES = ("system", "user", "assistant", "tool")
GRAMMARS: tuple[str, ...] = get_args(Grammar.__annotations__["kind"]) or ("json_schema", "regex", "ebnf")
REQUEST_KEYS = ("id", "prompt_token_ids", "text", "messages", "sampling", "grammar", "images")
MAX_SEED = 2**64 - 1
MAX_TOKEN_ID = 2**31 - 1  # ids travel as int32
MAX_ID = 200  # characters of a request id


def read_request(place: Place, value: object, *, vocab_size: int) -> Request:
    """One request with every key explicit; mistakes are noted at `place`, placeholders stand in for them."""
    fields = read_object(place, value, required=REQUEST_KEYS)
    text = None if fields["text"] is None else read_string(place.at("text"), fields["text"])
    messages = None if fields["messages"] is None else read_messages(place.at("messages"), fields["messages"])
    if isinstance(fields["text"], str) and isinstance(fields["messages"], list):
        place.say("both text and messages are given; keep the one that the token ids came from")
    return Request(
        id=read_id(place.at("id"), fields["id"]),
        prompt_token_ids=read_ids(
            place.at("prompt_token_ids"), fields["prompt_token_ids"], vocab_size=vocab_size, empty=False
        ),
        text=text,
        messages=messages,
        sampling=read_sampling(place.at("sampling"), fields["sampling"], vocab_size=vocab_size),
        grammar=read_grammar(place.at("grammar"), fields["grammar"]),
        images=tuple(read_image(at, item) for at, item in read_items(place.at("images"), fields["images"])),
    )


def read_id(place: Place, value: object) -> str:
    """A request id: printable, no white space at its ends, at most 200 characters."""
    name = read_string(place, value)
    if name and (not name.isprintable() or name != name.strip() or len(name) > MAX_ID):
        place.mistake(f"a printable id of at most {MAX_ID} characters without white space at its ends", value)
    return name


def read_ids(place: Place, value: object, *, vocab_size: int, empty: bool = True) -> tuple[int, ...]:
    """Token ids, each inside the vocabulary."""
    return tuple(read_token(at, item, vocab_size) for at, item in read_items(place, value, empty=empty))


def read_token(place: Place, value: object, vocab_size: int) -> int:
    """One token id inside the vocabulary."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size:
        return value
    place.mistake(f"a token id from 0 to {vocab_size - 1} (the vocabulary has {vocab_size})", value)
    return 0


def read_messages(place: Place, value: object) -> tuple[Message, ...]:
    """Chat messages, at least one."""
    return tuple(read_message(at, item) for at, item in read_items(place, value, empty=False))


def read_message(place: Place, value: object) -> Message:
    """One chat message whose content is a string."""
    fields = read_object(place, value, required=("role", "content"))
    return Message(
        role=read_choice(place.at("role"), fields["role"], ROLES),
        content=read_string(place.at("content"), fields["content"], empty=True),
    )


def read_grammar(place: Place, value: object) -> Grammar | None:
    """A grammar or null."""
    if value is None or value is MISSING:
        return None
    fields = read_object(place, value, required=("kind", "text"))
    kind: Any = read_choice(place.at("kind"), fields["kind"], GRAMMARS)
    return Grammar(kind=kind, text=read_string(place.at("text"), fields["text"]))


def read_image(place: Place, value: object) -> Image:
    """An image by digest."""
    fields = read_object(place, value, required=("sha256", "media_type"))
    return Image(
        sha256=read_digest(place.at("sha256"), fields["sha256"]),
        media_type=read_string(place.at("media_type"), fields["media_type"]),
    )


def read_digest(place: Place, value: object) -> str:
    """A SHA-256 in lower-case hexadecimal."""
    digest = read_string(place, value)
    if digest and (len(digest) != 64 or set(digest) - set("0123456789abcdef")):
        place.mistake("a SHA-256 of 64 lower-case hexadecimal digits", value)
    return digest


def read_seed(place: Place, value: object) -> int | None:
    """An unsigned 64-bit integer or null."""
    return None if value is None or value is MISSING else read_integer(place, value, low=0, high=MAX_SEED)


def read_stop(place: Place, value: object) -> tuple[str, ...]:
    """Stop strings, none of them empty."""
    return tuple(read_string(at, item) for at, item in read_items(place, value))


def read_stop_ids(place: Place, value: object) -> tuple[int, ...]:
    """Token ids that end the output; the vocabulary is checked by `check_sampling`."""
    return tuple(read_integer(at, item, low=0) for at, item in read_items(place, value))


def read_bias(place: Place, value: object) -> tuple[tuple[int, float], ...]:
    """Pairs [token id, bias]; kept by ascending id, each id once."""
    pairs = []
    for at, item in read_items(place, value):
        if not isinstance(item, list) or len(item) != 2:
            at.mistake("a pair [token id, bias]", item)
            continue
        pairs.append((read_integer(at.at(0), item[0], low=0), read_number(at.at(1), item[1])))
    counts = Counter(token for token, _ in pairs)
    for token in sorted(token for token, count in counts.items() if count > 1):
        place.say(f"token id {token} is biased twice; keep one pair")
    return tuple(sorted(pairs))


SAMPLING_READERS: dict[str, Callable[[Place, object], Any]] = {
    "temperature": lambda at, value: read_number(at, value, low=0.0),
    "top_p": lambda at, value: read_number(at, value, low=0.0, high=1.0, above=True),
    "top_k": lambda at, value: read_integer(at, value, low=0, high=MAX_TOKEN_ID),
    "min_p": lambda at, value: read_number(at, value, low=0.0, high=1.0),
    "repetition_penalty": lambda at, value: read_number(at, value, low=0.0, above=True),
    "frequency_penalty": read_number,
    "presence_penalty": read_number,
    "seed": read_seed,
    "max_tokens": lambda at, value: read_integer(at, value, low=1, high=MAX_TOKEN_ID),
    "min_tokens": lambda at, value: read_integer(at, value, low=0, high=MAX_TOKEN_ID),
    "ignore_eos": read_flag,
    "stop": read_stop,
    "stop_token_ids": read_stop_ids,
    "logit_bias": read_bias,
    "logprobs": lambda at, value: read_integer(at, value, low=0, high=MAX_TOP_LOGPROBS),
    "n": lambda at, value: read_integer(at, value, low=1, high=MAX_TOKEN_ID),
}


def read_sampling(place: Place, value: object, *, vocab_size: int) -> Sampling:
    """Sampling parameters, all of them explicit, and consistent with each other."""
    before = len(place.mistakes)
    fields = read_object(place, value, required=tuple(SAMPLING_READERS))
    values = {name: reader(place.at(name), fields[name]) for name, reader in SAMPLING_READERS.items()}
    sampling = Sampling(**values)
    if value is not MISSING and len(place.mistakes) == before:
        check_sampling(place, sampling, vocab_size)
    return sampling


def check_sampling(place: Place, sampling: Sampling, vocab_size: int) -> None:
    """Notes what no single field shows."""
    if sampling.temperature > 0 and sampling.seed is None:
        place.at("seed").mistake("a seed, because temperature is above 0", None, "add one (freeze assigns seeds)")
    if sampling.min_tokens > sampling.max_tokens:
        place.at("min_tokens").mistake(f"at most max_tokens ({sampling.max_tokens})", sampling.min_tokens)
    for name, ids in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", dict(sampling.logit_bias))):
        for token in ids:
            read_token(place.at(name), token, vocab_size)


def sampling_json(sampling: Sampling) -> dict[str, object]:
    """Sampling parameters as JSON values, every field present."""
    return {name: getattr(sampling, name) for name in SAMPLING_READERS}


def request_from_json(value: object) -> Request:
    """The request that `request_json` made these JSON values from.

    Raises:
        CorpusError: everything that is wrong with them.
    """
    place = Place(file="request", line=0, path="$", mistakes=[])
    request = read_request(place, value, vocab_size=MAX_TOKEN_ID)
    raise_mistakes("a request", place.mistakes)
    return request


def request_json(request: Request) -> dict[str, object]:
    """A request as JSON values, every key present; `read_request` gives the same request back."""
    messages = request.messages
    return {
        "id": request.id,
        "prompt_token_ids": list(request.prompt_token_ids),
        "text": request.text,
        "messages": None
        if messages is None
        else [{"role": message.role, "content": message.content} for message in messages],
        "sampling": sampling_json(request.sampling),
        "grammar": None if request.grammar is None else {"kind": request.grammar.kind, "text": request.grammar.text},
        "images": [{"sha256": image.sha256, "media_type": image.media_type} for image in request.images],
    }


def request_line(request: Request) -> bytes:
    """One line of `requests.jsonl`, readable, with its line feed."""
    return (json.dumps(request_json(request), ensure_ascii=False, allow_nan=False) + "\n").encode()
