"""The pool of KV pages: which are free, who may take how many. It knows no sequences and no memory.

Rules: a page has as many holders as took or shared it; what was taken comes back exactly once per holder; ask
(`can_allocate`) before taking (`allocate`); a page that came back keeps its contents until it is handed out again,
and the one that has waited longest goes first.
"""

from __future__ import annotations

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
        self._free = dict.fromkeys(numbers)  # in the order of handing out
        self._holders: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def needed(self, tokens: int, held: int) -> int:
        """Further pages a sequence of `tokens` tokens needs that holds `held` pages already."""
        return max(0, -(-tokens // self.size) - held)

    def can_allocate(self, pages: int) -> bool:
        """True if `pages` pages can be taken now."""
        return pages <= len(self._free)

    def is_free(self, page: int) -> bool:
        """True if nobody holds the page."""
        return page in self._free

    def allocate(self, pages: int) -> list[int]:
        """Takes `pages` pages. Raises ValueError when so many are not free: ask `can_allocate` first."""
        if not self.can_allocate(pages):
            msg = f"{pages} pages asked for, {len(self._free)} of {self.count} free"
            raise ValueError(msg)
        waiting = iter(self._free)
        taken = [next(waiting) for _ in range(pages)]
        for page in taken:
            self._hold(page)
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each page, whether it is held or free; its contents stay."""
        for page in pages:
            if page in self._free:
                self._hold(page)
            else:
                self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Gives pages back, once per holder. Raises ValueError for a page nobody holds."""
        for page in pages:
            if page not in self._holders:
                msg = f"page {page} was given back but is not held"
                raise ValueError(msg)
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                self._free[page] = None

    def _hold(self, page: int) -> None:
        del self._free[page]
        self._holders[page] = 1
