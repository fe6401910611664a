"""How many kernels this process has run on a device, or had emulated. It knows no kernel and no model.

Rules: a machine counts a launch once it has been accepted; a recorded graph counts all it holds at each replay, and
nothing when it is recorded; Triton's and torch's kernels are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Ledger:
    kernels: int = 0


_LEDGER = _Ledger()


def note_kernels(count: int) -> None:
    """Adds kernels that were just started."""
    _LEDGER.kernels += count


def kernels_launched() -> int:
    """Kernels since this process began, those of start-up checks included."""
    return _LEDGER.kernels
