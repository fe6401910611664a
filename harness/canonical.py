"""One canonical byte form for values that get an identity, and its SHA-256. It knows no type of ours."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path


def canonical(value: object) -> str:
    """JSON with sorted keys and no spaces; dataclasses become objects, tuples lists, NaN is refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False, default=_plain)


def digest(value: object) -> str:
    """SHA-256 (hex) of the canonical form."""
    return hashlib.sha256(canonical(value).encode("ascii")).hexdigest()


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no canonical form")
