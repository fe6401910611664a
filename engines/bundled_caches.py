"""Compile caches of a bundled engine's process: those of earlier processes, or empty ones that go with it.

Rules: nothing is tuned at run time, and a compiled kernel follows from its source; what the caches held when the
process started is observed, so that a cell can see that it varied.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from engines.bundled.kernels.build import KERNELS_VARIABLE, cache_folder

TRITON_VARIABLE = "TRITON_CACHE_DIR"
EMPTY = "empty"


class TunesNothing:
    """Nothing is tuned at run time; a compiled kernel follows from its source. See `harness.engine.NamesItsCaches`."""

    __slots__ = ()

    def deciding_caches(self) -> frozenset[str]:
        """None of them: `kernels.*` and `samebits.source` stand for what is compiled."""
        return frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Caches:
    """How the caches were chosen, what they held at the start in words, and the folder that goes with the process."""

    kind: str  # "kept" | "fresh"
    digest: str
    folder: Path | None = None

    def discard(self) -> None:
        """Removes what goes with the process."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def open_caches(kind: str) -> Caches:
    """Points this process's compile caches at an empty folder if `kind` is "fresh"; before any kernel is loaded."""
    folder = None
    if kind == "fresh":
        folder = Path(tempfile.mkdtemp(prefix="samebits-kernels-"))
        os.environ[KERNELS_VARIABLE] = str(folder / "kernels")
        os.environ[TRITON_VARIABLE] = str(folder / "triton")
    return Caches(kind=kind, digest=held(), folder=folder)


def held() -> str:
    """How many compiled files the caches of this process hold, by kind; EMPTY for none."""
    triton = Path(os.environ.get(TRITON_VARIABLE) or Path.home() / ".triton" / "cache")
    places = {"kernels": cache_folder(), "triton": triton}
    # Other processes may take their temporary folders away meanwhile: a walk passes over those.
    counts = {name: sum(len(files) for _, _, files in os.walk(place)) for name, place in places.items()}
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count) or EMPTY
