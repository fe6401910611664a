"""Environment files: NAME=VALUE lines, `export` allowed, quotes taken off."""

from __future__ import annotations

import re

from harness.doctor.facts import Document, EnvSet, Problem
from harness.doctor.finding import Place

_LINE = re.compile(r"(?:export\s+)?([A-Za-z_][\w.]*)\s*=(.*)$", re.DOTALL)


def read_dotenv(path: str, text: str) -> Document:
    """An environment file as settings. A line that is no assignment is a problem."""
    settings = []
    problem = None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.match(line.strip())
        if match is None:
            if "=" in line or problem is None:
                problem = problem or _complain(number, line)
            continue
        value, overridable = read_env_value(match[2].strip())
        settings.append(EnvSet(name=match[1], value=value, place=Place(path, number), overridable=overridable))
    return Document(path=path, kind="dotenv", settings=tuple(settings), problem=problem, text=text)


def _complain(number: int, line: str) -> Problem | None:
    if re.fullmatch(r"\s*(export\s+)?[A-Za-z_]\w*\s*", line):
        return None  # a bare name passes the variable through
    return Problem(line=number, text=f"`{line.strip()[:40]}` is no NAME=VALUE line")


def read_env_value(text: str) -> tuple[str | None, str]:
    """The value without quotes and comment, None when it refers elsewhere, and how it can be overridden."""
    quoted = re.match(r"(['\"])(.*?)\1\s*(#.*)?$", text, re.DOTALL)
    value = quoted[2] if quoted else _without_comment(text)
    if quoted and quoted[1] == "'":
        return value, ""
    return expand_default(value)


def _without_comment(text: str) -> str:
    """The text before the first `#` that follows a blank."""
    at = text.find("#")
    while at > 0 and not text[at - 1].isspace():
        at = text.find("#", at + 1)
    return text[:at].strip() if at > 0 else text


def expand_default(value: str) -> tuple[str | None, str]:
    """`${NAME:-default}` as (default, how); any other reference as (None, "")."""
    match = re.fullmatch(r"\$\{(\w+):?[-=]([^${}]*)\}", value)
    if match:
        return match[2], value
    return (None, "") if re.search(r"(?<!\$)\$[\w{]", value) else (value, "")
