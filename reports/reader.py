"""Fills the values of `reports.record` from a run's plain data, by the types their fields declare.

It does not know any field. Rules: strict on the schema number; tolerant of everything else, so that what is
null, absent or of another type reads as nothing; text is cleaned once, here, so that no report carries
control characters, terminal escapes, bidirectional overrides or broken surrogates.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from harness.errors import StoreError
from reports.record import SCHEMA, Run, Verdict

T = TypeVar("T")
Layout = tuple[tuple[str, str, Any], ...]  # (field, key in the record, type) of a dataclass

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)


def read_run(record: Mapping[str, object]) -> Run:
    """The record of a run as values.

    Raises:
        StoreError: the schema number is missing, older or newer than this version reads.
    """
    _check_schema(record)
    cost = record.get("cost")
    return _read(Run, {**record, "cost": {"cost": cost} if isinstance(cost, str) else cost})


def read_verdict(record: Mapping[str, object]) -> Verdict:
    """One entry of a run's `verdicts` as a value."""
    return _read(Verdict, record)


def read_as(kind: type[T], record: Mapping[str, object]) -> T:
    """Any of the records' dataclasses from plain data."""
    return _read(kind, record)


def clean(text: str) -> str:
    """Text without control characters and other invisible mischief; line feeds and tabs stay."""
    return _UNSAFE.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))


def _check_schema(record: Mapping[str, object]) -> None:
    if "schema" not in record:
        raise StoreError("run.json: no schema number at $.schema; expected a run recorded by samebits")
    schema = record["schema"]
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < SCHEMA:
        raise StoreError(
            f"run.json at $.schema: {schema!r} is older than {SCHEMA} and no longer read; run the matrix again"
        )
    if schema > SCHEMA:
        raise StoreError(
            f"run.json at $.schema: {schema} is newer than {SCHEMA}, the newest this version reads; upgrade samebits"
        )


def _read(kind: type[T], record: Mapping[str, object]) -> T:
    """A dataclass from an object; keys it does not know are left alone."""
    return kind(**{name: _value(hint, record.get(key)) for name, key, hint in _layout(cast("Hashable", kind))})


@cache
def _layout(kind: Any) -> Layout:  # noqa: ANN401 - any of the record's dataclasses
    hints = get_type_hints(kind)
    return tuple((f.name, f.metadata.get("key", f.name), hints[f.name]) for f in dataclasses.fields(kind))


def _value(hint: Any, value: object) -> object:  # noqa: ANN401 - a type hint has no type of its own
    if hint is str:
        return "" if value is None else _shown(value)
    if hint is bool:
        return value is True
    if dataclasses.is_dataclass(hint):
        return _read(cast("type[object]", hint), value if isinstance(value, Mapping) else {})
    if get_origin(hint) is types.UnionType:
        return _optional(get_args(hint)[0], value)
    return _rows(hint, value)


def _optional(hint: Any, value: object) -> object:  # noqa: ANN401 - as above
    """The value when it is of the declared kind, else None."""
    if dataclasses.is_dataclass(hint):
        return _read(cast("type[object]", hint), value) if isinstance(value, Mapping) and value else None
    if hint is str:
        return None if value is None else _shown(value)
    if isinstance(value, bool) or hint is bool:
        return value if isinstance(value, bool) and hint is bool else None
    if hint is float:
        return float(value) if isinstance(value, int | float) else None
    return value if isinstance(value, int) else None


def _rows(hint: Any, value: object) -> tuple[object, ...]:  # noqa: ANN401 - as above
    """`tuple[X, ...]` from a list; `tuple[tuple[str, X], ...]` from an object, null entries left out."""
    element = get_args(hint)[0]
    if get_origin(element) is tuple:
        wanted = get_args(element)[1]
        entries = value.items() if isinstance(value, Mapping) else ()
        pairs = ((clean(str(key)), _optional(wanted, item)) for key, item in entries)
        return tuple(pair for pair in pairs if pair[1] is not None)
    items = value if isinstance(value, list | tuple) else ()
    if dataclasses.is_dataclass(element):
        return tuple(_read(cast("type[object]", element), item) for item in items if isinstance(item, Mapping))
    return tuple(item for item in (_optional(element, item) for item in items) if item is not None)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return ", ".join(f"{clean(str(key))} {_shown(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_shown(item) for item in value)
    return clean(value if isinstance(value, str) else str(value))
