"""JSON, JSON Lines and TOML files: request bodies, environment tables, a model's config.json."""

from __future__ import annotations

import re

from harness.doctor.facts import Document, EnvSet, Problem, Request
from harness.doctor.finding import Place
from harness.doctor.nodes import Node, Unparsable, parse_json, parse_toml
from harness.doctor.readers.bodies import find_requests
from harness.doctor.readers.containers import find_containers

_ENV_TABLES = frozenset({"env", "environment", "env_vars", "variables"})


def read_json(path: str, text: str) -> Document:
    """A JSON file as facts; comments and trailing commas are let through."""
    if not text.strip():
        return Document(path=path, kind="json", text=text)
    try:
        root = parse_json(text)
    except Unparsable as error:
        return Document(path=path, kind="json", problem=Problem(line=error.line, text=error.text), text=text)
    return _document(path, "json", text, root, find_requests(root, path))


def read_jsonl(path: str, text: str) -> Document:
    """A JSON Lines file: every line is read for a request; the first bad line is the problem."""
    requests: list[Request] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            requests.extend(find_requests(parse_json(line, number), path))
        except Unparsable as error:
            problem = Problem(line=number, text=error.text)
            return Document(path=path, kind="jsonl", problem=problem, text=text)
    return Document(path=path, kind="jsonl", requests=tuple(requests), text=text)


def read_toml(path: str, text: str) -> Document:
    """A TOML file as facts."""
    try:
        root = parse_toml(text)
    except Unparsable as error:
        return Document(path=path, kind="toml", problem=Problem(line=error.line, text=error.text), text=text)
    return _document(path, "toml", text, root, [])


def _document(path: str, kind: str, text: str, root: Node, requests: list[Request]) -> Document:
    containers = find_containers(path, root, {}, opened=False) if root.kind == "map" else []
    settings = [*_env_tables(path, root), *(item for box in containers for item in box.settings)]
    return Document(
        path=path,
        kind=kind,
        settings=tuple(settings),
        starts=tuple(start for box in containers for start in box.starts),
        images=tuple(image for box in containers for image in box.images),
        requests=tuple(requests),
        head_dim=_head_dim(root),
        text=text,
    )


def _env_tables(path: str, root: Node) -> list[EnvSet]:
    """Tables called env or environment, at the top or one level down."""
    found: list[EnvSet] = []
    tops = [root, *(node for _, node in root.pairs if node.kind == "map")]
    for owner in tops:
        for key, node, _ in owner.lines():
            if key.lower() in _ENV_TABLES and node.kind == "map" and owner.get("image") is None:
                found.extend(
                    EnvSet(name=name, value=value.value, place=Place(path, line))
                    for name, value, line in node.lines()
                    if value.kind == "scalar" and re.fullmatch(r"[A-Z][A-Z0-9_]*", name)
                )
    return found


def _head_dim(root: Node) -> int | None:
    """The head size of a Hugging Face config.json: stated, or hidden_size over heads."""
    if root.kind != "map" or not root.text("num_attention_heads"):
        return None
    if root.text("head_dim").isdecimal():
        return int(root.text("head_dim"))
    hidden, heads = root.text("hidden_size"), root.text("num_attention_heads")
    if hidden.isdecimal() and heads.isdecimal() and int(heads):
        return int(hidden) // int(heads)
    return None
