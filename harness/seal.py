"""A record's digest of its own content, under one key: finds edits and damage wherever the record is read.

It does not know files or records. Rules: the digest is over the canonical form of everything else, so it survives
reformatting; a record without one is as wrong as one that does not match; it is no signature, and whoever forges on
purpose can forge it too: what must withstand that is signed, or published as a digest.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.canonical import digest
from harness.errors import StoreError

SEAL = "sha256"


def sealed(record: Mapping[str, object]) -> dict[str, object]:
    """The record with the SHA-256 of its content in it."""
    content = unsealed(record)
    return {**content, SEAL: digest(content)}


def unsealed(record: Mapping[str, object]) -> dict[str, object]:
    """The record without its digest, for copies that say less."""
    return {name: value for name, value in record.items() if name != SEAL}


def check_seal(record: Mapping[str, object], where: object, remedy: str) -> None:
    """Raises StoreError for a record that is not what was written; `remedy` says what to do."""
    if record.get(SEAL) is None:
        raise StoreError(f"{where}: $.{SEAL}: missing; expected the digest of the record's content; {remedy}")
    found = digest(unsealed(record))
    if record[SEAL] != found:
        raise StoreError(f"{where}: $.{SEAL}: names {str(record[SEAL])[:12]}, the content has {found[:12]}: the file "
                         f"was edited or damaged; {remedy}")  # fmt: skip
