"""The order in which arms run: every round runs each arm once, and each round runs the one before it backwards.

Two arms give A B B A A B …, so a drift that is straight over two rounds adds the same to both arms; with more arms
the same holds for any two of them. Blocked order (all of A, then all of B) has been wrong by 1.75 times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Turn(NamedTuple):
    """One engine process: which round it belongs to, and which arm it runs."""

    round: int
    arm: str


def turns(arms: Sequence[str], rounds: int, shown: Sequence[str] = (), shown_rounds: int = 0) -> tuple[Turn, ...]:
    """All turns in order. Arms that are only `shown` run at the far end of the first `shown_rounds` rounds."""
    order: list[Turn] = []
    for number in range(rounds):
        forward = [*arms, *(shown if number < shown_rounds else ())]
        order += [Turn(number, arm) for arm in (forward if number % 2 == 0 else reversed(forward))]
    return tuple(order)
