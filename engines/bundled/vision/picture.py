"""Reads a PNG and cuts it into patches. It knows one kind of PNG: 8 bits a channel, RGB, not interlaced.

Source: PNG specification, third edition (W3C). Rules: every chunk's checksum is verified; any other kind is refused by
name; pixels become float32 by one fixed expression each.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engines.bundled.config import Float32
from engines.bundled.errors import ModelError

Pixels = npt.NDArray[np.uint8]  # (height, width, 3)
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_MOST_PIXELS = 1 << 24


class Patches(NamedTuple):
    """One image: its patches row by row, each (3 p p): colour, then row, then column, as a convolution reads them."""

    values: Float32  # (rows * columns, 3 p p)
    rows: int
    columns: int


def cut(pixels: Pixels, size: int) -> Patches:
    """Patches of `size` x `size` pixels; v becomes (v / 255 - 0.5) / 0.5 in float32.

    Raises ModelError for an image whose sides are no multiples of `size`.
    """
    height, width, _ = pixels.shape
    if height % size or width % size or not height or not width:
        raise ModelError(f"an image of {width} x {height} pixels: both sides must be multiples of {size}")
    scaled = (pixels.astype(np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
    rows, columns = height // size, width // size
    grid = scaled.reshape(rows, size, columns, size, 3).transpose(0, 2, 4, 1, 3)
    return Patches(np.ascontiguousarray(grid).reshape(rows * columns, -1), rows, columns)


def read_png(data: bytes, what: str) -> Pixels:
    """The pixels of a PNG. Raises ModelError, beginning with `what`, for damage and for other kinds."""
    try:
        return _decode(data)
    except (ValueError, struct.error, zlib.error) as error:
        raise ModelError(f"{what}: expected an 8-bit RGB PNG without interlacing ({error})") from error


def _decode(data: bytes) -> Pixels:
    if data[:8] != _SIGNATURE:
        raise ValueError("it has no PNG signature")
    chunks = _chunks(data)
    width, height, *kind = struct.unpack(">IIBBBBB", chunks["IHDR"])
    if kind != [8, 2, 0, 0, 0]:
        raise ValueError(f"bit depth, colour type, compression, filter and interlacing are {kind}")
    if not 0 < width * height <= _MOST_PIXELS:
        raise ValueError(f"it has {width} x {height} pixels")
    unpacker = zlib.decompressobj()
    raw = unpacker.decompress(chunks["IDAT"], height * (1 + 3 * width) + 1)
    if len(raw) != height * (1 + 3 * width):
        raise ValueError(f"it holds {len(raw)} bytes of pixels")
    lines = np.frombuffer(raw, np.uint8).reshape(height, 1 + 3 * width)
    return _unfilter(lines[:, 0], lines[:, 1:].reshape(height, width, 3))


def _chunks(data: bytes) -> dict[str, bytes]:
    """Chunks by name, those of one name joined. Raises ValueError for a wrong checksum or a missing chunk."""
    found: dict[str, bytes] = {}
    at = 8
    while at < len(data):
        length, name = struct.unpack_from(">I4s", data, at)
        body = data[at + 8 : at + 8 + length]
        (checksum,) = struct.unpack_from(">I", data, at + 8 + length)
        if len(body) != length or zlib.crc32(name + body) != checksum:
            raise ValueError(f"chunk {name!r} is damaged")
        key = name.decode("latin-1")
        found[key] = found.get(key, b"") + body
        at += 12 + length
    missing = [name for name in ("IHDR", "IDAT", "IEND") if name not in found]
    if missing:
        raise ValueError(f"chunk {missing[0]} is missing")
    return found


def _unfilter(kinds: npt.NDArray[np.uint8], lines: Pixels) -> Pixels:
    out = np.zeros_like(lines)
    above = np.zeros_like(lines[0])
    for y, kind in enumerate(kinds):
        if kind == 0:
            out[y] = lines[y]
        elif kind == 1:
            out[y] = np.cumsum(lines[y], axis=0, dtype=np.uint8)
        elif kind == 2:
            out[y] = lines[y] + above
        else:
            raise ValueError(f"line {y} has filter {kind}; 0, 1 and 2 are read")
        above = out[y]
    return out


def write_png(pixels: Pixels) -> bytes:
    """A PNG of the pixels, stored without compression: the same bytes whatever library compresses."""
    height, width, _ = pixels.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1).tobytes()
    blocks = [lines[at : at + 65535] for at in range(0, len(lines), 65535)]
    stored = b"\x78\x01"
    for index, block in enumerate(blocks):
        stored += struct.pack("<BHH", index == len(blocks) - 1, len(block), 65535 - len(block)) + block
    stored += struct.pack(">I", zlib.adler32(lines))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return _SIGNATURE + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in ((b"IHDR", header), (b"IDAT", stored), (b"IEND", b""))
    )
