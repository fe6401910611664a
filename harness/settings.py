"""Resolves engine settings: defaults, then mode, then `--set`, then the cell's, each checked against the adapter.

It does not know what a setting means. Rules: an unknown name or value is refused with a suggestion; a string from the
command line becomes the type of the default; every setting is explicit in the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from harness.engine import Adapter, Scalar, Setting
from harness.errors import UsageError
from harness.suggest import did_you_mean

Settings = tuple[tuple[str, Scalar], ...]  # sorted by name


def parse_assignments(adapter: Adapter, assignments: Iterable[str]) -> dict[str, Scalar]:
    """`key=value` strings as typed settings. Raises UsageError."""
    known = {setting.name: setting for setting in adapter.settings()}
    result: dict[str, Scalar] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text!r}: expected key=value")
        setting = _setting(adapter, known, key, f"--set {text}")
        result[key] = checked(setting, _typed(setting, value, f"--set {text}"), f"--set {text}")
    return result


def mode_settings(adapter: Adapter, mode: str, where: str) -> Mapping[str, Scalar]:
    """The settings a mode stands for. Raises UsageError."""
    modes = adapter.modes()
    if mode not in modes:
        raise UsageError(f"{where}: engine {adapter.name!r} has no mode {mode!r}; {did_you_mean(mode, modes)}")
    return modes[mode]


def resolve(adapter: Adapter, layers: Iterable[tuple[str, Mapping[str, Scalar]]]) -> Settings:
    """Every setting of the engine, later layers winning. A layer is (where it comes from, values)."""
    known = {setting.name: setting for setting in adapter.settings()}
    result: dict[str, Scalar] = {name: setting.default for name, setting in known.items()}
    for where, values in layers:
        for key in sorted(values):
            result[key] = checked(_setting(adapter, known, key, where), values[key], f"{where}: {key}")
    return tuple(sorted(result.items()))


def checked(setting: Setting, value: Scalar, where: str) -> Scalar:
    """The value, if the setting takes it. Raises UsageError."""
    if type(value) is not type(setting.default):
        kind = type(setting.default).__name__
        raise UsageError(f"{where}: expected {kind}, got {value!r} ({type(value).__name__})")
    if setting.choices and value not in setting.choices:
        choices = [str(choice) for choice in setting.choices]
        raise UsageError(f"{where}: {value!r} is not offered; {did_you_mean(str(value), choices)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{where}: expected a finite number, got {value}")
    if setting.minimum is not None and isinstance(value, int | float) and not value >= setting.minimum:
        raise UsageError(f"{where}: expected at least {setting.minimum}, got {value}")
    return value


def _setting(adapter: Adapter, known: Mapping[str, Setting], key: str, where: str) -> Setting:
    if key not in known:
        raise UsageError(f"{where}: engine {adapter.name!r} has no setting {key!r}; {did_you_mean(key, known)}")
    return known[key]


def _typed(setting: Setting, text: str, where: str) -> Scalar:
    kind = type(setting.default)
    if kind is str:
        return text
    if kind is bool:
        if text in ("true", "false"):
            return text == "true"
        raise UsageError(f"{where}: expected true or false, got {text!r}")
    try:
        return int(text) if kind is int else float(text)
    except ValueError:
        raise UsageError(f"{where}: expected {kind.__name__}, got {text!r}") from None
