"""Containers in YAML, in any dialect: a mapping with an image, its environment, its command, its node.

It knows the forms that compose, Kubernetes and Helm values give to `image`, `env`, `command` and `args`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from harness.doctor.command import read_command
from harness.doctor.engines import image_engine, name_hardware
from harness.doctor.facts import EnvSet, Image, Request, Start
from harness.doctor.finding import Place
from harness.doctor.nodes import Node, walk_nodes
from harness.doctor.process import UNKNOWN
from harness.doctor.readers.container_env import read_environment
from harness.doctor.readers.dotenv import expand_default
from harness.doctor.readers.shell import read_fragment

_ARG_KEYS = ("args", "extraArgs", "command_args")


@dataclass(slots=True, kw_only=True)
class Container:
    """One container: where it stands, what it runs, what it is given."""

    name: str
    node: Node
    place: Place
    image: str | None
    image_place: Place
    words: tuple[str, ...] = ()
    words_place: Place
    labels: Mapping[str, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    images: list[Image] = field(default_factory=list)
    settings: list[EnvSet] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Found:
    name: str
    node: Node
    owner: Node  # the pod spec or the service: volumes, node selector
    deployed: bool  # a compose service or a pod's container, not just some mapping with an image
    labels: Mapping[str, str]


def find_containers(path: str, root: Node, config_maps: Mapping[str, list[EnvSet]], *, opened: bool) -> list[Container]:
    """Every container below `root`, in order."""
    return [_read(path, found, config_maps, opened=opened) for found in _find(root)]


def _find(root: Node) -> Iterator[_Found]:
    services = root.get("services") if root.kind == "map" else None
    if services is not None and services.kind == "map":
        for name, node in services.pairs:
            if node.kind == "map":
                yield _Found(name, node, node, True, {})
        return
    seen: set[int] = set()
    stack: list[tuple[str, Node, Node, Mapping[str, str]]] = [("", root, root, {})]
    while stack:
        name, node, owner, labels = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.kind == "map" and _is_container(node):
            yield _Found(node.text("name") or name, node, owner, owner.get("containers") is not None, labels)
            continue
        if node.kind == "map":
            labels = _pod_labels(node) or labels
            owner = node if node.get("containers") is not None else owner
            stack.extend((key, inner, owner, labels) for key, inner in reversed(node.pairs))
        stack.extend((name, inner, owner, labels) for inner in reversed(node.items))


def _is_container(node: Node) -> bool:
    if node.get("containers") is not None or node.get("template") is not None:
        return False
    image = node.get("image")
    if image is not None and (_is_reference(image) or (image.kind == "map" and image.get("repository"))):
        return True
    return bool(node.text("repository") and node.get("tag") is not None and len(node.pairs) > 3)


def _is_reference(image: Node) -> bool:
    """An image reference has no blanks; prose under a key called image has."""
    return (
        image.kind == "scalar" and bool(image.value) and (UNKNOWN in image.value or not re.search(r"\s", image.value))
    )


def _pod_labels(node: Node) -> dict[str, str]:
    metadata = node.get("metadata")
    labels = metadata.get("labels") if metadata is not None and metadata.kind == "map" else None
    if labels is None or labels.kind != "map" or node.get("spec") is None:
        return {}
    return {key: value.value for key, value in labels.pairs if value.kind == "scalar"}


def _read(path: str, found: _Found, config_maps: Mapping[str, list[EnvSet]], *, opened: bool) -> Container:
    node = found.node
    image, image_line = _image(node)
    words, words_line = _words(node)
    container = Container(
        name=found.name,
        node=node,
        place=Place(path, node.line),
        image=image,
        image_place=Place(path, image_line),
        words=tuple(words),
        words_place=Place(path, words_line),
        labels=found.labels,
        aliases=_aliases(node),
    )
    if image and UNKNOWN not in image:
        container.images.append(Image(ref=image, engine=image_engine(image), place=container.image_place))
    settings, is_open = read_environment(path, found.name, node, config_maps)
    container.settings.extend(settings)
    _add_starts(container, found, settings, is_open or ("a template adds to it" if opened else ""))
    return container


def _image(node: Node) -> tuple[str | None, int]:
    image = node.get("image")
    if image is not None and image.kind == "scalar":
        value, _ = expand_default(image.value)
        if value is None:
            value = _expand_inside(image.value)
        return value, image.line
    owner = image if image is not None and image.kind == "map" else node
    repository = owner.get("repository")
    if repository is None or repository.kind != "scalar":
        return None, node.line
    tag = owner.get("tag")
    ref = "/".join(part for part in (owner.text("registry"), repository.value) if part)
    digest = owner.text("digest")
    text = f"{ref}:{tag.value}" if tag is not None and tag.kind == "scalar" and tag.value else ref
    return (f"{text}@{digest}" if digest else text), (tag or repository).line


def _expand_inside(value: str) -> str | None:
    """`repo:${TAG:-v1}` with its default; None when a part stays unknown."""
    text = re.sub(r"\$\{\w+:?-([^${}]*)\}", r"\1", value)
    return re.sub(r"\$\{?\w+\}?", UNKNOWN, text) if "$" in text else text


def _words(node: Node) -> tuple[list[str], int]:
    """Entry point, command and arguments as one list of words, and the line they begin at."""
    words: list[str] = []
    line = node.line
    config = node.get("vllmConfig")
    for owner, key in [
        (node, "entrypoint"),
        (node, "command"),
        *((node, key) for key in _ARG_KEYS),
        (config, "extraArgs"),
    ]:
        value = owner.get(key) if owner is not None and owner.kind == "map" else None
        if value is None:
            continue
        found = _as_words(value)
        script = next((item for item in (value, *value.items) if "\n" in item.value), None)
        if script is not None:
            line = script.line
        elif found and not words:
            line = value.items[0].line if value.items else value.line
        words.extend(found)
    return words, line


def _as_words(value: Node) -> list[str]:
    if value.kind == "list":
        return [_interpolate(item.value) for item in value.items if item.kind == "scalar"]
    if value.kind != "scalar" or not value.value:
        return []
    try:
        return shlex.split(_interpolate(value.value), comments=False)
    except ValueError:
        return _interpolate(value.value).split()


def _interpolate(value: str) -> str:
    value = re.sub(r"\$\{\w+:?-([^${}]*)\}", r"\1", value)
    if len(value) > 60 and ("\n" in value or ";" in value):
        return value  # a script: the shell reader knows its own variables
    return re.sub(r"(?<!\$)\$[{(]?\w+[)}]?", UNKNOWN, value)


def _aliases(node: Node) -> tuple[str, ...]:
    networks = node.get("networks")
    found: list[str] = []
    if networks is not None and networks.kind == "map":
        for _, network in networks.pairs:
            aliases = network.get("aliases") if network.kind == "map" else None
            if aliases is not None:
                found.extend(item.value for item in aliases.items if item.kind == "scalar")
    return tuple(sorted(found))


def _add_starts(container: Container, found: _Found, settings: list[EnvSet], is_open: str) -> None:
    image = container.image or ""
    if not container.words and not found.deployed and not settings:
        return  # a build step or a development container: an image alone starts nothing
    words = ["docker", "run", image or "unknown", *container.words]
    outcome = read_command(words, container.words_place, {}, scope=container.name)
    starts = outcome.starts
    environment = {setting.name: setting for setting in settings}
    if outcome.script:
        script = outcome.script.replace(UNKNOWN, "$UNKNOWN_PART")
        line = container.words_place.line
        inner = read_fragment(container.place.path, script, line - 1, environment, kind="yaml", scope=container.name)
        starts = tuple(replace(start, image=image) for start in inner.starts)
        own = {setting.place for setting in settings}
        container.settings.extend(item for item in inner.settings if item.place not in own)
        container.requests.extend(inner.requests)
    hardware = _hardware(found, image)
    build = _build(found.node)
    for start in starts:
        inside = start.settings if outcome.script else tuple(environment.values())
        container.starts.append(
            replace(
                start,
                settings=inside,
                blocked=start.blocked if outcome.script else (),
                reach="container",
                open=is_open,
                env_files=_env_files(found.node),
                build=build,
                hardware=start.hardware or hardware,
                scope=container.name,
            )
        )


def _build(node: Node) -> str | None:
    build = node.get("build")
    if build is None:
        return None
    return build.value or "." if build.kind == "scalar" else build.text("context") or "."


def _env_files(node: Node) -> tuple[str, ...]:
    value = node.get("env_file")
    if value is None:
        return ()
    if value.kind == "scalar":
        return (value.value,)
    return tuple(item.value if item.kind == "scalar" else item.text("path") for item in value.items)


def _hardware(found: _Found, image: str) -> str:
    words = [image]
    for owner in (found.owner, found.node):
        for key in ("nodeSelector", "affinity", "resources", "tolerations", "runtimeClassName", "devices", "deploy"):
            node = owner.get(key) if owner.kind == "map" else None
            if node is not None:
                for inner in walk_nodes(node):
                    words.extend([inner.value, *(name for name, _ in inner.pairs)])
    return next((family for word in words if word and (family := name_hardware(word)) not in ("", "cpu")), "")
