"""Reads and writes .safetensors files with numpy alone: mapped where they hold float32, converted where they
do not.

It knows tensors, not models. Source: the format's page (8 bytes little-endian header length, a JSON header,
data). Rules: float16 and bfloat16 become float32 exactly; any other type is refused by name.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engines.bundled.config import Float32
from engines.bundled.errors import ModelError

_HEADER_LIMIT = 100_000_000  # bytes; the format's own limit
_ALIGNMENT = 64
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class Entry(NamedTuple):
    """One tensor of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the file's start
    end: int


def read_header(path: Path) -> dict[str, Entry]:
    """Name to entry. Raises ModelError if the file is no safetensors file or is cut short."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _HEADER_LIMIT + 1
        if length > min(_HEADER_LIMIT, size - 8):
            msg = f"{path}: not a safetensors file, or cut short ({size} bytes); download it again"
            raise ModelError(msg)
        text = file.read(length)
    try:
        entries = _parse_header(text, 8 + length)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        msg = f"{path}: its safetensors header cannot be read ({error}); download it again"
        raise ModelError(msg) from error
    longest = max((entry.end for entry in entries.values()), default=0)
    if longest > size:
        msg = f"{path}: expected at least {longest} bytes, found {size}; download it again"
        raise ModelError(msg)
    return entries


def _parse_header(text: bytes, data: int) -> dict[str, Entry]:
    header = json.loads(text)
    return {
        name: Entry(item["dtype"], tuple(item["shape"]), *(data + offset for offset in item["data_offsets"]))
        for name, item in sorted(header.items())
        if name != "__metadata__"
    }


def read_tensors(path: Path) -> dict[str, Float32]:
    """Name to float32 tensor. float32 tensors are views of the mapped file: read-only, loaded when touched."""
    raw = np.memmap(path, np.uint8, mode="r")
    return {name: _to_float32(path, name, entry, raw) for name, entry in read_header(path).items()}


def _to_float32(path: Path, name: str, entry: Entry, raw: npt.NDArray[np.uint8]) -> Float32:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        known = ", ".join(sorted(_DTYPES))
        msg = f"{path}: tensor {name} is {entry.dtype}; supported: {known}"
        raise ModelError(msg)
    if entry.end - entry.start != np.dtype(dtype).itemsize * int(np.prod(entry.shape)):
        found = f"{entry.end - entry.start} bytes of {entry.dtype}"
        raise ModelError(f"{path}: tensor {name} of shape {entry.shape} has {found}; download it again")
    tensor = np.frombuffer(raw[entry.start : entry.end], dtype).reshape(entry.shape)
    if entry.dtype == "F32":
        return tensor
    if entry.dtype == "F16":
        return tensor.astype(np.float32)
    return (tensor.astype(np.uint32) << 16).view(np.float32)


def write_tensors(path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[tuple[str, Float32]]) -> None:
    """Writes float32 tensors one by one, so that one tensor is in memory at a time.

    `tensors` must come in the order of `shapes`; data starts at a multiple of 64 bytes, so that it maps
    aligned.
    """
    header: dict[str, object] = {}
    offset = 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for (expected, shape), (name, tensor) in zip(shapes.items(), tensors, strict=True):
            if name != expected or tensor.shape != shape:
                msg = f"tensor {name} {tensor.shape} written where {expected} {shape} was announced"
                raise ValueError(msg)
            np.ascontiguousarray(tensor, "<f4").tofile(file)
