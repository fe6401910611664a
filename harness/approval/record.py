"""An approval: one named difference of one cell, variant and engine that somebody accepts until a date. TOML.

It does not know signatures or verdicts. Rules: unknown keys, wrong types and missing keys are mistakes, all reported at
once; times carry a zone; what was signed are the file's bytes, so a file is written once and never reformatted.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, cast, get_args

from harness.errors import UsageError
from harness.matrix import schema_mistake
from harness.reader import Reader, shown

SCHEMA = 1
DIGEST = re.compile(r"[0-9a-f]{64}")
Kind = Literal["difference", "drift"]  # between the arms of a run, or between a baseline and now


class ApprovalMistakeError(UsageError):
    """An approval file that does not read as one; the message lists every mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Approval:
    """`old` and `new` are judged digests; `changed`, `size` and `cause` say in words what the signer saw.

    `author` signs; `change_author` made the change. In force from `created` up to, and not including, `expires`.
    """

    cell: str
    variant: str
    engine: str
    model: str
    kind: Kind
    rule: str
    corpus: str  # digest
    old: str
    new: str
    changed: tuple[str, ...]
    size: str
    cause: str
    reason: str
    author: str
    change_author: str
    created: datetime
    expires: datetime

    @property
    def label(self) -> str:
        """`cell[variant]`."""
        return f"{self.cell}[{self.variant}]"


def write_approval(approval: Approval) -> bytes:
    """The file's bytes."""
    changed = "".join(f"    {_text(line)},\n" for line in approval.changed)
    lines = [
        f"schema = {SCHEMA}",
        *(f"{name} = {_text(getattr(approval, name))}" for name in ("cell", "variant", "engine", "model", "kind")),
        *(f"{name} = {_text(getattr(approval, name))}" for name in ("rule", "corpus", "old", "new")),
        f"changed = [\n{changed}]" if changed else "changed = []",
        *(f"{name} = {_text(getattr(approval, name))}" for name in ("size", "cause", "reason")),
        *(f"{name} = {_text(getattr(approval, name))}" for name in ("author", "change_author")),
        *(f"{name} = {_time(getattr(approval, name))}" for name in ("created", "expires")),
    ]
    return ("\n".join(lines) + "\n").encode()


def read_approval(content: bytes) -> Approval:
    """The approval in a file's bytes. Raises ApprovalMistakeError."""
    try:
        document = tomllib.loads(content.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ApprovalMistakeError(f"not TOML: {error}") from error
    message = schema_mistake(document.get("schema"), SCHEMA)
    if message:
        raise ApprovalMistakeError(f"$.schema: {message}")
    reader = Reader(document)
    reader.raw("schema")
    words: dict[str, Any] = {name: reader.take(name, str) or "" for name in _WORDS}
    kind = reader.choice("kind", get_args(Kind))
    digests = {name: _digest(reader, name) for name in ("corpus", "old", "new")}
    changed = reader.strings("changed")
    times = {name: _moment(reader, name) for name in ("created", "expires")}
    if times["expires"] <= times["created"]:
        reader.mistake("expires", "expected a time after `created`")
    reader.close()
    if reader.mistakes:
        raise ApprovalMistakeError("; ".join(reader.mistakes))
    return Approval(
        kind=cast("Kind", kind), changed=changed, created=times["created"], expires=times["expires"],
        corpus=digests["corpus"], old=digests["old"], new=digests["new"], **words,
    )  # fmt: skip


_WORDS = ("cell", "variant", "engine", "model", "rule", "size", "cause", "reason", "author", "change_author")


def _digest(reader: Reader, name: str) -> str:
    value = reader.take(name, str) or ""
    if value and not DIGEST.fullmatch(value):
        reader.mistake(name, f"expected a SHA-256 in hexadecimal, got {value!r}")
    return value


def _moment(reader: Reader, name: str) -> datetime:
    value = reader.raw(name)
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(UTC)
    if name in reader.table:
        reader.mistake(name, f"expected a time with a zone such as 2026-03-01T12:00:00Z, got {shown(value)}")
    return datetime.max.replace(tzinfo=UTC) if name == "expires" else datetime.min.replace(tzinfo=UTC)


def _text(value: str) -> str:
    """A TOML basic string."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _time(value: datetime) -> str:
    return f"{value.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
