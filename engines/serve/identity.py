"""The served engine's fingerprint: the same fields a capture carries of its subject. It judges nothing.

Rules: the digest is over identity fields and is read once, when the server starts; the record is read anew for each
question, for context moves; what was served before is lineage.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from engines.bundled_lifetime import BundledLifetime
from harness.engine import Field, FieldClass, Scalar
from harness.fingerprint import Fingerprint, fingerprint_of
from harness.fingerprint.host import host_fields


def read_fingerprint(
    lifetime: BundledLifetime,
    requested: Mapping[str, Scalar],
    environment: Mapping[str, str],
    now: datetime,
    served: int,
) -> Fingerprint:
    """The subject's fingerprint; `served` is the number of sequences admitted so far."""
    return fingerprint_of(
        lifetime.fingerprint(),
        host_fields(environment, now=now),
        _fields("config", requested, "identity", "requested"),
        _fields("resolved", lifetime.resolved(), "identity", "resolved by the engine"),
        _fields("observed", lifetime.observed(), "context", "observed in the engine"),
        [Field(name="lineage.served", value=served, field_class="lineage", source="sequences served before")],
    )


def _fields(prefix: str, values: Mapping[str, Scalar], field_class: FieldClass, source: str) -> list[Field]:
    return [
        Field(name=f"{prefix}.{key}", value=value, field_class=field_class, source=source)
        for key, value in sorted(values.items())
    ]
