"""The rounds of a census: copies of the same prompts in company that changes from round to round.

It does not know engines or answers. Rules: everything is drawn from one seed, so a census can be asked again; a copy
differs from its prompt in its id alone; companions are never counted; temperature 0 unless seeds are the question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.draws import Draws
from harness.request import Request, Sampling
from harness.schedule import Arrival, Schedule

DRAWN_TEMPERATURE = 1.0  # of prompts that were greedy, where seeds are asked
MOST_APART = 3  # steps between two arrivals of a round, at most; each round draws how far apart its own may be


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """How often each prompt is asked (`n`), with how many seeds twice, how many copies share a round at most.

    `max_tokens` None leaves each prompt's own.
    """

    n: int
    seeds: int
    per_round: int
    seed: int
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One asking: the prompt it is a copy of, and the seed it drew with (None: temperature 0)."""

    prompt: str
    seed: int | None
    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What runs together: copies, companions, and who arrives when."""

    copies: tuple[Copy, ...]
    companions: tuple[Request, ...]
    schedule: Schedule

    @property
    def requests(self) -> tuple[Request, ...]:
        """Copies and companions."""
        return (*(copy.request for copy in self.copies), *self.companions)


def build_rounds(prompts: Sequence[Request], companions: Sequence[Request], design: Design) -> tuple[Round, ...]:
    """All rounds; together they hold every prompt n times, and each seed twice."""
    draws = Draws(design.seed, "census")
    rest = draws.shuffled([copy for prompt in prompts for copy in _copies(prompt, design)])
    rounds: list[Round] = []
    while rest:
        size = 1 + draws.below(design.per_round)
        now, rest = rest[:size], rest[size:]
        rounds.append(_round(len(rounds), now, companions, draws))
    return tuple(rounds)


def shorten(request: Request, max_tokens: int | None) -> Request:
    """The request with one answer of this length; None leaves its own."""
    length = max_tokens or request.sampling.max_tokens
    least = min(length, request.sampling.min_tokens)
    return replace(request, sampling=replace(request.sampling, max_tokens=length, min_tokens=least, n=1))


def _copies(prompt: Request, design: Design) -> list[Copy]:
    plain: Sampling = shorten(prompt, design.max_tokens).sampling
    greedy = replace(plain, temperature=0.0, seed=None)
    found = [_copy(prompt, f"{prompt.id}#{number}", greedy) for number in range(design.n)]
    for seed in range(design.seeds):
        drawn = replace(plain, temperature=plain.temperature or DRAWN_TEMPERATURE, seed=seed)
        found += [_copy(prompt, f"{prompt.id}@{seed}#{number}", drawn) for number in range(2)]
    return found


def _copy(prompt: Request, name: str, sampling: Sampling) -> Copy:
    return Copy(prompt=prompt.id, seed=sampling.seed, request=replace(prompt, id=name, sampling=sampling))


def _round(number: int, copies: Sequence[Copy], companions: Sequence[Request], draws: Draws) -> Round:
    count = draws.below(len(companions) + 1)
    beside = [
        replace(one, id=f"beside:{number}:{place}:{one.id}")
        for place, one in enumerate(draws.shuffled(companions)[:count])
    ]
    names = draws.shuffled([(copy.request.id, False) for copy in copies] + [(one.id, True) for one in beside])
    arrivals: list[Arrival] = []
    step, apart = 0, draws.below(MOST_APART + 1)
    for name, companion in names:
        arrivals.append(Arrival(request=name, companion=companion, at_step=step))
        step += draws.below(apart + 1)
    schedule = Schedule(name=f"census round {number}", arrivals=tuple(arrivals))
    return Round(copies=tuple(copies), companions=tuple(beside), schedule=schedule)
