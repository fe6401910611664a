"""What an implementation of the operators offers: functions from rows to bit patterns. It measures nothing.

Rules: inputs are float32 numpy arrays, rounded to the dtype under test by the implementation; results are the bits, as
integers of the dtype's width, so that nobody compares floats; weights are prepared once, outside what is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Bits = npt.NDArray[np.int32] | npt.NDArray[np.int16]
RowFunction = Callable[[Float32], Bits]  # (M, K) -> (M, N)


class Piece(NamedTuple):
    """One sequence's part in a call of attention: its newest `tokens` tokens, of `keys` tokens in all."""

    tokens: int
    keys: int


AttentionFunction = Callable[[Sequence[Piece]], Bits]  # pieces -> (heads * head_dim,): the first piece's last token


class Heads(NamedTuple):
    """The shape of attention."""

    heads: int
    kv_heads: int
    dim: int

    @property
    def columns(self) -> int:
        """Columns of q, k and v side by side."""
        return (self.heads + 2 * self.kv_heads) * self.dim


class Implementation(Protocol):
    """The operators of one library, with its own number of threads and one dtype."""

    def linear(self, weight: Float32) -> RowFunction:
        """x (M, K) times the transpose of weight (N, K)."""

    def rms_norm(self, gain: Float32, eps: float) -> RowFunction:
        """RMSNorm of rows."""

    def log_softmax(self) -> RowFunction:
        """Log-softmax of rows."""

    def swiglu(self) -> RowFunction:
        """(M, 2 I), gate first, to (M, I)."""

    def rope(self, heads: Heads, position: int) -> RowFunction:
        """(M, heads * dim) rotated, each row at `position`."""

    def attention(self, heads: Heads, sequences: Sequence[Float32]) -> AttentionFunction:
        """Causal attention; `sequences` are (n, columns) of q, k, v of each token, already rotated."""

    def experts(self, router: Float32, experts: Sequence[tuple[Float32, Float32]], per_token: int) -> RowFunction:
        """A mixture of experts: router (E, hidden), and (gate_up, down) of each expert."""
