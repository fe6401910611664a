"""A sequence: one request on its way, with its tokens, its pages and what was reported per position.

It does not know the scheduler, the kernels or other sequences. Rules: prompt and output are one list of
tokens; `computed` counts the tokens whose keys and values lie in the pages; preemption resets it to zero and
loses nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from typing import Literal, NamedTuple

from engines.bundled.config import Float32, Int32
from engines.bundled.request import Request

FinishReason = Literal["stop", "length"]
Decode = Callable[[Tokens[int]], str]


class Position(NamedTuple):
    """What the engine reports of one generated position. Log-probabilities are raw float32."""

    token: int
    pick: int  # what the sampler would have taken; differs from `token` only on a forced path
    logprob: float
    topk_ids: Int32  # (k,)
    topk_logprobs: Float32  # (k,)
    digest: bytes | None  # BLAKE2b-16 over the float32 logits


class Sequence:
    """One request from submission to its last token."""

    def __init__(self, request: Request, stop_ids: frozenset[int], decode: Decode) -> None:
        """`stop_ids` end the sequence when generated; `decode` turns output ids into text for stop strings."""
        self.request = request
        self.stop_ids = stop_ids
        self.tokens = list(request.prompt)
        self.prompt_ids = sorted(set(request.prompt))
        self.output_counts: Counter[int] = Counter()
        self.positions: list[Position] = []
        self.pages: list[int] = []
        self.computed = 0
        self.preemptions = 0
        self.finish_reason: FinishReason | None = None
        self._decode = decode

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.positions)

    @property
    def remaining(self) -> int:
        """Tokens whose keys and values are still to be computed before the next logits."""
        return len(self.tokens) - self.computed

    @property
    def forced_token(self) -> int | None:
        """The token the next position is forced to, None if the sampler decides."""
        path = self.request.forced
        return None if path is None else path[self.generated]

    @property
    def must_go_on(self) -> bool:
        """True while fewer than min_tokens are generated: nothing may end the sequence yet."""
        return self.generated < self.request.sampling.min_tokens

    def append(self, position: Position) -> None:
        """Takes one generated position and settles whether it was the last."""
        self.positions.append(position)
        self.tokens.append(position.token)
        self.output_counts[position.token] += 1
        if self._is_over():
            self.finish_reason = "stop" if self._stops() else "length"

    def preempt(self) -> None:
        """Forgets what was computed, keeps what was generated. The pages are the scheduler's to give back."""
        self.computed = 0
        self.preemptions += 1

    def _is_over(self) -> bool:
        """A forced path ends where the path ends, whatever its tokens say; a natural one where it stops."""
        path = self.request.forced
        if path is not None:
            return self.generated == len(path)
        return self.generated == self.request.sampling.max_tokens or self._stops()

    def _stops(self) -> bool:
        """True if the newest token, or a stop string in the output so far, ends the sequence."""
        if self.generated < self.request.sampling.min_tokens:
            return False
        return self.tokens[-1] in self.stop_ids or self._has_stop_string()

    def _has_stop_string(self) -> bool:
        stops = self.request.sampling.stop
        if not stops:
            return False
        text = self._decode(self.tokens[len(self.request.prompt) :])
        return any(stop in text for stop in stops)
