"""A fingerprint: what it takes to reproduce the exact inference path, as named fields in three classes.

It does not know where fields come from (`harness.fingerprint.host`, an engine) or what a verdict is. Rules: fields are
unique and sorted by name; only identity fields decide the digest; values are compared by type and value, so
1, 1.0, True and "1" are four values; "not applicable" equals itself; unknown is never silently equal across
lifetimes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from harness.engine import Field, FieldClass
from harness.errors import StoreError

__all__ = [
    "FieldDifference",
    "Fingerprint",
    "diff",
    "field_records",
    "fields_from_records",
    "fingerprint_of",
    "owns",
    "undeclared",
]

SCHEMA = 1
CLASSES: tuple[FieldClass, ...] = get_args(FieldClass)  # worst first
Change = Literal["changed", "only in a", "only in b", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldDifference:
    """One field that is not shown to be equal. `a` or `b` None: the fingerprint has no such field."""

    name: str
    field_class: FieldClass  # the worse one where the two sides disagree
    a: Field | None
    b: Field | None

    @property
    def change(self) -> Change:
        """Which kind of difference this is; `unknown` when either side could not be read."""
        if self.a is None:
            return "only in b"
        if self.b is None:
            return "only in a"
        return "unknown" if None in (self.a.value, self.b.value) else "changed"

    def describe(self) -> str:
        """`name: a -> b`, with the reason beside a value that is unknown."""
        return f"{self.name}: {_shown(self.a)} -> {_shown(self.b)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Fields sorted by name. Build it with `fingerprint_of`, which sorts and refuses duplicates."""

    fields: tuple[Field, ...]

    @property
    def digest(self) -> str:
        """SHA-256 over names and values of the identity fields; an unknown value counts as null."""
        rows = [[field.name, field.value] for field in self.fields if field.field_class == "identity"]
        return "sha256:" + hashlib.sha256(_canonical(rows)).hexdigest()

    def field(self, name: str) -> Field | None:
        """The field of that name, or None."""
        return next((field for field in self.fields if field.name == name), None)

    def to_json(self) -> dict[str, object]:
        """A value for `json.dump`: schema number, digest, one record per field."""
        return {"schema": SCHEMA, "digest": self.digest, "fields": field_records(self.fields)}

    @classmethod
    def from_json(cls, value: object) -> Fingerprint:
        """Reads what `to_json` wrote.

        Raises:
            StoreError: another schema, a malformed field, or a digest that does not match the fields.
        """
        record = _checked_schema(value)
        fingerprint = fingerprint_of(fields_from_records(record.get("fields")))
        if record.get("digest") != fingerprint.digest:
            raise StoreError(
                f"fingerprint at $.digest: expected {fingerprint.digest} for these fields, found "
                f"{record.get('digest')!r}; the file was edited or damaged, record it again"
            )
        return fingerprint


def fingerprint_of(*groups: Iterable[Field]) -> Fingerprint:
    """One fingerprint of several groups of fields.

    Raises:
        ValueError: two fields share a name.
    """
    fields = sorted((field for group in groups for field in group), key=lambda field: field.name)
    for left, right in itertools.pairwise(fields):
        if left.name == right.name:
            raise ValueError(f"fingerprint field {left.name!r} is given twice: {left.value!r} and {right.value!r}")
    return Fingerprint(fields=tuple(fields))


def diff(a: Fingerprint, b: Fingerprint) -> tuple[FieldDifference, ...]:
    """Every field that differs or is known on one side only, worst class first, then by name."""
    found = [difference for difference in _paired(a, b) if not _same(difference)]
    return tuple(sorted(found, key=lambda item: (CLASSES.index(item.field_class), item.name)))


def undeclared(
    a: Fingerprint, b: Fingerprint, owned: Collection[str], *, same_lifetime: bool
) -> tuple[tuple[FieldDifference, ...], tuple[str, ...]]:
    """Identity fields that differ undeclared, and what unknown ones keep a verdict from saying.

    `owned` names the axis's fields; `graph.*` is every field whose name begins with `graph.`. Lineage and
    context never count here. Inside one lifetime unknown equals anything; across lifetimes it becomes a
    sentence of the second tuple and voids nothing. A field that only one side has is a difference: absent is
    not unknown.
    """
    differences: list[FieldDifference] = []
    caps: list[str] = []
    for pair in _paired(a, b):
        if pair.field_class != "identity" or owns(owned, pair.name):
            continue
        if pair.a is None or pair.b is None:
            differences.append(pair)
        elif pair.a.value is None or pair.b.value is None:
            caps += [] if same_lifetime else [_cap(pair.name, pair.a, pair.b)]
        elif not _same(pair):
            differences.append(pair)
    return tuple(differences), tuple(caps)


