"""The prefix cache on disk: keys, and the keys and values behind them, saved by one engine and restored by another.

It does not know requests. Rules: a store appears whole or not at all (written aside, then renamed); its header comes
with a schema number, the origin of the pages and the SHA-256 of the content, all checked before a page is touched; a
store of another origin is refused by naming what differs; float32 goes to disk and back as its bits.

    FOLDER/store.json   schema, origin, keys of the pages in hex, shape of a page, SHA-256 of pages.f32
    FOLDER/pages.f32    per layer the keys (page, head, dim, token), then the values (page, head, token, dim),
                        little-endian
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import numpy as np

from engines.bundled.config import Float32
from engines.bundled.errors import CacheStoreError, NotSupported
from engines.bundled.faults import MISPLACED_PAGE
from engines.bundled.kernels.interface import Pages as LayerPages
from engines.bundled.prefix import KEY_BYTES, Origin

if TYPE_CHECKING:
    from engines.bundled.engine import Engine

SCHEMA = 1
HEADER, CONTENT = "store.json", "pages.f32"


@runtime_checkable
class HostMemory(Protocol):
    """An arithmetic whose pages lie in this process's memory."""

    pages: tuple[LayerPages, ...]  # one per layer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """What stands in `store.json`, checked."""

    keys: tuple[bytes, ...]
    sha256: str


def save_cache(engine: Engine, folder: Path) -> int:
    """Writes every page that can be found; returns how many. Raises CacheStoreError, NotSupported."""
    cache, layers = engine.require_cache(), host_layers(engine)
    entries = cache.entries()
    numbers = [page for _, page in entries]
    content = b"".join(
        part.astype("<f4").tobytes() for layer in layers for part in (layer.keys[numbers], layer.values[numbers])
    )
    header = {
        "schema": SCHEMA, "origin": asdict(cache.origin), "page": _page_shape(layers),
        "keys": [key.hex() for key, _ in entries], "sha256": hashlib.sha256(content).hexdigest(),
    }  # fmt: skip
    write_store(folder, header, content)
    return len(entries)


def restore_cache(engine: Engine, folder: Path) -> int:
    """Fills the empty prefix cache as far as pages are free; returns how many pages came.

    Raises:
        CacheStoreError: the store is unreadable, damaged or of another origin, or the engine is not empty.
        NotSupported: no prefix cache, or pages that are not in this process's memory.
    """
    cache, layers, pages = engine.require_cache(), host_layers(engine), engine.scheduler.pages
    if len(cache) or engine.has_work:
        raise CacheStoreError(f"cache store {folder}: the engine has served something already; restore into a new one")
    header = _read_header(folder, cache.origin, _page_shape(layers))
    content = read_content(folder, header.sha256)
    count = min(len(header.keys), pages.free)
    numbers = pages.allocate(count)
    places = numbers[1:] + numbers[:1] if engine.config.fault == MISPLACED_PAGE else numbers
    _fill(layers, content, places, len(header.keys))
    cache.publish(header.keys[:count], numbers)
    pages.release(numbers)
    return count


def write_store(folder: Path, header: Mapping[str, object], content: bytes) -> None:
    """Header and content, whole or not at all. Raises CacheStoreError."""
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        (aside / CONTENT).write_bytes(content)
        (aside / HEADER).write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            shutil.rmtree(aside)
        raise CacheStoreError(f"cache store {folder}: cannot be written: {error.strerror}") from error


def host_layers(engine: Engine) -> tuple[LayerPages, ...]:
    """The engine's KV pages by layer. Raises NotSupported where they do not lie in this process."""
    arithmetic = engine.arithmetic
    if not isinstance(arithmetic, HostMemory):
        raise NotSupported(
            f"arithmetic {arithmetic.name!r} of {type(arithmetic).__module__} keeps its pages outside this process's "
            "memory, where they cannot be saved or restored; use device=cpu and one rank"
        )
    return arithmetic.pages


def _page_shape(layers: tuple[LayerPages, ...]) -> dict[str, int]:
    _, heads, dim, size = layers[0].keys.shape
    return {"layers": len(layers), "heads": heads, "dim": dim, "tokens": size}


def read_header(folder: Path, origin: Origin, shape: Mapping[str, int]) -> Mapping[str, object]:
    """What stands in the header of a store of this origin. Raises CacheStoreError naming what differs."""
    try:
        header: Mapping[str, object] = json.loads((folder / HEADER).read_text(encoding="utf-8"))
        if header["schema"] != SCHEMA:
            raise CacheStoreError(f"cache store {folder}: schema: expected {SCHEMA}, found {header['schema']!r}")
        found = {**dict(header["origin"]), **dict(header["page"])}  # type: ignore[call-overload]
    except OSError as error:
        raise CacheStoreError(f"cache store {folder}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CacheStoreError(f"cache store {folder}: {HEADER} is damaged: {error!r}") from error
    _check_origin(folder, {**asdict(origin), **shape}, found)
    return header


def _check_origin(folder: Path, wanted: Mapping[str, object], found: Mapping[str, object]) -> None:
    different = [
        f"{name}: expected {wanted[name]!r}, found {found.get(name)!r}"
        for name in wanted
        if found.get(name) != wanted[name]
    ]
    if different:
        raise CacheStoreError(f"cache store {folder} is of another origin and is not used: {'; '.join(different)}")


def _read_header(folder: Path, origin: Origin, shape: dict[str, int]) -> _Header:
    header = read_header(folder, origin, shape)
    try:
        keys = tuple(bytes.fromhex(key) for key in cast("list[str]", header["keys"]))
        sha256 = str(header["sha256"])
    except (ValueError, KeyError, TypeError) as error:
        raise CacheStoreError(f"cache store {folder}: {HEADER} is damaged: {error!r}") from error
    if any(len(key) != KEY_BYTES for key in keys) or len(set(keys)) != len(keys):
        raise CacheStoreError(
            f"cache store {folder}: {HEADER} is damaged: its keys are not {KEY_BYTES} bytes each, or repeat"
        )
    return _Header(keys=keys, sha256=sha256)


def read_content(folder: Path, sha256: str) -> Float32:
    """The floats of a store, flat. Raises CacheStoreError unless their SHA-256 is the given one."""
    try:
        content = (folder / CONTENT).read_bytes()
    except OSError as error:
        raise CacheStoreError(f"cache store {folder}: cannot be read: {error.strerror}") from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256:
        raise CacheStoreError(f"cache store {folder}: {CONTENT} is damaged: SHA-256 {digest}, expected {sha256}")
    return np.frombuffer(content, "<f4").astype(np.float32, copy=False)


def _fill(layers: tuple[LayerPages, ...], content: Float32, places: list[int], stored: int) -> None:
    """Writes the first len(places) of `stored` pages where they belong."""
    size = math.prod(layers[0].keys.shape[1:])
    parts = content.reshape(len(layers), 2, stored, size)
    for layer, (keys, values) in zip(layers, parts, strict=True):
        layer.keys[places] = keys[: len(places)].reshape(-1, *layer.keys.shape[1:])
        layer.values[places] = values[: len(places)].reshape(-1, *layer.values.shape[1:])
