"""Keys and values of prompts, from the process that computed them to the one that goes on from there.

It does not know how processes find each other. Rules: what is handed over belongs to exact tokens and to an origin
(model, arithmetic, definition: the digest rules of a stored prefix cache), checked before a page is touched; it is kept
token by token, so that pages may be of another size at the other end; a prompt's last token is not handed over, since
its logits are wanted where it is decoded; float32 goes over as its bits.

    FOLDER/store.json   schema, origin, shape, per prompt its key and how many tokens; SHA-256 of pages.f32
    FOLDER/pages.f32    per prompt and layer the keys (head, dim, token), then the values (head, token, dim),
                        little-endian
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from engines.bundled.cache_store import SCHEMA, host_layers, read_content, read_header, write_store
from engines.bundled.config import Float32
from engines.bundled.errors import CacheStoreError
from engines.bundled.faults import MISPLACED_PAGE
from engines.bundled.kernels.interface import Pages as LayerPages
from engines.bundled.prefix import Origin

if TYPE_CHECKING:
    from engines.bundled.engine import Engine
    from engines.bundled.sequence import Sequence as Running


class LayerKv(NamedTuple):
    """One layer's keys (heads, dim, n) and values (heads, n, dim) of n tokens, float32."""

    keys: Float32
    values: Float32


Prompt = tuple[LayerKv, ...]  # one per layer


class Outbox:
    """What a process that only prefills keeps for others."""

    def __init__(self, engine: Engine) -> None:
        """Raises NotSupported where the engine's pages cannot be read."""
        self._origin, self._layers = by_token(engine.origin), host_layers(engine)
        self._prompts: dict[bytes, Prompt] = {}

    def keep(self, sequence: Running) -> None:
        """Copies keys and values of the sequence's prompt, short of its last token, out of its pages."""
        tokens = sequence.request.prompt[:-1]
        if tokens:
            kept = tuple(take_out(layer, sequence.pages, len(tokens)) for layer in self._layers)
            self._prompts[prompt_key(self._origin, tokens)] = kept

    def save(self, folder: Path) -> int:
        """Writes everything kept and forgets it; returns how many prompts. Raises CacheStoreError."""
        parts = [part.astype("<f4") for prompt in self._prompts.values() for layer in prompt for part in layer]
        content = b"".join(part.tobytes() for part in parts)
        prompts = [{"key": key.hex(), "tokens": kept[0].keys.shape[2]} for key, kept in self._prompts.items()]
        header = {
            "schema": SCHEMA, "origin": asdict(self._origin), "page": _shape(self._layers), "prompts": prompts,
            "sha256": hashlib.sha256(content).hexdigest(),
        }  # fmt: skip
        write_store(folder, header, content)
        self._prompts.clear()
        return len(prompts)


class Inbox:
    """What a process that decodes was handed. Nothing is used twice over: whoever finds it gets a copy."""

    def __init__(self, engine: Engine) -> None:
        """Raises NotSupported where the engine's pages cannot be written."""
        self._origin, self._layers = by_token(engine.origin), host_layers(engine)
        self._misplace = engine.config.fault == MISPLACED_PAGE
        self._prompts: dict[bytes, Prompt] = {}

    def load(self, folder: Path) -> int:
        """Takes what another process saved, in place of what was here; returns how many prompts.

        Raises CacheStoreError, naming what differs, for another origin, and for what is damaged.
        """
        header = read_header(folder, self._origin, _shape(self._layers))
        try:
            entries = [
                (bytes.fromhex(entry["key"]), int(entry["tokens"]))
                for entry in cast("Sequence[Mapping[str, str]]", header["prompts"])
            ]
            sha256 = str(header["sha256"])
        except (ValueError, KeyError, TypeError) as error:
            raise CacheStoreError(f"hand-over {folder}: its list of prompts is damaged: {error!r}") from error
        content = read_content(folder, sha256)
        heads, dim = self._layers[0].keys.shape[1:3]
        sizes = [2 * len(self._layers) * heads * dim * count for _, count in entries]
        if sum(sizes) != len(content) or min(sizes, default=1) <= 0:
            raise CacheStoreError(f"hand-over {folder}: expected {sum(sizes)} floats, found {len(content)}")
        parts = np.split(content, np.cumsum(sizes)[:-1]) if sizes else []
        self._prompts = {key: self._unpack(part, count) for (key, count), part in zip(entries, parts, strict=True)}
        return len(self._prompts)

    def find(self, sequence: Running) -> int:
        """How many leading tokens of the sequence were handed over: its prompt short of the last, or none."""
        tokens = sequence.request.prompt[:-1]
        return len(tokens) if prompt_key(self._origin, tokens) in self._prompts else 0

    def fill(self, sequence: Running) -> None:
        """Writes what `find` found into the sequence's first pages."""
        tokens = sequence.request.prompt[:-1]
        prompt = self._prompts[prompt_key(self._origin, tokens)]
        for layer, kv in zip(self._layers, prompt, strict=True):
            put_in(layer, sequence.pages, kv)

    def _unpack(self, content: Float32, count: int) -> Prompt:
        heads, dim = self._layers[0].keys.shape[1:3]
        layers = content.reshape(len(self._layers), 2, heads * dim * count)
        shift = 1 if self._misplace else 0
        return tuple(
            LayerKv(
                np.roll(keys.reshape(heads, dim, count), shift, axis=2),
                np.roll(values.reshape(heads, count, dim), shift, axis=1),
            )
            for keys, values in layers
        )


def by_token(origin: Origin) -> Origin:
    """The origin of what belongs to tokens and not to pages."""
    return replace(origin, page_size=1)


def prompt_key(origin: Origin, tokens: Sequence[int]) -> bytes:
    """SHA-256 over where keys and values come from and which tokens they are of."""
    return hashlib.sha256(origin.root + b",".join(b"%d" % token for token in tokens)).digest()


def take_out(layer: LayerPages, pages: Sequence[int], count: int) -> LayerKv:
    """A copy of the first `count` tokens that lie in `pages`."""
    heads, dim, size = layer.keys.shape[1:]
    numbers = list(pages[: -(-count // size)])
    keys = layer.keys[numbers].transpose(1, 2, 0, 3).reshape(heads, dim, -1)
    values = layer.values[numbers].transpose(1, 0, 2, 3).reshape(heads, -1, dim)
    return LayerKv(np.array(keys[:, :, :count]), np.array(values[:, :count]))


def put_in(layer: LayerPages, pages: Sequence[int], kv: LayerKv) -> None:
    """Writes tokens into the first of `pages`; the rest of the last page is not touched."""
    size, count = layer.keys.shape[3], kv.keys.shape[2]
    for page, begin in zip(pages, range(0, count, size), strict=False):
        end = min(begin + size, count)
        keys, values = layer.keys[[page]], layer.values[[page]]  # copies: pages may lie on a device
        keys[0, :, :, : end - begin] = kv.keys[:, :, begin:end]
        values[0, :, : end - begin] = kv.values[:, begin:end]
        layer.keys[[page]], layer.values[[page]] = keys, values


def _shape(layers: tuple[LayerPages, ...]) -> dict[str, int]:
    _, heads, dim, _ = layers[0].keys.shape
    return {"layers": len(layers), "heads": heads, "dim": dim}
