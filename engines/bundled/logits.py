"""Logits of one step as the engine reads them: on the host, or on a device that hands over what is asked for.

It does not know requests. Rules: whoever holds the rows gives the same bits; a row that lies elsewhere is fetched whole
only by who needs all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from engines.bundled.batch import StepBatch
from engines.bundled.config import Float32, Int32
from engines.bundled.kernels.interface import SamplerKernels


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Asked:
    """What of a step's logits will be read in any case."""

    most: int  # of the largest logits of a row, the most that anybody asks for
    ids: Int32  # (W,) an id of each row whose logprob is wanted; 0 where none is
    softmax: bool  # whether any logprob is


class LogitRow(Protocol):
    """Raw logits of one position, and their log-probabilities."""

    @property
    def whole(self) -> bool:
        """True if all logits are on the host."""

    def logits(self) -> Float32:
        """(vocab,) float32."""

    def top(self, k: int) -> Int32:
        """(k,) ids of the largest, in order."""

    def values(self, ids: Int32) -> Float32:
        """(n,) logits of these ids."""

    def logprobs(self, ids: Int32) -> Float32:
        """(n,) log-probabilities of these ids."""


class StepLogits(Protocol):
    """The rows of one step; they hold until the next."""

    shape: tuple[int, int]

    def first_bad(self) -> int:
        """The first row that holds a NaN or an infinity, or -1."""

    def row(self, index: int) -> LogitRow:
        """One row."""


@runtime_checkable
class Reports(Protocol):
    """An arithmetic that leaves logits where they are, if `can_report`."""

    @property
    def can_report(self) -> bool:
        """Whether it does."""

    def report(self, batch: StepBatch, asked: Asked) -> StepLogits:
        """Runs the step as `Arithmetic.forward` does; its log-softmax is `Arithmetic.log_softmax`."""


class HostLogits:
    """Logits (W, vocab) on the host; log-probabilities are formed when the first is read."""

    def __init__(self, logits: Float32, kernels: SamplerKernels, log_softmax: Callable[[Float32], Float32]) -> None:
        self.shape = (logits.shape[0], logits.shape[1]) if logits.ndim == 2 else (len(logits), -1)
        self._logits, self._kernels, self._log_softmax = logits, kernels, log_softmax
        self._logprobs: Float32 | None = None

    def first_bad(self) -> int:
        return self._kernels.check_finite(self._logits) if len(self._logits) else -1

    def row(self, index: int) -> HostRow:
        return HostRow(self, index)

    def logprobs(self) -> Float32:
        """(W, vocab) log-probabilities."""
        if self._logprobs is None:
            self._logprobs = self._log_softmax(self._logits)
        return self._logprobs

    def take(self, index: int) -> Float32:
        """(vocab,) logits."""
        row: Float32 = self._logits[index]
        return row

    def top(self, index: int, k: int) -> Int32:
        """(k,) ids."""
        ids: Int32 = self._kernels.top_k(self._logits[index][np.newaxis], k)[0]
        return ids


@dataclass(frozen=True, slots=True, eq=False)
class HostRow:
    """One row of them."""

    step: HostLogits
    index: int
    whole: bool = True

    def logits(self) -> Float32:
        return self.step.take(self.index)

    def top(self, k: int) -> Int32:
        return self.step.top(self.index, k)

    def values(self, ids: Int32) -> Float32:
        found: Float32 = self.logits()[ids]
        return found

    def logprobs(self, ids: Int32) -> Float32:
        found: Float32 = self.step.logprobs()[self.index][ids]
        return found
