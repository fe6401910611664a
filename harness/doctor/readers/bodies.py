"""Request bodies: OpenAI-style and native JSON, from curl, JSON files and JSON Lines.

It knows which keys make a mapping a request; a chat log with messages and no model or sampling key is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from harness.doctor.facts import Field, FieldKind, Request
from harness.doctor.finding import Place
from harness.doctor.nodes import Node, Unparsable, parse_json
from harness.doctor.process import UNKNOWN

_PROMPTS = ("messages", "prompt", "input_ids", "text", "input", "inputs", "prompt_token_ids", "token_ids")
NESTED = ("sampling_params", "options", "parameters")  # SGLang, Ollama, TGI
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "max_completion_tokens",
    "max_new_tokens",
    "seed",
    "n",
    "stream",
)


def url_api(url: str) -> str:
    """The api behind a URL: a hosted service by its host, else a self-hosted endpoint."""
    host = re.sub(r"^[a-z]+://", "", url).split("/", 1)[0].lower()
    if host.endswith("anthropic.com"):
        return "anthropic"
    if host.endswith("openai.com"):
        return "openai-responses" if "/responses" in url else "openai"
    native = url.rstrip("/").endswith("/generate") and "/api/" not in url
    return "sglang" if native else "endpoint"


def is_prompted(keys: Iterable[str], url: str) -> bool:
    """Whether posted keys ask a language model: a prompt, and a sampling key unless the path says so already."""
    given = set(keys)
    known_path = url.endswith(("/completions", "/responses", "/messages"))
    sampling = given & {*_SAMPLING, *NESTED} - {"n", "stream", "seed"}
    return bool(given & set(_PROMPTS)) and (known_path or bool(sampling))


def read_curl_body(url: str, payloads: tuple[str, ...], place: Place) -> list[Request]:
    """The requests that curl's data options carry; data that is no request gives none."""
    found = []
    for payload in payloads:
        if payload.startswith("@") or "{" not in payload:
            continue
        try:
            node = parse_json(_fill(payload))
        except Unparsable:
            continue
        if node.kind == "map" and is_prompted([key for key, _ in node.pairs], url.split("?")[0].rstrip("/")):
            found.append(body_request(node, url_api(url), place))
    return found


def _fill(payload: str) -> str:
    """Unknown parts become text that still parses: a bare word outside quotes, plain letters inside."""
    for mark, number in _STAND_INS:
        payload = payload.replace(mark, number)
    return payload


_STAND_INS = (
    (f"{UNKNOWN}RANDOM", "888888888801"),
    (f"{UNKNOWN}CLOCK", "888888888802"),
    (UNKNOWN, "888888888800"),
)
_STAND_IN_KINDS: dict[str, FieldKind] = {
    "888888888801": "random",
    "888888888802": "clock",
    "888888888800": "computed",
}


def is_request(node: Node) -> bool:
    """Whether a map in a file is a request: a prompt, a sampling key, and a model or inner sampling parameters."""
    if node.kind != "map":
        return False
    keys = {key for key, _ in node.pairs}
    has_prompt = any(key in keys for key in _PROMPTS)
    sampling = any(key in keys for key in _SAMPLING) or "sampling_params" in keys
    return has_prompt and sampling and ("model" in keys or "sampling_params" in keys)


def body_request(node: Node, api: str, place: Place | None = None, path: str = "") -> Request:
    """A request from its body; inner sampling parameters count as its own fields."""
    fields: dict[str, Field] = {}
    inners = [inner for key in NESTED if (inner := node.get(key)) is not None and inner.kind == "map"]
    pairs = [*node.lines(), *(pair for inner in inners for pair in inner.lines())]
    for key, value, line in pairs:
        at = place or Place(path, line)
        if value.kind == "scalar":
            kind: FieldKind = "none" if value.plain and value.value == "" else "constant"
            fields[key] = Field(kind=_STAND_IN_KINDS.get(value.value, kind), value=value.value, place=at)
        else:
            fields[key] = Field(kind="computed", value="", place=at)
    if node.get("sampling_params") is not None and api == "endpoint":
        api = "sglang"
    return Request(api=api, place=place or Place(path, node.line), fields=fields)


def find_requests(root: Node, path: str) -> list[Request]:
    """Requests in a JSON value: itself, its list members, or OpenAI Batch lines (`body` under `url`)."""
    found = []
    nodes = root.items if root.kind == "list" else [root]
    for node in nodes:
        body = node.get("body") if node.kind == "map" else None
        target = body if body is not None and body.kind == "map" else node
        if is_request(target):
            found.append(body_request(target, "endpoint", path=path))
    return found
