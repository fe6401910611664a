"""Commands that start no engine and still matter: package installs and curl."""

from __future__ import annotations

import re
from collections.abc import Sequence

from harness.doctor.facts import Install
from harness.doctor.finding import Place


def read_installs(words: Sequence[str], place: Place) -> tuple[Install, ...]:
    """Packages named by `pip install`, `uv pip install` or `uv add`."""
    names = [word.rsplit("/", 1)[-1] for word in words]
    if names[:1] and re.fullmatch(r"python[\d.]*", names[0]) and names[1:3] == ["-m", "pip"]:
        names, words = names[2:], words[2:]
    if names[:2] == ["uv", "pip"]:
        names, words = names[1:], words[1:]
    if len(names) < 2 or not re.fullmatch(r"pip[\d.]*|uv", names[0]) or names[1] not in ("install", "add"):
        return ()
    found = []
    for word in words[2:]:
        match = re.fullmatch(r"([A-Za-z0-9][\w.-]*)(?:\[[\w,-]*\])?\s*((?:[=<>!~]=?|===).*)?", word)
        if match:
            exact = re.fullmatch(r"={2,3}\s*([^*,<>]+)", match[2] or "")
            name = re.sub(r"[-_.]+", "-", match[1]).lower()
            found.append(Install(package=name, version=exact[1] if exact else "", place=place))
    return tuple(found)


def read_curl(words: Sequence[str]) -> tuple[str, tuple[str, ...]] | None:
    """(url, payloads) of a curl command; None when it has no url."""
    url = next((word for word in words[1:] if re.search(r"^https?://|/v1/|localhost|/generate$", word)), "")
    payloads = []
    for index, word in enumerate(words[:-1]):
        if word in ("-d", "--data", "--data-raw", "--json", "--data-binary"):
            payloads.append(words[index + 1])
    return (url, tuple(payloads)) if url else None
