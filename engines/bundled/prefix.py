"""The prefix cache: which pages hold the keys and values of which tokens. It knows no memory and no requests.

Rules: a page's key is a hash over everything that decides its bits: where they come from (`Origin`), the keys of all
pages before it and its own tokens; only whole pages of computed tokens enter; the last token of a sequence is never
served, since its logits are wanted; a page stays findable until it is handed out for something else.

The chain of hashes is vLLM's (block hashes over parent and tokens); the origin at its root is ours: a cache may outlive
the engine that filled it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

NOTHING = ""  # no adapter, no image
KEY_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What the bits of a page depend on besides its tokens."""

    model: str  # SHA-256 over shape and weights
    arithmetic: str
    definition: int  # 0 where nothing is promised across versions
    tuning: int
    page_size: int
    adapter: str = NOTHING  # reserved: digest of a low-rank adapter
    images: str = NOTHING  # reserved: digest of what stands behind image tokens

    @property
    def root(self) -> bytes:
        """The key before the first page."""
        return hashlib.sha256(repr(astuple(self)).encode()).digest()


class PrefixCache:
    """Keys to pages and back. Pages are the pool's; this only remembers what they hold."""

    def __init__(self, origin: Origin, *, chained: bool = True) -> None:
        """`chained` False is a fault switch: keys then forget the tokens and cover a page's place alone."""
        self.origin = origin
        self._chained = chained
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        """Pages that can be found."""
        return len(self._page_of)

    def keys(self, tokens: Sequence[int], known: Sequence[bytes] = ()) -> list[bytes]:
        """Keys of the whole pages of `tokens`, as far as they are not `known` already (a prefix of them)."""
        size, found = self.origin.page_size, list(known)
        parent = found[-1] if found else self.origin.root
        for start in range(len(found) * size, len(tokens) - size + 1, size):
            parent = self._next(parent, tokens[start : start + size])
            found.append(parent)
        return found

    def lookup(self, keys: Iterable[bytes]) -> list[int]:
        """Pages of the longest prefix of `keys` that is here."""
        pages: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def publish(self, keys: Iterable[bytes], pages: Iterable[int]) -> None:
        """Makes pages findable; a key that another page holds already stays with that page."""
        for key, page in zip(keys, pages, strict=True):
            if key not in self._page_of and page not in self._key_of:
                self._page_of[key], self._key_of[page] = page, key

    def forget(self, pages: Iterable[int]) -> None:
        """Pages that are about to hold something else."""
        for page in pages:
            key = self._key_of.pop(page, None)
            if key is not None:
                del self._page_of[key]

    def entries(self) -> tuple[tuple[bytes, int], ...]:
        """(key, page) of everything findable, oldest entry first."""
        return tuple(self._page_of.items())

    def _next(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        text = b",".join(b"%d" % token for token in tokens) if self._chained else b""
        return hashlib.sha256(parent + text).digest()
