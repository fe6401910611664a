"""Spelling: how far two names lie apart, and which known name a slip probably meant.

It knows no variable of its own; the caller brings the names. Distance counts insertions, deletions, substitutions and
swaps of neighbours (optimal string alignment), bounded so that long rubbish costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable


def edit_distance(left: str, right: str, limit: int) -> int:
    """Distance of two names, or `limit + 1` as soon as it is known to be larger."""
    if abs(len(left) - len(right)) > limit:
        return limit + 1
    before: list[int] = []
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        before, last, row = row, before, [i, *([0] * len(right))]
        for j, b in enumerate(right, 1):
            row[j] = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                row[j] = min(row[j], last[j - 2] + 1)
        if min(row) > limit:
            return limit + 1
    return min(row[-1], limit + 1)


def allowed_slips(name: str) -> int:
    """One slip in a short name, two in 16 letters or more, three from 24."""
    return 1 + (len(name) >= 16) + (len(name) >= 24)


def closest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` nearly spells, ignoring case; None when it is one, or near none."""
    best: tuple[int, str] | None = None
    letters = set(name.upper())
    for candidate in sorted(known):
        if candidate == name:
            return None
        limit = allowed_slips(candidate)
        if len(letters ^ set(candidate)) > 2 * limit:
            continue  # one slip changes two letters at most
        distance = edit_distance(name.upper(), candidate.upper(), limit)
        if distance <= limit and (best is None or (distance, candidate) < best):
            best = (distance, candidate)
    return best[1] if best else None
