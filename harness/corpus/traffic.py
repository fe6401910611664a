"""A user's traffic, line by line: what one line asks for, before anything is filled in.

It does not know tokenizers, defaults or folders. Rules: a line says its prompt in exactly one way; sampling
fields keep the spelling of `requests.jsonl`; image bytes are taken out and named by their SHA-256; a remote
image is refused, because its bytes may change.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from harness.corpus.json_lines import ROLES, SAMPLING_READERS, read_grammar, read_id
from harness.request import Grammar, Image, Message
from harness.strict_json import MISSING, Place, read_choice, read_items, read_object, read_string

PROMPT_KEYS = ("text", "prompt", "messages", "prompt_token_ids")
LINE_KEYS = ("id", *PROMPT_KEYS, "grammar", *SAMPLING_READERS)
PICTURES = ("image/png", "image/jpeg", "image/webp", "image/gif")


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """An image and its bytes."""

    image: Image
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One line of traffic. One of `text`, `messages` and `ids` is set; `ids` is still unchecked JSON."""

    place: Place  # of the object that holds the sampling fields
    id: str | None
    id_place: Place
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    ids: object = None
    sampling: Mapping[str, object] = field(default_factory=dict)  # the fields given, as unchecked JSON
    defaults: Mapping[str, object] = field(default_factory=dict)  # of the format the line is written in
    grammar: Grammar | None = None
    pictures: tuple[Picture, ...] = ()
    dropped: tuple[str, ...] = ()  # fields that do not decide any token


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt as a line gives it."""

    text: str | None = None
    messages: tuple[Message, ...] | None = None
    ids: object = None
    pictures: tuple[Picture, ...] = ()


def read_line(place: Place, value: object) -> Draft:
    """A line of samebits' own format: a prompt, and optionally an id, a grammar and sampling fields."""
    fields = read_object(place, value, required=(), optional=LINE_KEYS)
    prompt = read_prompt(place, fields)
    sampling = {name: fields[name] for name in SAMPLING_READERS if name in fields}
    if "logit_bias" in sampling:
        sampling["logit_bias"] = bias_pairs(place.at("logit_bias"), sampling["logit_bias"])
    if isinstance(sampling.get("stop"), str):
        sampling["stop"] = [sampling["stop"]]
    return Draft(
        place=place,
        id=read_id(place.at("id"), fields["id"]) if "id" in fields else None,
        id_place=place.at("id"),
        text=prompt.text,
        messages=prompt.messages,
        ids=prompt.ids,
        sampling=sampling,
        defaults={"temperature": 0.0},
        grammar=read_grammar(place.at("grammar"), fields.get("grammar")),
        pictures=prompt.pictures,
    )


def read_prompt(place: Place, fields: Mapping[str, object]) -> Prompt:
    """The prompt in `fields`, given in exactly one of the four ways."""
    given = [key for key in PROMPT_KEYS if key in fields]
    if len(given) != 1:
        place.mistake(f"exactly one of {', '.join(PROMPT_KEYS)}", given or MISSING)
        return Prompt(text="")
    at, value = place.at(given[0]), fields[given[0]]
    if given[0] == "prompt_token_ids":
        return Prompt(ids=value)
    if given[0] == "messages":
        messages, pictures = read_chat(at, value)
        return Prompt(messages=messages, pictures=pictures)
    return Prompt(text=read_string(at, value))


def read_chat(place: Place, value: object) -> tuple[tuple[Message, ...], tuple[Picture, ...]]:
    """Chat messages whose content is a string or a list of parts, and the images in order of appearance."""
    messages: list[Message] = []
    pictures: list[Picture] = []
    for at, item in read_items(place, value, empty=False):
        fields = read_object(at, item, required=("role", "content"))
        role = read_choice(at.at("role"), fields["role"], ROLES)
        content = fields["content"]
        if isinstance(content, list):
            text = read_parts(at.at("content"), content, pictures)
        else:
            text = read_string(at.at("content"), content, empty=True)
        messages.append(Message(role=role, content=text))
    return tuple(messages), tuple(pictures)


def read_parts(place: Place, value: object, pictures: list[Picture]) -> str:
    """The text parts joined by line feeds; image parts are added to `pictures`."""
    texts: list[str] = []
    for at, part in read_items(place, value, empty=False):
        kind = part.get("type", MISSING) if isinstance(part, dict) else MISSING
        if kind == "image_url":
            fields = read_object(at, part, required=("type", "image_url"))
            url = read_object(at.at("image_url"), fields["image_url"], required=("url",), optional=("detail",))
            pictures.extend(read_picture(at.at("image_url").at("url"), url["url"]))
        elif kind == "text":
            fields = read_object(at, part, required=("type", "text"))
            texts.append(read_string(at.at("text"), fields["text"], empty=True))
        else:
            at.at("type").mistake("a part of type 'text' or 'image_url'", kind)
    return "\n".join(texts)


def read_picture(place: Place, value: object) -> list[Picture]:
    """The image in a `data:` URL, or nothing after a noted mistake."""
    url = read_string(place, value)
    if not url:
        return []
    head, comma, body = url.partition(",")
    media_type = head.removeprefix("data:").removesuffix(";base64")
    if not url.startswith("data:"):
        place.mistake("a data: URL", value, "a remote image may change; embed its bytes as data:image/png;base64,...")
        return []
    if not comma or not head.endswith(";base64") or media_type not in PICTURES:
        place.mistake(f"data:TYPE;base64,BYTES with TYPE one of {', '.join(PICTURES)}", value)
        return []
    try:
        data = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        place.say(f"the image is not valid base64 ({error}); encode it again")
        return []
    if not data:
        place.say("the image is empty; embed its bytes")
        return []
    sha256 = hashlib.sha256(data).hexdigest()
    return [Picture(image=Image(sha256=sha256, media_type=media_type), data=data)]


def bias_pairs(place: Place, value: object) -> object:
    """`{"17": -1.5}`, the spelling of the OpenAI API, as `[[17, -1.5]]`; anything else is left as it is."""
    if not isinstance(value, dict):
        return value
    pairs = []
    for key, bias in value.items():
        if key.isascii() and key.isdigit():
            pairs.append([int(key), bias])
        else:
            place.at(key).say('expected a token id in digits as the key; write it as "17": -1.5')
    return pairs
