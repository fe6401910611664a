"""What one choice of one answer came to, gathered piece by piece. It knows no interface and no HTTP.

Rules: a piece is checked when it comes, against what came before; evidence is there for every token or for none; a
number that JSON wrote as null is missing, not zero; tokens after the end, two ends, and counts that do not match are
errors; every message is a ValueError that the caller completes with the request's name.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

from engines.http.shape import WrongShape

Naming = Literal["ids", "names", "text"]  # how an endpoint tells its tokens: by id, by their text, or not at all
Candidates = Sequence[tuple[int, float]]
FINISHES = ("stop", "length")
_STAND_IN_BITS = 31


class Offer(NamedTuple):
    """Which evidence an answer carries."""

    naming: Naming
    logprobs: bool
    topk: bool


@dataclass(slots=True, kw_only=True)
class Answer:
    """One choice. `times` holds for each token `time.perf_counter()` at which its event was read."""

    candidates: int  # top candidates asked for
    naming: Naming | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[Candidates] = field(default_factory=list)
    picks: list[int] = field(default_factory=list)  # of a path that was read; what is generated is its own pick
    times: list[float] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    finished_at: float = 0.0
    prompt_tokens: int | None = None  # as the server counted them
    completion_tokens: int | None = None
    cached_tokens: int | None = None

    def add(
        self,
        naming: Naming,
        tokens: Sequence[int],
        logprobs: Sequence[float] | None,
        tops: Sequence[Candidates] | None,
        at: float,
    ) -> None:
        """Tokens of one piece, with a logprob and candidates each, or without. Raises ValueError."""
        if not tokens:
            return
        if self.finish is not None:
            raise ValueError(f"{len(tokens)} tokens came after the end")
        if self.naming is None:
            self.naming = naming
        elif self.naming != naming:
            raise ValueError(f"tokens are told by {self.naming} first and by {naming} later")
        self._whole("logprobs", self.logprobs, logprobs, len(tokens))
        self._whole("top candidates", self.tops, tops, len(tokens))
        self.tokens += tokens
        self.logprobs += logprobs or ()
        self.tops += tops or ()
        self.times += [at] * len(tokens)

    def end(self, reason: object, at: float) -> None:
        """The end, by the reason the server gave. Raises ValueError for a second one, or one that is no result."""
        if self.finish is not None:
            raise ValueError(f"the choice ended twice, with {self.finish!r} and {reason!r}")
        if reason not in FINISHES:
            raise ValueError(f"finish reason {reason!r}: expected {' or '.join(FINISHES)}")
        self.finish, self.finished_at = str(reason), at

    def count(self, prompt: int | None, completion: int | None, cached: int | None) -> None:
        """The server's own counts; later ones win."""
        self.prompt_tokens = prompt if prompt is not None else self.prompt_tokens
        self.completion_tokens = completion if completion is not None else self.completion_tokens
        self.cached_tokens = cached if cached is not None else self.cached_tokens

    def close(self) -> None:
        """Checks that the answer is whole. Raises ValueError."""
        if self.finish is None:
            raise ValueError(
                f"the stream ended after {len(self.tokens)} tokens without a finish reason: it was cut off"
            )
        if self.naming is None and self.text and self.completion_tokens:
            self._stand_in()
        if not self.tokens:
            raise ValueError("the answer holds no token")
        if self.completion_tokens is not None and self.completion_tokens != len(self.tokens):
            raise ValueError(f"the server counts {self.completion_tokens} tokens and sent {len(self.tokens)}")

    @property
    def offer(self) -> Offer:
        """What was there; read after `close`."""
        return Offer(naming=self.naming or "text", logprobs=bool(self.logprobs), topk=bool(self.tops))

    def _whole(self, what: str, so_far: Sequence[object], new: Sequence[object] | None, tokens: int) -> None:
        """Evidence is complete or absent, from the first token to the last."""
        if new is not None and len(new) != tokens:
            raise ValueError(f"{tokens} tokens came with {len(new)} {what}")
        if (new is None) == bool(so_far) and self.tokens:
            where = f"from position {len(self.tokens)} on" if new is None else f"up to position {len(self.tokens)}"
            raise ValueError(f"{what} are missing {where}")

    def _stand_in(self) -> None:
        """An answer of which only text is known: as many slices of it as the server counted tokens."""
        count, text = self.completion_tokens or 0, self.text
        self.naming = "text"
        bounds = [len(text) * i // count for i in range(count + 1)]
        self.tokens = [stand_in(text[a:b]) for a, b in pairwise(bounds)]
        self.times = [self.finished_at] * count


def stand_in(text: str | bytes) -> int:
    """A number for a token or slice that has no id: the first 31 bits of SHA-256 over its bytes.

    Equal texts have equal numbers; two different ones share theirs with probability 2**-31.
    """
    data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    return int.from_bytes(hashlib.sha256(data).digest()[:4], "big") >> (32 - _STAND_IN_BITS)


def finite(value: object, what: str) -> float:
    """A JSON number as a float. Raises ValueError for null, other types, and numbers no float can hold."""
    if value is None:
        raise ValueError(f"{what} is null, which stands for NaN or a value that is missing")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WrongShape(f"{what}: expected a number, found {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{what} is no finite number")
    return number
