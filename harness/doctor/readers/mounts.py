"""Mounts on media that die with the container: emptyDir volumes and tmpfs."""

from __future__ import annotations

from collections.abc import Iterator

from harness.doctor.facts import Mount
from harness.doctor.finding import Place
from harness.doctor.nodes import Node, walk_nodes


def read_mounts(path: str, root: Node) -> list[Mount]:
    """Mounts on media that die with the container: emptyDir volumes and tmpfs."""
    mounts: list[Mount] = []
    for node in walk_nodes(root):
        if node.kind != "map":
            continue
        empty = _empty_volumes(node)
        containers = node.get("containers")
        for container in containers.items if containers is not None and empty else ():
            mounted = container.get("volumeMounts") if container.kind == "map" else None
            items = mounted.items if mounted is not None else []
            hit = [item for item in items if item.text("name") in empty]
            mounts.extend(_mount(path, item, "emptyDir", container.text("name")) for item in hit)
    mounts.extend(_tmpfs(path, root))
    return mounts


def _mount(path: str, item: Node, medium: str, scope: str) -> Mount:
    return Mount(path=item.text("mountPath"), medium=medium, place=Place(path, item.line), scope=scope)


def _empty_volumes(node: Node) -> set[str]:
    volumes = node.get("volumes")
    if volumes is None:
        return set()
    return {item.text("name") for item in volumes.items if item.kind == "map" and item.get("emptyDir") is not None}


def _tmpfs(path: str, root: Node) -> Iterator[Mount]:
    services = root.get("services") if root.kind == "map" else None
    for name, service in services.pairs if services is not None else ():
        tmpfs = service.get("tmpfs") if service.kind == "map" else None
        if tmpfs is None:
            continue
        for item in tmpfs.items or ([tmpfs] if tmpfs.kind == "scalar" else []):
            target = item.value.split(":", 1)[0]
            yield Mount(path=target, medium="tmpfs", place=Place(path, item.line), scope=name)
