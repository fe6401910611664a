"""A tar archive with exactly one way to write it: sorted names, no times, no owners, no padding but zeros.

It does not know what is inside. Rules: the same files make the same bytes; reading accepts these bytes and no others,
so that a changed byte in a header or in padding is found and named as one in a file is.
"""

from __future__ import annotations

import tarfile
from collections.abc import Mapping

from harness.errors import StoreError

BLOCK = tarfile.BLOCKSIZE
RECORD = tarfile.RECORDSIZE


class TarFaultError(StoreError):
    """A byte that a canonical archive does not have; the message names its place."""


def write_tar(files: Mapping[str, bytes]) -> bytes:
    """The archive of some files, name to bytes. Names are ASCII, relative, at most 100 bytes."""
    parts = [
        part for name in sorted(files) for part in (_header(name, len(files[name])), files[name], _fill(files[name]))
    ]
    body = b"".join(parts) + bytes(2 * BLOCK)
    return body + bytes(-len(body) % RECORD)


def read_tar(content: bytes) -> dict[str, bytes]:
    """The files of a canonical archive. Raises TarFaultError naming the first byte that is not canonical."""
    files: dict[str, bytes] = {}
    place, before = 0, ""
    while content[place : place + BLOCK].strip(b"\0"):
        name, size = _entry(content, place, before)
        start, end = place + BLOCK, place + BLOCK + size
        padded = end + (-size % BLOCK)
        if padded > len(content):
            raise TarFaultError(f"{name}: the archive ends inside it; it was cut, or the header before it was changed")
        if content[end:padded].strip(b"\0"):
            raise TarFaultError(f"{name}: the padding after it, from byte {end} of the archive, was changed")
        files[name] = content[start:end]
        place, before = padded, name
    whole = place + 2 * BLOCK
    whole += -whole % RECORD
    if len(content) != whole or content[place:].strip(b"\0"):
        raise TarFaultError(
            f"the end of the archive, from byte {place}, after {before or 'nothing'}, was changed or cut"
        )
    return files


def _entry(content: bytes, place: int, before: str) -> tuple[str, int]:
    """(name, size) of the header at a byte."""
    header = content[place : place + BLOCK]
    name = header[:100].rstrip(b"\0").decode("ascii", errors="replace")
    where = f"the header at byte {place} (of {name!r}, after {before!r})"
    try:
        size = int(header[124:136].rstrip(b"\0 ") or b"x", 8)
        expected = _header(name, size)
    except ValueError as error:
        raise TarFaultError(f"{where} was changed: it does not read as one") from error
    if header != expected:
        raise TarFaultError(f"{where} was changed")
    if name <= before:
        raise TarFaultError(f"{where} was changed: names are sorted and occur once")
    return name, size


def _header(name: str, size: int) -> bytes:
    if not name or len(name.encode("ascii", errors="replace")) > 100:
        raise ValueError(f"{name!r} is no name of an archived file")
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")


def _fill(content: bytes) -> bytes:
    return bytes(-len(content) % BLOCK)
