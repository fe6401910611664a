"""Which settings of a Python file reach which of its starts: too late, lost to Ray, or replaced by `env=`."""

from __future__ import annotations

import ast
from dataclasses import replace

from harness.doctor.facts import Blocked, EnvSet, Start
from harness.doctor.readers.python_reading import Reading
from harness.doctor.variables import VARIABLES


def mark_late(reading: Reading, setting: EnvSet) -> EnvSet:
    variable = VARIABLES.get(setting.name)
    if variable is None or setting.unset or setting.place in reading.patched:
        return setting
    if setting.name == "PYTHONHASHSEED":
        return replace(setting, late="the interpreter read it when it started")
    line = _effective_line(reading, setting)
    for module, at, function in reading.imports:
        if module.split(".")[0] not in variable.modules:
            continue
        same = function == setting.scope and at < setting.place.line
        before = function == "" and (line is None or at < line)
        if same or before:
            return replace(setting, late=f"`{module.split('.')[0]}` was imported at line {at}")
    return setting


def _effective_line(reading: Reading, setting: EnvSet) -> int | None:
    """When a setting runs, in module lines: its own line, or the first call of the function it is in (None: later)."""
    if not setting.scope:
        return setting.place.line
    return reading.called.get(setting.scope.split(".")[0])


def with_environment(reading: Reading, start: Start, settings: tuple[EnvSet, ...], *, remote: bool) -> Start:
    """A start with the settings that reach it, and those that Ray or a replaced environment keeps away."""
    reaching, blocked = _split_for_ray(reading, settings, remote=remote)
    if start.reach == "replaced":
        reason = "`env=` replaces the whole environment of the child"
        blocked += [Blocked(setting=item, place=start.place, reason=reason) for item in reaching if not item.unset]
        reaching = []
    child = tuple(reading.children.get(start.scope, ()))
    own = (*reaching, *start.settings, *child)
    names = {item.name for item in (*start.settings, *child)}
    blocked = [lost for lost in blocked if lost.setting.name not in names]
    return replace(start, settings=own, blocked=(*start.blocked, *blocked), open=start.open or reading.open, scope="")


def _split_for_ray(
    reading: Reading, settings: tuple[EnvSet, ...], *, remote: bool
) -> tuple[list[EnvSet], list[Blocked]]:
    if not remote or reading.ray is None:
        return list(settings), []
    given, closed = _runtime_variables(reading, reading.ray)
    if not closed:
        return [*settings, *given], []
    inner = {(item.name, item.place) for item in reading.inner}
    reaching = [item for item in settings if (item.name, item.place) in inner]
    names = {item.name for item in (*given, *reaching)}
    reason = "`ray.init` does not pass it to the workers (runtime_env has no env_vars for it)"
    place = reading.place(reading.ray)
    lost = [
        Blocked(setting=item, place=place, reason=reason)
        for item in settings
        if item.name not in names and not item.unset
    ]
    return [*given, *reaching], lost


def _runtime_variables(reading: Reading, call: ast.Call) -> tuple[list[EnvSet], bool]:
    """env_vars of ray.init's runtime_env, and whether they are all that a worker gets from the driver."""
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if None in keywords:
        return [], False
    value = keywords.get("runtime_env")
    if value is None:
        return [], "address" in keywords or bool(call.args)
    table = reading.names.literal(value)
    if not isinstance(table, ast.Dict):
        return [], False
    inner = reading.names.item(table, "env_vars")
    variables = reading.names.literal(inner) if inner is not None else None
    if inner is not None and not isinstance(variables, ast.Dict):
        return [], False
    given = []
    for key, item in zip(variables.keys, variables.values, strict=True) if isinstance(variables, ast.Dict) else ():
        name = reading.names.text(key) if key is not None else None
        if name is None:
            return [], False
        given.append(EnvSet(name=name, value=reading.names.text(item), place=reading.place(item)))
    return given, True
