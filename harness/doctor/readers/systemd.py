"""systemd units: Environment=, EnvironmentFile=, ExecStart=, with continuation lines."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace

from harness.doctor.command import Outcome, read_command
from harness.doctor.facts import Document, EnvSet, Image, Problem, Start
from harness.doctor.finding import Place
from harness.doctor.readers.shell import read_fragment


def read_systemd(path: str, text: str) -> Document:
    """A unit as facts. Drop-ins (`*.service.d/*.conf`) carry settings and no start."""
    settings: dict[str, EnvSet] = {}
    all_settings: list[EnvSet] = []
    files: list[str] = []
    starts: list[Start] = []
    images: list[Image] = []
    section = ""
    for line, number in _logical_lines(text):
        if line.startswith("["):
            section = line.strip("[] ")
            continue
        key, equals, value = line.partition("=")
        if not equals:
            problem = Problem(line=number, text=f"`{line[:40]}` is neither a section nor a setting")
            return Document(path=path, kind="systemd", problem=problem, text=text)
        if section != "Service":
            continue
        place = Place(path, number)
        key, value = key.strip(), value.strip()
        if key == "Environment":
            for setting in _read_environment(value, place):
                settings[setting.name] = setting
                all_settings.append(setting)
        elif key == "UnsetEnvironment":
            for name in value.split():
                settings[name] = EnvSet(name=name, value=None, place=place, unset=True)
                all_settings.append(settings[name])
        elif key == "EnvironmentFile":
            files.append(value.lstrip("-"))
        elif key == "ExecStart" and value:
            outcome = _read_exec(path, value, place, settings)
            starts.extend(outcome.starts)
            images.extend(outcome.images)
    final = [_finish(start, settings, files) for start in starts]
    return Document(
        path=path,
        kind="systemd",
        settings=tuple(all_settings),
        starts=tuple(final),
        images=tuple(images),
        sources=tuple(files),
        text=text,
    )


def _finish(start: Start, settings: dict[str, EnvSet], files: list[str]) -> Start:
    """Environment= counts wherever it stands in the unit, also below ExecStart=."""
    lost = {blocked.setting.name for blocked in start.blocked}
    named = {setting.name for setting in start.settings}
    rest = [item for name, item in settings.items() if name not in named and name not in lost and not start.reach]
    return replace(
        start,
        settings=(*rest, *start.settings),
        env_files=(*start.env_files, *files),
        reach=start.reach or "unit",
    )


def _logical_lines(text: str) -> list[tuple[str, int]]:
    lines: list[tuple[str, int]] = []
    pending, first = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not pending and (not line or line[0] in "#;"):
            continue
        if pending and line[:1] in ("#", ";"):
            continue
        first = first if pending else number
        if line.endswith("\\"):
            pending += line[:-1] + " "
            continue
        lines.append((pending + line, first))
        pending = ""
    if pending.strip():
        lines.append((pending.strip(), first))
    return lines


def _read_environment(value: str, place: Place) -> list[EnvSet]:
    found = []
    for word in _split(value):
        name, equals, text = word.partition("=")
        if equals and re.fullmatch(r"[A-Za-z_]\w*", name):
            known = None if re.search(r"%[A-Za-z]|\$\{", text) else text
            found.append(EnvSet(name=name, value=known, place=place))
    return found


def _split(value: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError:
        return value.split()


def _read_exec(path: str, value: str, place: Place, settings: dict[str, EnvSet]) -> Outcome:
    words = _split(value.lstrip("-@:+!"))
    outcome = read_command([re.sub(r"\$\{?\w+\}?", "\0", word) for word in words], place, settings)
    if not outcome.script:
        return outcome
    raw = next((word for word in reversed(words) if " " in word), outcome.script)
    inner = read_fragment(path, raw, place.line - 1, settings, kind="systemd")
    return replace(outcome, starts=inner.starts)
