"""The tree of where completions part. Pure.

It does not know text. Rules: a branch is as long as its completions agree; branches come depth first, the more
frequent one before the rarer; a completion that ends where others go on is a branch without tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """`count` completions share `tokens` from position `start` on; `depth` 0 is what they all share."""

    depth: int
    start: int
    tokens: Ids
    count: int
    completions: int  # distinct ones below


def build_tree(completions: Mapping[Ids, int]) -> tuple[Branch, ...]:
    """Branches of completions with their counts, depth first."""
    found: list[Branch] = []
    open_groups = [(0, 0, sorted(completions))]
    while open_groups:
        depth, start, group = open_groups.pop()
        end = _shared_end(group, start)
        total = sum(completions[one] for one in group)
        found.append(
            Branch(depth=depth, start=start, tokens=group[0][start:end], count=total, completions=len(group))
        )  # fmt: skip
        if len(group) > 1:
            parts = _part(group, end)
            parts.sort(key=lambda part: sum(completions[one] for one in part))  # the last one is taken first
            open_groups += [(depth + 1, end, part) for part in parts]
    return tuple(found)


def _shared_end(group: Sequence[Ids], start: int) -> int:
    """The first position at which two of the sorted completions differ or one ends."""
    first, last = group[0], group[-1]
    end = start
    while end < min(len(first), len(last)) and first[end] == last[end]:
        end += 1
    return end


def _part(group: Sequence[Ids], at: int) -> list[list[Ids]]:
    """The group by its tokens at a position; one that ends there is a part of its own."""
    parts: dict[int | None, list[Ids]] = {}
    for one in group:
        parts.setdefault(one[at] if at < len(one) else None, []).append(one)
    return list(parts.values())
