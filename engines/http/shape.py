"""Reads JSON of a known shape, and says in which place it is another. It knows no interface."""

from __future__ import annotations

from typing import TypeVar, cast

T = TypeVar("T")
Json = dict[str, object]


class WrongShape(ValueError):  # noqa: N818 - what it is about
    """JSON of another shape than the interface's."""


def take(value: Json, key: str, kind: type[T], place: str) -> T:
    """The member, of the wanted type. Raises WrongShape."""
    found = value.get(key)
    if isinstance(found, kind) and not (kind is int and isinstance(found, bool)):
        return found
    raise WrongShape(f"{place}.{key}: expected {kind.__name__}, found {_shown(found)}")


def maybe(value: Json, key: str, kind: type[T], place: str) -> T | None:
    """The member, or None where it is null or absent. Raises WrongShape for another type."""
    return None if value.get(key) is None else take(value, key, kind, place)


def items(value: list[object], kind: type[T], place: str) -> list[T]:
    """The list, all of whose items are of one type. Raises WrongShape."""
    for index, item in enumerate(value):
        if not isinstance(item, kind) or (kind is int and isinstance(item, bool)):
            raise WrongShape(f"{place}[{index}]: expected {kind.__name__}, found {_shown(item)}")
    return cast("list[T]", value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
