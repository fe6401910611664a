"""Checks of what was timed: are the answers the reference's, and was each of them computed?

It does not know times. Rules: every timed answer is checked, warm-up and capacity probes included; an answer without a
reference is a failure, not a skip; where an engine does not show its steps, the audit says that it saw no more than
the engine's own word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.cost.timing import Timing, reference_key

MOST_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The reference's digests of one sample."""

    judged: str
    tokens_only: str


Reference = Mapping[str, Answer]  # by `reference_key`


@dataclass(frozen=True, slots=True, kw_only=True)
class Equality:
    """How many timed answers are the untimed reference's, in tokens and in every judged bit."""

    answers: int
    same_tokens: int
    same_bits: int
    most_distinct: int  # different answers that one request got, the reference's included
    first_different: tuple[str, ...]  # a few of those that differ

    @property
    def whole(self) -> bool:
        """Every answer, to the bit, and at least one."""
        return self.answers > 0 and self.same_bits == self.answers


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheAudit:
    """Whether answers were computed. `faults` are sentences; `shown` says whether the engine's steps back it."""

    faults: tuple[str, ...]
    shown: bool
    cached_tokens: int
    sentence: str


def check_equality(timings: Sequence[Timing], reference: Reference) -> Equality:
    """Holds timed answers against the untimed reference."""
    distinct: dict[str, set[str]] = {key: {answer.judged} for key, answer in reference.items()}
    tokens = bits = 0
    different: list[str] = []
    for one in timings:
        answer = reference.get(one.key)
        distinct.setdefault(one.key, set()).add(one.judged)
        tokens += answer is not None and one.tokens_only == answer.tokens_only
        same = answer is not None and one.judged == answer.judged
        bits += same
        if not same and one.key not in different:
            different.append(one.key)
    served = {one.key for one in timings}
    return Equality(
        answers=len(timings), same_tokens=tokens, same_bits=bits,
        most_distinct=max((len(distinct[key]) for key in served), default=0),
        first_different=tuple(different[:MOST_NAMED]),
    )  # fmt: skip


def audit_cache(timings: Sequence[Timing], *, cache_is_off: bool) -> CacheAudit:
    """Looks for answers that were not computed. Only faults where the cache is meant to be off."""
    cached = sum(one.cached_tokens for one in timings)
    shown = bool(timings) and all(one.computed_tokens is not None for one in timings)
    if not cache_is_off:
        return CacheAudit(faults=(), shown=shown, cached_tokens=cached, sentence="a prefix cache is on in this arm")
    faults = [f"request {one.key}: {one.cached_tokens} prompt tokens came from a cache that is meant to be off"
              for one in timings if one.cached_tokens]  # fmt: skip
    faults += [
        f"request {one.key}: {one.computed_tokens} tokens computed, {_needed(one)} needed: it was not computed whole"
        for one in timings
        if one.computed_tokens is not None and one.computed_tokens < _needed(one)
    ]
    if not timings:
        faults.append("nothing was timed, so nothing was audited")
    more = [f"and {len(faults) - MOST_NAMED} more"] if len(faults) > MOST_NAMED else []
    sentence = (
        f"{len(timings)} answers: every token of prompt and output was computed, by the engine's own steps"
        if shown
        else f"{len(timings)} answers: no cached token, by the engine's word alone; it does not show its steps"
    )
    return CacheAudit(
        faults=(*faults[:MOST_NAMED], *more), shown=shown, cached_tokens=cached,
        sentence="an answer was not computed" if faults else sentence,
    )  # fmt: skip


def _needed(one: Timing) -> int:
    """Different tokens that must run: the prompt, and all outputs but the last."""
    return one.prompt_tokens + len(one.token_s) - 1


__all__ = ["Answer", "CacheAudit", "Equality", "Reference", "audit_cache", "check_equality", "reference_key"]
