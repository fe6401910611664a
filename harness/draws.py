"""Draws that are the same on every machine and Python: SHA-256 over a seed, a purpose and a counter.

It does not know what is drawn for. Rules: two purposes never share a draw; nothing is taken from the clock or the
operating system.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
_BITS = 64


class Draws:
    """A sequence of draws for one seed and purpose."""

    def __init__(self, seed: int, purpose: str) -> None:
        self._head = f"samebits-draws-1 {seed} {purpose} ".encode()
        self._count = 0

    def unit(self) -> float:
        """A number in [0, 1), with 53 random bits."""
        return (self._next() >> (_BITS - 53)) * 2.0**-53

    def below(self, limit: int) -> int:
        """An integer from 0 to limit - 1."""
        return self._next() * limit >> _BITS

    def gap(self, mean: float) -> int:
        """Whole steps until the next arrival of a Poisson stream with this mean distance."""
        return int(-mean * math.log(1.0 - self.unit()))

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """The items in a drawn order (Fisher and Yates)."""
        found = list(items)
        for last in range(len(found) - 1, 0, -1):
            other = self.below(last + 1)
            found[last], found[other] = found[other], found[last]
        return found

    def _next(self) -> int:
        word = hashlib.sha256(self._head + str(self._count).encode()).digest()[:8]
        self._count += 1
        return int.from_bytes(word, "big")
