"""Reads and writes .safetensors files with numpy alone: mapped where they hold float32, converted where they
do not, one tensor at a time.

It knows tensors, not models. Source: the format's page (8 bytes little-endian header length, a JSON header,
data). Rules: float16 and bfloat16 become float32 exactly; any other type is refused by name.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
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


class StoredTensors(Mapping[str, Float32]):
    """Tensors of some files, read when they are asked for: float32 as read-only views of the mapped file, others
    converted anew each time, so that no more than one of them needs to be in memory.
    """

    def __init__(self, places: Mapping[str, tuple[Path, Entry]]) -> None:
        self._places = dict(places)
        self._maps: dict[Path, npt.NDArray[np.uint8]] = {}

    def __getitem__(self, name: str) -> Float32:
        path, entry = self._places[name]
        dtype = np.dtype(_DTYPES[entry.dtype])
        if entry.dtype == "F32":
            return self._mapped(path)[entry.start : entry.end].view(dtype).reshape(entry.shape)
        stored = np.fromfile(path, dtype, (entry.end - entry.start) // dtype.itemsize, offset=entry.start)
        if entry.dtype == "F16":
            return stored.astype(np.float32).reshape(entry.shape)
        bits = stored.astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32).reshape(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name to shape, from the headers alone."""
        return {name: entry.shape for name, (_, entry) in self._places.items()}

    def only(self, names: Iterable[str]) -> StoredTensors:
        """These tensors, in this order."""
        return StoredTensors({name: self._places[name] for name in names})

    def _mapped(self, path: Path) -> npt.NDArray[np.uint8]:
        if path not in self._maps:
            self._maps[path] = np.memmap(path, np.uint8, mode="r")
        return self._maps[path]


def read_tensors(*paths: Path) -> StoredTensors:
    """The tensors of some files, by name. Raises ModelError for a type, a size or a second tensor of one name."""
    places: dict[str, tuple[Path, Entry]] = {}
    for path in paths:
        for name, entry in read_header(path).items():
            _check_entry(path, name, entry)
            if name in places:
                raise ModelError(f"{path}: tensor {name} is in {places[name][0].name} too; expected it once")
            places[name] = (path, entry)
    return StoredTensors(places)


def _check_entry(path: Path, name: str, entry: Entry) -> None:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        known = ", ".join(sorted(_DTYPES))
        msg = f"{path}: tensor {name} is {entry.dtype}; supported: {known}"
        raise ModelError(msg)
    if entry.end - entry.start != np.dtype(dtype).itemsize * math.prod(entry.shape):
        found = f"{entry.end - entry.start} bytes of {entry.dtype}"
        raise ModelError(f"{path}: tensor {name} of shape {entry.shape} has {found}; download it again")


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
