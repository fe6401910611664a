"""One line of an OpenAI Batch API input file: `custom_id`, `method`, `url` and the request's `body`.

It does not know tokenizers or folders. Rules: a body field that decides tokens is carried over or refused,
never ignored; the few that do not are listed as dropped; null means the API's default, as it does there.
The sampling extensions that vLLM and SGLang accept in the same body are read too. Source: the API reference
of `/v1/completions` and `/v1/chat/completions`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from harness.corpus.json_lines import read_id
from harness.corpus.traffic import Draft, Prompt, bias_pairs, read_prompt
from harness.request import Grammar
from harness.strict_json import Place, read_choice, read_flag, read_object

ENVELOPE = ("custom_id", "method", "url", "body")
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
SHARED = (
    "temperature",
    "top_p",
    "n",
    "seed",
    "stop",
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
)
ONLY = {
    COMPLETIONS: ("prompt", "logprobs"),
    CHAT: ("messages", "logprobs", "top_logprobs", "max_completion_tokens", "response_format"),
}
DROPPED = ("metadata", "model", "service_tier", "store", "stream", "stream_options", "user")
DEFAULTS: Mapping[str, Mapping[str, object]] = {COMPLETIONS: {"max_tokens": 16}, CHAT: {}}
FORMATS = ("text", "json_object", "json_schema")


def is_batch_line(value: object) -> bool:
    """Whether a line is meant in this format: it has any key of the envelope."""
    return isinstance(value, dict) and any(key in value for key in ENVELOPE)


def read_batch_line(place: Place, value: object) -> Draft:
    """A line of a Batch API input file."""
    fields = read_object(place, value, required=ENVELOPE)
    name = read_id(place.at("custom_id"), fields["custom_id"])
    read_choice(place.at("method"), fields["method"], ("POST",))
    url = read_choice(place.at("url"), fields["url"], tuple(ONLY))
    if fields["url"] != url:  # noted; what the body may hold depends on it
        return Draft(place=place, id=name, id_place=place.at("custom_id"), text="")
    at = place.at("body")
    body = read_body(at, fields["body"], (*ONLY[url], *SHARED, *DROPPED))
    prompt = read_body_prompt(at, body)
    return Draft(
        place=at,
        id=name,
        id_place=place.at("custom_id"),
        text=prompt.text,
        messages=prompt.messages,
        ids=prompt.ids,
        sampling=read_body_sampling(at, body, chat=url == CHAT),
        defaults=DEFAULTS[url],
        grammar=read_format(at.at("response_format"), body.get("response_format")),
        pictures=prompt.pictures,
        dropped=tuple(key for key in DROPPED if key in body),
    )


def read_body(place: Place, value: object, supported: tuple[str, ...]) -> dict[str, object]:
    """The fields of a body that are not null; unsupported ones are noted beside those that are supported."""
    body = read_object(place, value, required=(), optional=tuple(value) if isinstance(value, dict) else ())
    unknown = sorted(set(body) - set(supported))
    if unknown:
        place.say(f"unsupported fields: {', '.join(unknown)}; supported: {', '.join(sorted(supported))}")
    return {key: body[key] for key in supported if body.get(key) is not None}


def read_body_prompt(place: Place, body: Mapping[str, object]) -> Prompt:
    """The prompt of a body; `prompt` may be a string or one list of token ids."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and not any(isinstance(item, (str, list)) for item in prompt):
        return Prompt(ids=prompt)
    if isinstance(prompt, list):
        place.at("prompt").say("expected one prompt, found a list of prompts; write one line for each")
        return Prompt(text="")
    return read_prompt(place, body)


def read_body_sampling(place: Place, body: Mapping[str, object], *, chat: bool) -> dict[str, object]:
    """The sampling fields of a body in the spelling of `requests.jsonl`."""
    sampling = {key: body[key] for key in SHARED if key in body}
    if "logit_bias" in sampling:
        sampling["logit_bias"] = bias_pairs(place.at("logit_bias"), sampling["logit_bias"])
    if isinstance(sampling.get("stop"), str):
        sampling["stop"] = [sampling["stop"]]
    if sampling.get("top_k") == -1:  # the extension's spelling of "off"
        sampling["top_k"] = 0
    if "max_completion_tokens" in body:
        if "max_tokens" in body:
            place.at("max_tokens").say("max_tokens and max_completion_tokens are both given; keep one")
        sampling["max_tokens"] = body["max_completion_tokens"]
    return {**sampling, **read_body_logprobs(place, body, chat=chat)}


def read_body_logprobs(place: Place, body: Mapping[str, object], *, chat: bool) -> dict[str, object]:
    """The number of top logprobs a body asks for; nothing where it asks for none."""
    if not chat:
        return {"logprobs": body["logprobs"]} if "logprobs" in body else {}
    wanted = read_flag(place.at("logprobs"), body["logprobs"]) if "logprobs" in body else False
    if "top_logprobs" not in body:
        return {}
    if not wanted:
        place.at("top_logprobs").say("top_logprobs needs logprobs: true; add it or leave top_logprobs out")
    return {"logprobs": body["top_logprobs"]}


def read_format(place: Place, value: object) -> Grammar | None:
    """The constraint in a `response_format`; None for plain text."""
    if value is None:
        return None
    fields = read_object(place, value, required=("type",), optional=("json_schema",))
    kind = read_choice(place.at("type"), fields["type"], FORMATS)
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar(kind="json_schema", text='{"type": "object"}')
    at = place.at("json_schema")
    named = read_object(
        at,
        fields.get("json_schema", {}),
        required=("schema",),
        optional=("name", "strict", "description"),
    )
    if not isinstance(named["schema"], dict):
        at.at("schema").mistake("a JSON schema (an object)", named["schema"])
    return Grammar(kind="json_schema", text=json.dumps(named["schema"], ensure_ascii=False, default=str))
