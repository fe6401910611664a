"""KV pages on a device as if they lay in this process: what saving, restoring and handing over them reads and writes.

It computes nothing. Rules: shapes and the order of elements are those of `kernels.interface.Pages`, so that what one
device saved another restores; bits travel unchanged, bfloat16 widened to float32 and narrowed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engines.bundled.config import Float32
from engines.bundled.gpu.interface import Machine, Shape

GROUP = 4  # dimensions of a key that stand together (kernels/functions.cu)


class PageArray(Protocol):
    """Keys or values of all pages of a layer."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(pages, heads, dim, tokens) of keys, (pages, heads, tokens, dim) of values."""

    def __getitem__(self, pages: list[int], /) -> Float32:
        """Copies of these pages."""

    def __setitem__(self, pages: list[int], content: Float32, /) -> None:
        """Writes these pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLayer:
    """One layer's pages; stands where `kernels.interface.Pages` does."""

    keys: PageArray
    values: PageArray


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceArray:
    """Keys or values of one layer in a machine's memory at `address`."""

    machine: Machine
    address: int
    pages: int
    kernels: Shape
    is_keys: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """As `PageArray`."""
        k = self.kernels
        last = (k.dim, k.page) if self.is_keys else (k.page, k.dim)
        return (self.pages, k.kv_heads, *last)

    def __getitem__(self, pages: Sequence[int]) -> Float32:
        found = np.empty((len(pages), *self.shape[1:]), np.float32)
        for page, content in zip(pages, found, strict=True):
            raw = np.empty(content.size, np.float32)
            self.machine.download(self._place(page), raw)
            content[...] = self._from_device(raw)
        return found

    def __setitem__(self, pages: Sequence[int], content: Float32) -> None:
        for page, values in zip(pages, content, strict=True):
            self.machine.upload(self._place(page), self._to_device(values))

    def _place(self, page: int) -> int:
        k = self.kernels
        return self.address + 4 * page * k.kv_heads * k.dim * k.page

    def _from_device(self, raw: Float32) -> Float32:
        k = self.kernels
        if not self.is_keys:
            return raw.reshape(self.shape[1:])
        grouped = raw.reshape(k.kv_heads, k.dim // GROUP, k.page, GROUP)
        return grouped.transpose(0, 1, 3, 2).reshape(self.shape[1:])

    def _to_device(self, values: Float32) -> Float32:
        k = self.kernels
        if not self.is_keys:
            return np.ascontiguousarray(values)
        grouped = values.reshape(k.kv_heads, k.dim // GROUP, GROUP, k.page)
        return np.ascontiguousarray(grouped.transpose(0, 1, 3, 2))
