"""Reads a nested mapping (from TOML) strictly and collects every mistake with its path.

It does not know cells or matrices. Rules: an unknown key is a mistake; a wrong type is a mistake (an int is no
string, a bool is no int); reading goes on after a mistake so that all are reported at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

from harness.suggest import did_you_mean

T = TypeVar("T", str, int, bool)
MISSING = object()


def shown(value: object) -> str:
    """A value as messages show it: its TOML-like form and its type."""
    return f"{value!r} ({type(value).__name__})"


class Reader:
    """One table of a document. Child tables share the list of mistakes."""

    def __init__(self, table: Mapping[str, object], path: str = "$", mistakes: list[str] | None = None) -> None:
        self.table = table
        self.path = path
        self.mistakes: list[str] = [] if mistakes is None else mistakes
        self._known: set[str] = set()

    def mistake(self, key: str, message: str) -> None:
        """Records a mistake at `key` (empty for the table itself)."""
        where = f"{self.path}.{key}" if key else self.path
        self.mistakes.append(f"{where}: {message}")

    def take(self, key: str, kind: type[T], default: object = MISSING) -> T | None:
        """The value of `key` if it has exactly the type `kind`; a missing key without default is a mistake."""
        value = self.raw(key, default)
        if value is MISSING or value is default:
            return value if isinstance(value, kind) else None
        if type(value) is not kind:
            self.mistake(key, f"expected {kind.__name__}, got {shown(value)}")
            return None
        return value

    def raw(self, key: str, default: object = MISSING) -> object:
        """The value of any type; a missing key without default is a mistake."""
        self._known.add(key)
        if key in self.table:
            return self.table[key]
        if default is MISSING:
            self.mistake(key, "missing; this key is required")
        return default

    def choice(self, key: str, choices: Collection[str], default: object = MISSING) -> str | None:
        """A string out of `choices`."""
        value = self.take(key, str, default)
        if value is not None and value not in choices:
            self.mistake(key, f"{value!r} is not one of {', '.join(choices)}; {did_you_mean(value, choices)}")
            return None
        return value

    def natural(self, key: str, default: int, minimum: int) -> int:
        """An integer of at least `minimum`."""
        value = self.take(key, int, default)
        if value is not None and value < minimum:
            self.mistake(key, f"expected an integer of at least {minimum}, got {value}")
        return default if value is None else value

    def strings(self, key: str) -> tuple[str, ...]:
        """A list of strings; missing is empty."""
        value = self.raw(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.mistake(key, f"expected a list of strings, got {shown(value)}")
            return ()
        return tuple(value)

    def child(self, key: str, *, required: bool = False) -> Reader:
        """The sub-table `key`; empty when missing."""
        value = self.raw(key, MISSING if required else {})
        if value is MISSING:
            value = {}
        if not isinstance(value, Mapping):
            self.mistake(key, f"expected a table, got {shown(value)}")
            value = {}
        return Reader(value, f"{self.path}.{key}", self.mistakes)

    def close(self) -> None:
        """Reports every key that nothing has asked for."""
        for key in sorted(set(self.table) - self._known):
            self.mistake(key, f"unknown key; {did_you_mean(key, self._known)}")
