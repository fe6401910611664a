"""Dockerfiles: stages, ENV, ARG, RUN, CMD and ENTRYPOINT, with continuation lines and here-documents.

A stage inherits the settings of the stage it is built from. Only the last stage is the image; a setting elsewhere that
the last stage does not inherit reaches nothing. `RUN export` ends with its layer.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field, replace

from harness.doctor.command import read_command
from harness.doctor.engines import image_engine
from harness.doctor.facts import Blocked, Document, EnvSet, Image, Install, Problem, Start
from harness.doctor.finding import Place
from harness.doctor.nodes import Unparsable, parse_json
from harness.doctor.readers.shell import read_fragment
from harness.doctor.variables import VARIABLES

_KNOWN = frozenset(
    [
        "ADD",
        "ARG",
        "CMD",
        "COPY",
        "ENTRYPOINT",
        "ENV",
        "EXPOSE",
        "FROM",
        "HEALTHCHECK",
        "LABEL",
        "MAINTAINER",
        "ONBUILD",
        "RUN",
        "SHELL",
        "STOPSIGNAL",
        "USER",
        "VOLUME",
        "WORKDIR",
    ]
)


@dataclass(slots=True, kw_only=True)
class _Stage:
    name: str
    base: str
    settings: dict[str, EnvSet] = field(default_factory=dict)
    entrypoint: tuple[list[str], Place] | None = None
    command: tuple[list[str], Place] | None = None
    shell_form: bool = False


@dataclass(slots=True, kw_only=True)
class _Build:
    path: str
    stages: list[_Stage] = field(default_factory=list)
    arguments: dict[str, str | None] = field(default_factory=dict)
    argument_names: set[str] = field(default_factory=set)
    settings: list[EnvSet] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)
    installs: list[Install] = field(default_factory=list)
    blocked: list[Blocked] = field(default_factory=list)


def read_dockerfile(path: str, text: str) -> Document:
    """A Dockerfile as facts; an unknown instruction is a problem."""
    build = _Build(path=path)
    for name, rest, line, heredoc in _instructions(text):
        if name not in _KNOWN:
            problem = Problem(line=line, text=f"`{name[:30]}` is no Dockerfile instruction")
            return Document(path=path, kind="dockerfile", problem=problem, text=text)
        if name != "FROM" and not build.stages and name != "ARG":
            problem = Problem(line=line, text=f"`{name}` stands before the first FROM")
            return Document(path=path, kind="dockerfile", problem=problem, text=text)
        _take(build, name, rest, line, heredoc)
    if not build.stages:
        problem = Problem(line=1, text="there is no FROM")
        return Document(path=path, kind="dockerfile", problem=problem, text=text)
    return _document(build, text)


def _document(build: _Build, text: str) -> Document:
    last = build.stages[-1]
    reaching = [setting for setting in build.settings if setting in last.settings.values()]
    for setting in build.settings:
        inherited = any(setting.scope == name for name in _ancestry(build, last))
        if not inherited and setting.name in VARIABLES:
            reason = f"it is set in build stage `{setting.scope}`, which the final image does not come from"
            build.blocked.append(Blocked(setting=setting, place=setting.place, reason=reason))
    start = _start(build, last)
    return Document(
        path=build.path,
        kind="dockerfile",
        settings=tuple(reaching),
        starts=(start,) if start else (),
        images=tuple(build.images),
        installs=tuple(build.installs),
        blocked=tuple(build.blocked),
        text=text,
    )


def _ancestry(build: _Build, stage: _Stage) -> list[str]:
    names = [stage.name]
    by_name = {item.name: item for item in build.stages}
    while stage.base in by_name and stage.base not in names:
        stage = by_name[stage.base]
        names.append(stage.name)
    return names


def _instructions(text: str) -> list[tuple[str, str, int, str]]:
    """(name, rest, first line, here-document body) of each instruction."""
    lines = text.splitlines()
    escape = "`" if re.match(r"#\s*escape\s*=\s*`", text) else "\\"
    found: list[tuple[str, str, int, str]] = []
    index = 0
    while index < len(lines):
        line = lines[index].strip()
        first = index + 1
        index += 1
        if not line or line.startswith("#"):
            continue
        parts = [line]
        while parts[-1].endswith(escape) and index < len(lines):
            parts[-1] = parts[-1][:-1]
            following = lines[index].strip()
            index += 1
            if following.startswith("#") or not following:
                parts.append(escape)
                continue
            parts.append(following)
        whole = " \n".join(part.removesuffix(escape) for part in parts)
        body, index = _heredoc(whole, lines, index)
        name, _, rest = whole.partition(" ")
        found.append((name.strip().upper(), rest.strip(), first, body))
    return found


def _heredoc(whole: str, lines: list[str], index: int) -> tuple[str, int]:
    match = re.match(r"(RUN|COPY)\b[^\n]*?<<-?\s*['\"]?(\w+)", whole, re.IGNORECASE)
    if not match:
        return "", index
    body: list[str] = []
    while index < len(lines) and lines[index].strip() != match[2]:
        body.append(lines[index])
        index += 1
    return "\n".join(body), index + 1


def _take(build: _Build, name: str, rest: str, line: int, heredoc: str) -> None:
    place = Place(build.path, line)
    if name == "FROM":
        _take_from(build, rest, place)
    elif name == "ARG":
        key, _, value = rest.partition("=")
        build.arguments[key.strip()] = value.strip().strip("\"'") or None
        build.argument_names.add(key.strip())
    elif name == "ENV":
        _take_env(build, rest, place)
    elif name == "RUN":
        _take_run(build, rest, line, heredoc)
    elif name in ("CMD", "ENTRYPOINT"):
        _take_command(build.stages[-1], name, rest, place)


def _take_from(build: _Build, rest: str, place: Place) -> None:
    words = [word for word in rest.split() if not word.startswith("--")]
    base = words[0] if words else ""
    for key, value in build.arguments.items():
        pieces = re.split(rf"\$\{{?{re.escape(key)}(?::?-[^}}]*)?\}}?", base)
        base = (value or "$").join(pieces)
    name = words[2] if len(words) > 2 and words[1].upper() == "AS" else str(len(build.stages))
    parent = next((stage for stage in build.stages if stage.name == base), None)
    stage = _Stage(name=name, base=base)
    if parent is not None:
        stage.settings.update(parent.settings)
        stage.entrypoint, stage.command = parent.entrypoint, parent.command
    elif base and "$" not in base:
        build.images.append(Image(ref=base, engine=image_engine(base), place=place))
    build.stages.append(stage)


def _take_env(build: _Build, rest: str, place: Place) -> None:
    stage = build.stages[-1]
    if re.match(r"\S+=", rest):
        pairs = _split_pairs(rest, place)
    else:
        key, _, value = rest.partition(" ")
        pairs = [(key, value.strip().strip("\"'"), place)]
    for key, value, at in pairs:
        text, how = _resolve(build, value)
        setting = EnvSet(name=key, value=text, place=at, overridable=how, scope=stage.name)
        stage.settings[key] = setting
        build.settings.append(setting)


def _split_pairs(rest: str, place: Place) -> list[tuple[str, str, Place]]:
    pairs = []
    for offset, line in enumerate(rest.split("\n")):
        try:
            words = shlex.split(line)
        except ValueError:
            words = line.split()
        for word in words:
            key, equals, value = word.partition("=")
            if equals:
                pairs.append((key, value, Place(place.path, place.line + offset)))
    return pairs


def _resolve(build: _Build, value: str) -> tuple[str | None, str]:
    match = re.fullmatch(r"\$\{?(\w+)(?::-([^}]*))?\}?", value)
    if match is None:
        return (None, "") if "$" in value else (value, "")
    if match[2] is not None:
        return match[2], value
    if match[1] in build.argument_names:
        known = build.arguments.get(match[1])
        return known, f"--build-arg {match[1]}" if known is not None else ""
    return None, ""


def _take_run(build: _Build, rest: str, line: int, heredoc: str) -> None:
    stage = build.stages[-1]
    text = re.sub(r"^(--\w+(=\S+)?\s+)+", "", rest).replace(" \n", " \\\n")
    if heredoc:
        text, line = heredoc, line + 1
    inner = read_fragment(build.path, text, line - 1, stage.settings, kind="dockerfile", scope=stage.name)
    build.installs.extend(inner.installs)
    for setting in inner.settings:
        if setting.name in VARIABLES and not setting.unset:
            reason = "`RUN` sets it for that one build step; the image does not keep it"
            build.blocked.append(Blocked(setting=setting, place=setting.place, reason=reason))


def _take_command(stage: _Stage, name: str, rest: str, place: Place) -> None:
    words = _exec_form(rest)
    if words is None:
        words = ["/bin/sh", "-c", rest]
    if name == "CMD":
        stage.command = (words, place)
    else:
        stage.entrypoint = (words, place)
        stage.command = None


def _exec_form(rest: str) -> list[str] | None:
    if not rest.startswith("["):
        return None
    try:
        node = parse_json(rest)
    except Unparsable:
        return None
    return [item.value for item in node.items if item.kind == "scalar"]


def _start(build: _Build, stage: _Stage) -> Start | None:
    words: list[str] = []
    place = Place(build.path, 1)
    for part in (stage.entrypoint, stage.command):
        if part is not None:
            words, place = [*words, *part[0]], part[1]
    if not words:
        return None
    roots = _ancestry(build, stage)
    base = next((item.base for item in build.stages if item.name == roots[-1]), "")
    outcome = read_command(["docker", "run", base or "scratch", *words], place, {})
    settings = tuple(stage.settings.values())
    if outcome.script:
        inner = read_fragment(build.path, outcome.script, place.line - 1, dict(stage.settings), kind="dockerfile")
        starts = inner.starts
    else:
        starts = tuple(replace(start, settings=settings, blocked=()) for start in outcome.starts)
    if not starts:
        return None
    return replace(starts[0], reach="container", scope="", env_files=())
