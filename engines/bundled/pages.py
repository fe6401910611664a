"""The pool of KV pages: which are free, who may take how many. It knows no sequences and no memory.

Rules: a page has one owner; what was taken comes back exactly once; ask (`can_allocate`) before taking
(`allocate`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence


class Pages:
    """`count` pages of `size` tokens. Pages are handed out in the order they came back, oldest first."""

    def __init__(self, count: int, size: int, order: Sequence[int] | None = None) -> None:
        """`order` is the order of the first handing out (a permutation of range(count)); ascending by default."""
        numbers = range(count) if order is None else order
        if sorted(numbers) != list(range(count)):
            msg = f"page order: expected a permutation of 0..{count - 1}, got {list(numbers)[:8]}…"
            raise ValueError(msg)
        self.count = count
        self.size = size
        self._free = deque(numbers)
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return self.count - len(self._taken)

    def needed(self, tokens: int, held: int) -> int:
        """Further pages a sequence of `tokens` tokens needs that holds `held` pages already."""
        return max(0, -(-tokens // self.size) - held)

    def can_allocate(self, pages: int) -> bool:
        """True if `pages` pages can be taken now."""
        return pages <= len(self._free)

    def allocate(self, pages: int) -> list[int]:
        """Takes `pages` pages. Raises ValueError when so many are not free: ask `can_allocate` first."""
        if not self.can_allocate(pages):
            msg = f"{pages} pages asked for, {len(self._free)} of {self.count} free"
            raise ValueError(msg)
        taken = [self._free.popleft() for _ in range(pages)]
        self._taken.update(taken)
        return taken

    def release(self, pages: Iterable[int]) -> None:
        """Gives pages back. Raises ValueError for a page nobody holds."""
        for page in pages:
            if page not in self._taken:
                msg = f"page {page} was given back but is not held"
                raise ValueError(msg)
            self._taken.remove(page)
            self._free.append(page)
