"""Keeps secrets, user names and private paths out of what is published: fingerprints, archives.

It does not know what it is applied to. Rules: a path in a fingerprint becomes its digest, so that a change still shows;
in prose it becomes `<path>`; files of the system's own description (/proc, /sys, /etc, /dev) name nobody and stay;
what is private on a host is passed in, never looked up here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.engine import Field, Scalar

_PATH = re.compile(r"(?<![\w.~/-])(?:~[\w.-]*|(?!/(?:proc|sys|etc|dev)\b)/[\w.@+%=~-]+)(?:/[\w.@+%=~-]+)+/?")
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|PRIVATE_KEY", re.IGNORECASE)
_SHORTEST = 4  # characters of a name or secret that is looked for; shorter ones would hit words


@dataclass(frozen=True, slots=True, kw_only=True)
class Private:
    """Words that must not leave a host, with what stands in for each."""

    words: tuple[tuple[str, str], ...] = ()

    def redact(self, text: str) -> str:
        """The text without private words and paths."""
        for word, stand_in in self.words:
            text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", stand_in, text)
        return _PATH.sub("<path>", text)

    def redact_value(self, value: object) -> object:
        """A JSON value, every string in it redacted, keys too."""
        if isinstance(value, str):
            return self.redact(value)
        if isinstance(value, Mapping):
            return {self.redact(str(key)): self.redact_value(item) for key, item in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return [self.redact_value(item) for item in value]
        return value


def private_words(environ: Mapping[str, str], *, user: str, host: str, folders: Sequence[str]) -> Private:
    """What is private on a host: secrets among the variables, the user, the host, and named folders."""
    found = {value: "<secret>" for name, value in environ.items() if _SECRET.search(name)}
    found |= dict.fromkeys(folders, "<path>")
    found |= {user: "<user>", host: "<host>"}
    words = [(word, stand_in) for word, stand_in in found.items() if len(word) >= _SHORTEST and word != "root"]
    return Private(words=tuple(sorted(words, key=lambda pair: (-len(pair[0]), pair[0]))))


def holds_path(text: str) -> bool:
    """Whether a text names a file or folder that is not the system's own."""
    return _PATH.search(text) is not None


def public_value(value: Scalar | None) -> Scalar | None:
    """The value, or its digest where it holds a path."""
    if not isinstance(value, str) or not holds_path(value):
        return value
    return "a path, sha256:" + hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()


def public_field(field: Field) -> Field:
    """The field without paths in its value or source."""
    value, source = public_value(field.value), _PATH.sub("<path>", field.source)
    if value == field.value and source == field.source:
        return field
    return dataclasses.replace(field, value=value, source=source)
