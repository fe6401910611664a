"""Which cores each rank's threads run on: cores of their own where this machine has enough of them.

It does not know models. Rules: only cores this process may use are dealt out, one thread of each physical core before
the second of any; ranks take disjoint runs of them in order; where there are fewer than ranks x threads nobody is bound
to any, and that is said.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

OWN, SHARED = "own cores", "shared cores: fewer of them than ranks x threads"
SYSTEM = Path("/sys/devices/system/cpu")


def deal_cores(available: Sequence[int], ranks: int, threads: int) -> tuple[tuple[int, ...], ...]:
    """By rank `threads` cores of its own; empty ones for all where `available` are too few."""
    if len(available) < ranks * threads:
        return ((),) * ranks
    return tuple(tuple(available[rank * threads : (rank + 1) * threads]) for rank in range(ranks))


def usable_cores(system: Path = SYSTEM) -> list[int]:
    """Cores this process may run on: the first thread of each physical one, then the second ones, and so on."""
    return sorted(os.sched_getaffinity(0), key=lambda core: (_place_among_siblings(core, system), core))


def pin(cores: Sequence[int]) -> list[int]:
    """Binds every thread of this process, and those it starts later, to these cores; none: leaves them as they are.

    Returns the cores they were bound to before.
    """
    before = sorted(os.sched_getaffinity(0))
    for thread in Path("/proc/self/task").iterdir() if cores else ():
        try:
            os.sched_setaffinity(int(thread.name), cores)
        except ProcessLookupError:  # it has ended meanwhile
            continue
    return before


def _place_among_siblings(core: int, system: Path) -> int:
    """0 for the first hardware thread of a physical core, 1 for the second; 0 where the system does not say."""
    try:
        text = (system / f"cpu{core}" / "topology" / "thread_siblings_list").read_text()
        siblings = [number for part in text.strip().split(",") for number in _numbers(part)]
        return siblings.index(core)
    except (OSError, ValueError):
        return 0


def _numbers(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)
