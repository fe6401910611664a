"""What every lifetime of the bundled engine says of autotune and compile caches."""

from __future__ import annotations


class TunesNothing:
    """Nothing is tuned at run time; a compiled kernel follows from its source. See `harness.engine.NamesItsCaches`."""

    __slots__ = ()

    def deciding_caches(self) -> frozenset[str]:
        """None of them: `kernels.*` and `samebits.source` stand for what is compiled."""
        return frozenset()
