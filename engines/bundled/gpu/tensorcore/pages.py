"""bfloat16 KV pages as the prefix cache's store sees them: float32 arrays of the CPU's shapes. It computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engines.bundled.config import Float32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TorchPages:
    """Keys or values of one layer: `pool` is (slots + 1, kv heads, dim), `size` slots are a page.

    The pool is made in inference mode, which torch demands of whoever writes it, too.
    """

    pool: torch.Tensor
    size: int
    is_keys: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """As `device_pages.PageArray`."""
        slots, heads, dim = self.pool.shape
        last = (dim, self.size) if self.is_keys else (self.size, dim)
        return (slots // self.size, heads, *last)

    def __getitem__(self, pages: Sequence[int]) -> Float32:
        found = self.pool[self._slots(pages)].view(len(pages), self.size, *self.pool.shape[1:])
        turned = found.permute(0, 2, 3, 1) if self.is_keys else found.permute(0, 2, 1, 3)
        return np.ascontiguousarray(turned.float().cpu().numpy())

    def __setitem__(self, pages: Sequence[int], content: Float32) -> None:
        given = torch.from_numpy(np.ascontiguousarray(content)).to(self.pool.device, self.pool.dtype)
        turned = given.permute(0, 3, 1, 2) if self.is_keys else given.permute(0, 2, 1, 3)
        with torch.inference_mode():
            self.pool[self._slots(pages)] = turned.reshape(-1, *self.pool.shape[1:])

    def _slots(self, pages: Sequence[int]) -> torch.Tensor:
        first = torch.tensor(list(pages), device=self.pool.device) * self.size
        return (first[:, None] + torch.arange(self.size, device=self.pool.device)).view(-1)
