"""A sequence: one request on its way, with its tokens, its pages and what was reported per position.

It does not know the scheduler, the kernels or other sequences. Rules: prompt and output are one list of
tokens; `computed` counts the tokens whose keys and values lie in the pages; preemption resets it to zero and
loses nothing; while a step is under way its tokens are `flying`, and an output it will bring is `expected`; while a
fast path decodes a window of it, it is `held`: no step runs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from typing import TYPE_CHECKING, Literal, NamedTuple

from engines.bundled.config import Float32, Int32
from engines.bundled.request import Request

if TYPE_CHECKING:
    from engines.bundled.grammar import Constraint

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

    def __init__(
        self, request: Request, stop_ids: frozenset[int], decode: Decode, constraint: Constraint | None = None
    ) -> None:
        """`stop_ids` end the sequence when generated; `decode` turns output ids into text for stop strings."""
        self.request = request
        self.constraint = constraint  # where the request's grammar stands after the output so far
        self.masker = constraint  # whose mask it is sampled under: its own, but for a fault
        self.masked = 0  # positions that were sampled under the grammar's mask
        self.steered = 0  # of these, positions at which the mask changed the pick
        self.stop_ids = stop_ids
        self.tokens = list(request.prompt)
        self.prompt_ids = sorted(set(request.prompt))
        self.output_counts: Counter[int] = Counter()
        self.positions: list[Position] = []
        self.drafts: list[int] = []  # proposed next tokens, unverified
        self.fast = False  # decoded by the fast path, verified in windows
        self.held = False  # its window is not full yet
        self.drafted = 0  # proposals that ran
        self.accepted = 0  # of these, how many were what the engine took
        self.rollbacks = 0  # times that a proposal was wrong, and it and those after it were thrown away
        self.pages: list[int] = []
        self.computed = 0
        self.flying = 0  # tokens in a step that is under way
        self.expected = 0  # outputs that step will bring: 0 or 1
        self.number = 0  # in the order of submission; the scheduler's
        self.idle = False  # it has a seat and has run nothing on it yet; the scheduler's
        self.preemptions = 0
        self.page_keys: list[bytes] = []  # the prefix cache's keys of whole pages, as far as they were needed
        self.published = 0  # whole pages the prefix cache was told of
        self.cached_tokens = 0  # of the prompt, found in the prefix cache at the first admission
        self.restored_tokens = 0  # found there after preemptions
        self.finish_reason: FinishReason | None = None
        self._decode = decode

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.positions)

    @property
    def remaining(self) -> int:
        """Tokens whose keys and values are still to be handed to a step before the next logits.

        0 for a sequence that the step under way will end, as far as that can be known before its token is, and for one
        that is held.
        """
        if self.held:
            return 0
        if self.expected and self.generated + self.expected == self._most_positions:
            return 0
        return len(self.tokens) + len(self.drafts) + self.expected - self.scheduled

    @property
    def line(self) -> list[int]:
        """Tokens to run: prompt and output, and what is proposed after them."""
        return [*self.tokens, *self.drafts] if self.drafts else self.tokens

    @property
    def most_drafts(self) -> int:
        """Proposals that may be verified next: the last position needs none after it."""
        return max(0, self._most_positions - self.generated - 1)

    @property
    def scheduled(self) -> int:
        """Tokens that are computed or in a step under way."""
        return self.computed + self.flying

    @property
    def cacheable(self) -> int:
        """Leading tokens whose keys and values are final: what others may be served. Unverified ones are not."""
        return min(self.computed, len(self.tokens))

    @property
    def forced_token(self) -> int | None:
        """The token the next position is forced to, None if the sampler decides."""
        path = self.request.forced
        return None if path is None else path[self.generated]

    @property
    def must_go_on(self) -> bool:
        """True while fewer than min_tokens are generated: nothing may end the sequence yet."""
        return self.generated < self.request.sampling.min_tokens

    def permits(self, token: int) -> bool:
        """Whether the request's grammar, if it has one, allows `token` next."""
        return self.constraint is None or bool(self.constraint.allowed()[token])

    def append(self, position: Position) -> None:
        """Takes one generated position and settles whether it was the last."""
        self.positions.append(position)
        self.tokens.append(position.token)
        self.output_counts[position.token] += 1
        if self.constraint:
            self.constraint.advance(position.token)
        if self._is_over():
            self.finish_reason = "stop" if self._stops() else "length"

    def accept_draft(self) -> bool:
        """Whether the newest token is the one proposed; if not, or at the end, every proposal is thrown away."""
        if not self.drafts:
            return False
        right = self.drafts[0] == self.tokens[-1]
        if right and self.finish_reason is None:
            del self.drafts[0]
            return True
        self.drafts.clear()
        self.rollbacks += not right
        self.computed = len(self.tokens) - 1
        return False

    def take_off(self, count: int) -> None:
        """A step with the next `count` tokens is under way."""
        self.expected = int(not self.drafts and self.scheduled + count == len(self.tokens))
        self.flying = count

    def land(self, count: int) -> None:
        """The step is over: its `count` tokens are computed."""
        self.computed += count
        self.flying = self.expected = 0

    def preempt(self, *, counted: bool = True) -> None:
        """Forgets what was computed, keeps what was generated. The pages are the scheduler's to give back."""
        self.computed = self.flying = self.expected = self.published = 0
        self.held = self.idle = False
        self.drafts.clear()
        self.preemptions += counted

    @property
    def _most_positions(self) -> int:
        """Positions after which it ends whatever its tokens say."""
        path = self.request.forced
        return self.request.sampling.max_tokens if path is None else len(path)

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
