"""Python's garbage collector while answers are timed: no walk over everything that is kept.

It does not know HTTP. Rules: young objects are still collected, so that cycles do not pile up; a full collection stops
all reading for as long as it takes to visit every answer so far, and would be told as a server's latency; the first
client that opens sets this, the last that closes takes it back and leaves the rest to the collector.
"""

from __future__ import annotations

import gc
from typing import Final

NEVER: Final = 1_000_000_000  # young collections before a full one
_open: list[tuple[int, int, int]] = []  # thresholds before each client


def hold_full_collections() -> None:
    """Collects once, then no more full collections until as many `allow_full_collections`."""
    if not _open:
        gc.collect()
        gc.freeze()
    _open.append(gc.get_threshold())
    young, middle, _ = _open[-1]
    gc.set_threshold(young, middle, NEVER)


def allow_full_collections() -> None:
    """Takes one `hold_full_collections` back."""
    before = _open.pop()
    if not _open:
        gc.set_threshold(*before)
        gc.unfreeze()
