"""Replicas behind one name that are not the same: image, flags, environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from harness.doctor.facts import Replica
from harness.doctor.finding import Hit, Place, Rule, Severity
from harness.doctor.launch import Scan
from harness.doctor.options import read_options
from harness.doctor.process import UNKNOWN

_OWN = frozenset({"port", "host", "served_model_name", "node_rank", "rank", "dist_init_addr", "nccl_port", "device_id"})
_OWN_SETTINGS = ("VISIBLE_DEVICES", "_PORT", "_HOST", "_RANK", "HOSTNAME", "POD_NAME", "_NAME", "LOG", "_TOKEN", "_KEY")


def _pairs(scan: Scan) -> Iterator[tuple[Replica, Replica]]:
    """Each later member with the first of its group."""
    for document in scan.documents:
        first: dict[str, Replica] = {}
        for replica in document.replicas:
            leader = first.setdefault(replica.group, replica)
            if leader is not replica and leader.place != replica.place:
                yield leader, replica


def _compare(scan: Scan, look: Callable[[Replica, Replica], tuple[Place, str] | None]) -> Iterator[Hit]:
    for leader, replica in _pairs(scan):
        found = look(leader, replica)
        if found is not None:
            place, what = found
            yield Hit(place, f"{replica.name} and {leader.name} share {replica.group}, but {what}", replica.name)


def _images(leader: Replica, replica: Replica) -> tuple[Place, str] | None:
    if leader.image is None or replica.image is None or leader.image == replica.image:
        return None
    return replica.image_place, f"run {replica.image} and {leader.image}"


def _flags(leader: Replica, replica: Replica) -> tuple[Place, str] | None:
    left, right = _options(leader), _options(replica)
    differing = sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))
    if not differing or any(UNKNOWN in word for word in (*leader.command, *replica.command)):
        return None
    return replica.command_place, f"differ in {', '.join(differing[:5])}"


def _options(replica: Replica) -> dict[str, str | None]:
    options, loose = read_options(replica.command, replica.place)
    found = {name: option.value for name, option in options.items() if name not in _OWN}
    found.update({f"word {index + 1}": word for index, word in enumerate(loose)})
    return found


def _settings(leader: Replica, replica: Replica) -> tuple[Place, str] | None:
    names = {
        name
        for name in leader.settings.keys() | replica.settings.keys()
        if not any(part in name for part in _OWN_SETTINGS)
    }
    differing = sorted(name for name in names if leader.settings.get(name, "") != replica.settings.get(name, ""))
    return (replica.place, f"differ in {', '.join(differing[:5])}") if differing else None


def find_images(scan: Scan) -> Iterator[Hit]:
    """Members with different images."""
    yield from _compare(scan, _images)


def find_flags(scan: Scan) -> Iterator[Hit]:
    """Members with different command lines."""
    yield from _compare(scan, _flags)


def find_settings(scan: Scan) -> Iterator[Hit]:
    """Members with different environments."""
    yield from _compare(scan, _settings)


_WHY = "A request lands on either; equal requests get different bits and no log shows it."

RULES = (
    Rule(
        id="replica-image",
        engine="any",
        severity=Severity.ERROR,
        title="Replicas of one service with different images",
        why=_WHY,
        mend="Give all members one image, by digest.",
        scan=find_images,
    ),
    Rule(
        id="replica-flags",
        engine="any",
        severity=Severity.ERROR,
        title="Replicas of one service with different command lines",
        why=_WHY,
        mend="Give all members the same options (ports, hosts and ranks aside).",
        scan=find_flags,
    ),
    Rule(
        id="replica-environment",
        engine="any",
        severity=Severity.ERROR,
        title="Replicas of one service with different environments",
        why=_WHY,
        mend="Set the same variables in all members (devices, ports and names aside).",
        scan=find_settings,
    ),
)
