"""Request bodies: OpenAI-style and native JSON, from curl, JSON files and JSON Lines.

It knows which keys make a mapping a request; a chat log with messages and no model or sampling key is none.
"""

from __future__ import annotations

import re

from harness.doctor.command import UNKNOWN
from harness.doctor.facts import Field, FieldKind, Request
from harness.doctor.finding import Place
from harness.doctor.nodes import Node, Unparsable, parse_json

_PROMPTS = ("messages", "prompt", "input_ids", "text", "input")
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
    return "sglang" if url.rstrip("/").endswith("/generate") else "endpoint"


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
        if is_request(node, need_model=False):
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


def is_request(node: Node, *, need_model: bool = True) -> bool:
    """Whether a map is a request: a prompt, and a model or a sampling key (both, in files)."""
    if node.kind != "map":
        return False
    keys = {key for key, _ in node.pairs}
    has_prompt = any(key in keys for key in _PROMPTS)
    sampling = any(key in keys for key in _SAMPLING) or "sampling_params" in keys
    return has_prompt and sampling and ("model" in keys or "sampling_params" in keys or not need_model)


def body_request(node: Node, api: str, place: Place | None = None, path: str = "") -> Request:
    """A request from its body; `sampling_params` inside it counts as its own fields."""
    fields: dict[str, Field] = {}
    inner = node.get("sampling_params")
    pairs = [*node.lines(), *(inner.lines() if inner is not None and inner.kind == "map" else ())]
    for key, value, line in pairs:
        at = place or Place(path, line)
        if value.kind == "scalar":
            kind: FieldKind = "none" if value.plain and value.value == "" else "constant"
            fields[key] = Field(kind=_STAND_IN_KINDS.get(value.value, kind), value=value.value, place=at)
        else:
            fields[key] = Field(kind="computed", value="", place=at)
    if inner is not None and api == "endpoint":
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