def owns(owned: Collection[str], name: str) -> bool:
    """Whether a list of names and `prefix.*` wildcards covers a field.

    Raises:
        ValueError: a `*` anywhere but as a last `.*`.
    """
    return any(_matches(pattern, name) for pattern in sorted(owned))


def field_records(fields: Sequence[Field]) -> list[dict[str, object]]:
    """Fields as JSON records: name, value, class, source."""
    return [
        {"name": item.name, "value": item.value, "class": item.field_class, "source": item.source} for item in fields
    ]


def fields_from_records(records: object) -> tuple[Field, ...]:
    """The inverse of `field_records`.

    Raises:
        StoreError: naming the record and the key that is wrong.
    """
    if not isinstance(records, list):
        raise StoreError(f"fingerprint at $.fields: expected a list, found {type(records).__name__}")
    return tuple(_field_from(index, record) for index, record in enumerate(records))


def _field_from(index: int, record: object) -> Field:
    place = f"fingerprint at $.fields[{index}]"
    keys = {"name", "value", "class", "source"}
    if not isinstance(record, dict) or set(record) != keys:
        raise StoreError(f"{place}: expected an object with {sorted(keys)}, found {record!r}")
    if record["class"] not in CLASSES:
        raise StoreError(f"{place}.class: expected one of {list(CLASSES)}, found {record['class']!r}")
    if not isinstance(record["name"], str) or not isinstance(record["source"], str):
        raise StoreError(f"{place}: name and source must be strings, found {record!r}")
    if not isinstance(record["value"], str | int | float | bool | None):
        raise StoreError(f"{place}.value: expected a string, number, boolean or null, found {record['value']!r}")
    return Field(name=record["name"], value=record["value"], field_class=record["class"], source=record["source"])


def _checked_schema(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict) or "schema" not in value:
        raise StoreError("fingerprint: no schema number at $.schema; this is not a fingerprint file of samebits")
    schema = value["schema"]
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < SCHEMA:
        raise StoreError(
            f"fingerprint at $.schema: {schema!r} is older than {SCHEMA} and no longer read; record it again"
        )
    if schema > SCHEMA:
        raise StoreError(
            f"fingerprint at $.schema: {schema} is newer than {SCHEMA}, the newest this version reads; upgrade samebits"
        )
    return value


def _paired(a: Fingerprint, b: Fingerprint) -> list[FieldDifference]:
    """Both sides of every field name, in order of name, equal or not."""
    left = {field.name: field for field in a.fields}
    right = {field.name: field for field in b.fields}
    return [_pair(name, left.get(name), right.get(name)) for name in sorted(left | right)]


def _pair(name: str, a: Field | None, b: Field | None) -> FieldDifference:
    classes = [field.field_class for field in (a, b) if field is not None]
    return FieldDifference(name=name, field_class=min(classes, key=CLASSES.index), a=a, b=b)


def _same(pair: FieldDifference) -> bool:
    if pair.a is None or pair.b is None:
        return False
    return _canonical(pair.a.value) == _canonical(pair.b.value)


def _canonical(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"), sort_keys=True).encode()


def _shown(field: Field | None) -> str:
    if field is None:
        return "absent"
    if field.value is None:
        return field.source if field.source.startswith("unknown") else f"unknown ({field.source})"
    return field.value if isinstance(field.value, str) else json.dumps(field.value)


def _cap(name: str, a: Field, b: Field) -> str:
    sides = "both sides" if a.value is None and b.value is None else "one side"
    reason = (a if a.value is None else b).source.removeprefix("unknown, because ")
    return f"{name} is unknown on {sides} ({reason}): equal bits are not shown to rest on an equal {name}"


def _matches(pattern: str, name: str) -> bool:
    prefix = pattern.removesuffix(".*")
    if "*" in prefix or not prefix:
        raise ValueError(f"owned field {pattern!r}: expected a field name or a prefix ending in '.*'")
    return name == pattern if prefix == pattern else name.startswith(prefix + ".")
