"""Members behind one name: what a Kubernetes Service selects, compose services with one alias or stem."""

from __future__ import annotations

import re
from collections.abc import Iterable

from harness.doctor.facts import Replica
from harness.doctor.nodes import Node
from harness.doctor.process import UNKNOWN
from harness.doctor.readers.containers import Container


def service_replicas(roots: Iterable[Node], containers: list[Container]) -> list[Replica]:
    """For each Kubernetes Service of the file: the engine containers its selector matches."""
    found = []
    for root in roots:
        if root.kind != "map" or root.text("kind") != "Service":
            continue
        spec, metadata = root.get("spec"), root.get("metadata")
        selector = spec.get("selector") if spec is not None and spec.kind == "map" else None
        if selector is None or selector.kind != "map" or not selector.pairs:
            continue
        wanted = {(key, node.value) for key, node in selector.pairs}
        name = metadata.text("name") if metadata is not None else ""
        for container in containers:
            if wanted <= set(container.labels.items()):
                found.extend(_replica(f"service {name}", container))
    return found


def compose_replicas(containers: list[Container]) -> list[Replica]:
    """Compose services that share a network alias, or a name up to its number (`vllm-1`, `vllm-2`)."""
    found = []
    for container in containers:
        groups = {f"alias {alias}" for alias in container.aliases}
        match = re.fullmatch(r"(.*[A-Za-z])[-_]?\d+", container.name)
        if match and not groups:
            groups.add(f"name {match[1]}")
        for group in sorted(groups):
            found.extend(_replica(group, container))
    return found


def _replica(group: str, container: Container) -> list[Replica]:
    if not container.starts or not container.starts[0].engine:
        return []
    image = container.image
    settings = {setting.name: setting.value for setting in container.settings}
    return [
        Replica(
            group=group,
            name=container.name,
            image=None if image is None or UNKNOWN in image else image,
            command=container.words,
            settings=settings,
            place=container.place,
            image_place=container.image_place,
            command_place=container.words_place,
        )
    ]
