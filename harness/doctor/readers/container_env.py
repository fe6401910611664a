"""A container's environment in every form YAML gives it: maps, lists, name/value pairs, references, ConfigMaps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from harness.doctor.facts import EnvSet
from harness.doctor.finding import Place
from harness.doctor.nodes import Node
from harness.doctor.process import UNKNOWN
from harness.doctor.readers.dotenv import expand_default

_ENV_KEYS = ("environment", "env", "envs", "extraEnv", "extraEnvVars", "envVars", "extraEnvs")


def read_environment(
    path: str, scope: str, container: Node, config_maps: Mapping[str, list[EnvSet]]
) -> tuple[list[EnvSet], str]:
    """Settings in order, and why the environment cannot be known in full ("" when it can)."""
    settings, is_open = _env_from(container, config_maps)
    for key in _ENV_KEYS:
        value = container.get(key)
        if value is None:
            continue
        if value.kind == "map":
            pairs = [_map_entry(path, scope, name, inner, line) for name, inner, line in value.lines()]
            settings.extend(item for item in pairs if item is not None)
            if any(UNKNOWN in item.name for item in settings):
                is_open = is_open or "a template writes it"
        for item in value.items:
            entry, maybe_open = _list_entry(path, scope, item, config_maps)
            is_open = is_open or maybe_open
            if entry is not None:
                settings.append(entry)
        if value.kind == "scalar" and UNKNOWN in value.value:
            is_open = is_open or "a template writes it"
    return settings, is_open


def _map_entry(path: str, scope: str, name: str, node: Node, line: int) -> EnvSet | None:
    if node.kind != "scalar":
        return None
    if node.plain and node.value in ("", "~", "null"):
        return None  # compose: passed through from the shell that runs it
    return _env_set(name, node.value, Place(path, line), scope)


def _env_set(name: str, raw: str, place: Place, scope: str) -> EnvSet:
    value, how = expand_default(raw)
    return EnvSet(
        name=name,
        value=None if value is None or UNKNOWN in value else value,
        place=place,
        overridable=how,
        scope=scope,
    )


def _list_entry(
    path: str, scope: str, item: Node, config_maps: Mapping[str, list[EnvSet]]
) -> tuple[EnvSet | None, str]:
    place = Place(path, item.line)
    if item.kind == "scalar":
        name, equals, text = item.value.partition("=")
        if UNKNOWN in name:
            return None, "a template writes it"
        return (_env_set(name.strip(), text, place, scope), "") if equals else (None, "")
    if item.kind != "map":
        return None, ""
    name = item.text("name")
    value = item.get("value")
    if value is not None and value.kind == "scalar":
        return EnvSet(name=name, value=None if UNKNOWN in value.value else value.value, place=place, scope=scope), ""
    source = item.get("valueFrom")
    reference = source.get("configMapKeyRef") if source is not None and source.kind == "map" else None
    if reference is not None and reference.text("name") in config_maps:
        for setting in config_maps[reference.text("name")]:
            if setting.name == reference.text("key"):
                return replace(setting, name=name, scope=scope), ""
    return (EnvSet(name=name, value=None, place=place, scope=scope), "") if name else (None, "")


def _env_from(node: Node, config_maps: Mapping[str, list[EnvSet]]) -> tuple[list[EnvSet], str]:
    settings: list[EnvSet] = []
    is_open = ""
    source = node.get("envFrom")
    for item in source.items if source is not None else ():
        reference = item.get("configMapRef") if item.kind == "map" else None
        name = reference.text("name") if reference is not None else ""
        if name in config_maps:
            settings.extend(config_maps[name])
        elif reference is not None:
            is_open = is_open or f"ConfigMap `{name}` is not among the files read".replace(UNKNOWN, "…")
        elif item.kind == "map" and item.get("secretRef") is None:
            is_open = is_open or "envFrom"
    return settings, is_open
