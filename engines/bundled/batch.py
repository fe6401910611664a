"""One engine step as the arithmetic sees it: flat tokens of any mix of sequences. No requests, no sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from engines.bundled.config import Float32, Int32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBatch:
    """T tokens of S sequences. Tokens of one sequence are contiguous and in order of position."""

    token: Int32  # (T,)
    sequence: Int32  # (T,) row of `page_table`
    position: Int32  # (T,) absolute position in the sequence
    page_table: Int32  # (S, P) page numbers; entries past a sequence's end are never read
    wanted: Int32  # (W,) indices into the T tokens whose logits are wanted, ascending


@runtime_checkable
class Closes(Protocol):
    """An arithmetic that holds something outside this process."""

    def close(self) -> None:
        """Lets it go."""


@runtime_checkable
class Ranked(Protocol):
    """An arithmetic that can say what each of its processes holds and has done."""

    def counts(self) -> tuple[Mapping[str, int], ...]:
        """By rank: weight_bytes, kv_bytes, steps, threads_seen, cores, peak_memory_kib, pid.

        `cores` is on how many the process may run. Raises RankError, if lost.
        """


class Arithmetic(Protocol):
    """Weights, KV pages and kernels behind one call. `forward` writes K and V of all T tokens into their pages."""

    name: str
    definition: int  # version of the written definition; 0 when there is none (free, native)

    def forward(self, batch: StepBatch) -> Float32:
        """Logits (W, vocab_size) float32, a fresh array."""

    def log_softmax(self, logits: Float32) -> Float32:
        """Log-probabilities (W, vocab_size) float32 by this arithmetic's definition."""

    def describe(self) -> dict[str, str | int | float | bool]:
        """Resolved facts for the fingerprint: isa, compiler, threads, chunk width, key chunk, backend."""
