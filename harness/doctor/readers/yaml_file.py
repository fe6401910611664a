"""YAML files: compose, Kubernetes manifests, Helm values and templates, engine configuration files.

It knows which mapping is a container: one with an image. Template actions (`{{ … }}`) are set aside: a scalar that
holds one is unknown, a line that is nothing but one is blank, and what it might have added leaves the environment open.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from harness.doctor.facts import Document, EnvSet, Image, Mount, Problem, Replica, Request, Start
from harness.doctor.finding import Place
from harness.doctor.nodes import Node, Unparsable, parse_yaml, walk_nodes
from harness.doctor.process import UNKNOWN
from harness.doctor.readers.containers import Container, find_containers
from harness.doctor.readers.mounts import read_mounts
from harness.doctor.readers.replicas import compose_replicas, service_replicas

TEMPLATED = "\ufffdtemplate\ufffd"
MAX_LINE = 20_000
_ACTION_LINE = re.compile(r"^\s*\{\{.*\}\}\s*(#.*)?$")
_ACTION_KEY = re.compile(r"^\s*\{\{[^}]*\}\}\s*:")
_WRITES = re.compile(r"include|toYaml|range|tpl|template|with")


@dataclass(slots=True)
class _Gathered:
    containers: list[Container] = field(default_factory=list)
    settings: list[EnvSet] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)
    mounts: list[Mount] = field(default_factory=list)
    replicas: list[Replica] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)


def read_yaml(path: str, text: str) -> Document:
    """A YAML file as facts; `problem` is set when it is no YAML, template actions set aside."""
    templated = "{{" in text
    plain, opened = neutralise(text) if templated else (text, False)
    try:
        roots = parse_yaml(plain)
    except Unparsable as error:
        words = f"{error.text} (even with its template actions set aside)" if templated else error.text
        return Document(path=path, kind="yaml", problem=Problem(line=error.line, text=words), text=text)
    gathered = _Gathered()
    for root in roots:
        for node in walk_nodes(root):
            if node.kind == "scalar" and TEMPLATED in node.value:
                node.value = node.value.replace(TEMPLATED, UNKNOWN)
    config_maps = _config_maps(path, roots)
    for root in roots:
        _gather(gathered, path, root, config_maps, opened=opened)
    gathered.replicas += service_replicas(roots, gathered.containers)
    return Document(
        path=path,
        kind="yaml",
        settings=tuple(gathered.settings),
        starts=tuple(gathered.starts),
        requests=tuple(gathered.requests),
        images=tuple(gathered.images),
        mounts=tuple(gathered.mounts),
        replicas=tuple(gathered.replicas),
        text=text,
    )


def neutralise(text: str) -> tuple[str, bool]:
    """The text without template actions, lines kept, and whether a whole line came from a template."""
    opened = False
    lines = []
    for line in _join_actions(text).split("\n"):
        if len(line) > MAX_LINE:
            lines.append(line)
        elif _ACTION_LINE.match(line) and not _ACTION_KEY.match(line):
            opened = opened or bool(_WRITES.search(line))
            lines.append("")
        else:
            lines.append(_set_aside(line))
    return "\n".join(lines), opened


def _set_aside(line: str) -> str:
    """The line with TEMPLATED for each action; linear in its length, whatever it holds."""
    parts: list[str] = []
    position = 0
    while (begin := line.find("{{", position)) >= 0 and (end := line.find("}}", begin)) >= 0:
        parts += [line[position:begin], TEMPLATED]
        position = end + 2
    return "".join(parts) + line[position:]


def _join_actions(text: str) -> str:
    """An action over several lines moves to its first line; as many blank lines follow."""
    parts: list[str] = []
    position = 0
    while (begin := text.find("{{", position)) >= 0:
        end = text.find("}}", begin)
        if end < 0:
            break
        action = text[begin : end + 2]
        if "\n" in action and len(action) < MAX_LINE:
            rest = text.find("\n", end)
            tail = text[end + 2 : rest if rest >= 0 else len(text)]
            parts.append(text[position:begin] + " ".join(action.split()) + tail + "\n" * action.count("\n"))
            position = rest if rest >= 0 else len(text)
        else:
            parts.append(text[position : end + 2])
            position = end + 2
    return "".join(parts) + text[position:]


def _config_maps(path: str, roots: list[Node]) -> dict[str, list[EnvSet]]:
    """Settings of the ConfigMaps in this file, by name."""
    found: dict[str, list[EnvSet]] = {}
    for root in roots:
        if root.kind != "map" or root.text("kind") != "ConfigMap":
            continue
        metadata = root.get("metadata")
        data = root.get("data")
        if metadata is None or data is None or data.kind != "map":
            continue
        found[metadata.text("name")] = [
            EnvSet(
                name=key,
                value=None if UNKNOWN in node.value else node.value,
                place=Place(path, line),
                scope=f"configmap {metadata.text('name')}",
            )
            for key, node, line in data.lines()
            if node.kind == "scalar"
        ]
    return found


def _gather(gathered: _Gathered, path: str, root: Node, config_maps: dict[str, list[EnvSet]], *, opened: bool) -> None:
    if root.kind == "map" and root.text("kind") == "ConfigMap":
        return
    for settings in config_maps.values():
        gathered.settings.extend(item for item in settings if item not in gathered.settings)
    containers = find_containers(path, root, config_maps, opened=opened)
    for container in containers:
        gathered.images.extend(container.images)
        gathered.settings.extend(container.settings)
        gathered.starts.extend(container.starts)
        gathered.requests.extend(container.requests)
    gathered.mounts.extend(read_mounts(path, root))
    if root.kind == "map" and root.get("services") is not None:
        gathered.replicas.extend(compose_replicas(containers))
    gathered.containers.extend(containers)
