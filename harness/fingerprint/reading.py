"""One reading of the machine as a fingerprint field, where "cannot be read" is an answer and never an error.

It does not know what is read. Rules: a reading that fails gives value None and `unknown, because …` in
place of the source; no reason names a user or a file outside the system's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from harness.engine import Field, FieldClass, Scalar

NOT_APPLICABLE = "not applicable"  # a value like any other: it equals itself


class Unknown(Exception):  # noqa: N818 - an answer, not a fault
    """Raised by a reading that knows why it has no value."""


def read_field(name: str, field_class: FieldClass, source: str, read: Callable[[], Scalar]) -> Field:
    """The field that `read` yields; unreadable is unknown, with the reason."""
    try:
        return Field(name=name, value=read(), field_class=field_class, source=source)
    except Unknown as unknown:
        reason = str(unknown)
    except OSError as error:
        reason = f"{source}: {os.strerror(error.errno) if error.errno else type(error).__name__}"
    except (ValueError, LookupError, AttributeError) as error:
        reason = f"{source}: not in the expected form ({type(error).__name__})"
    return Field(name=name, value=None, field_class=field_class, source=f"unknown, because {reason}")


def read_text(root: Path, path: str) -> str:
    """The text of a system file below `root`, stripped. Raises OSError, Unknown when empty."""
    text = (root / path).read_text(encoding="utf-8", errors="replace").strip("\0 \t\r\n")
    if not text:
        raise Unknown(f"/{path} is empty")
    return text
