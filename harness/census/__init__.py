"""A census: the same prompts many times in changing company, and how many different completions came back.

It does not know engines; `run_census` drives one. Rules: every copy that was asked for is counted or the census is an
error; a completion is its token ids and its finish reason; company is read from the engine's steps, and a census
without company says that it shows nothing.

After the census of "Defeating nondeterminism in LLM inference" (Thinking Machines, 2025): 80 distinct completions of
1,000 at temperature 0, parting at token 103, which became 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.canary import Repeated, Share, count_answers, read_completion
from harness.census.rounds import Design, Round
from harness.census.tree import Branch, build_tree
from harness.occupancy import Occupancy, occupancy

if TYPE_CHECKING:
    from harness.traces import Traces

SCHEMA = 1
CLEAN, FOUND, NO_COMPANY = 0, 1, 3
NOTHING_SHOWN = "nothing was seen to run beside anything else, so this census says nothing about company"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCensus:
    """One prompt's answers at temperature 0, most frequent first in the tree. `seeds` are those that agreed twice."""

    prompt: str
    prompt_tokens: int
    answers: Repeated
    tree: tuple[Branch, ...]
    seeds: Share | None  # None: no seeds were asked
    seed_distinct: int  # completions over all seeds: drawing that never varies would hide everything

    @property
    def varied(self) -> bool:
        """Whether temperature 0 or one of the seeds gave two answers."""
        return self.answers.distinct > 1 or (self.seeds is not None and self.seeds.count < self.seeds.total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """What a census came to."""

    design: Design
    prompts: tuple[PromptCensus, ...]
    rounds: int
    occupancy: Occupancy | None
    caps: tuple[str, ...]

    @property
    def in_company(self) -> bool:
        """Whether some step was seen to run more than one request."""
        return self.occupancy is not None and self.occupancy.most > 1

    @property
    def exit_code(self) -> int:
        """0: one completion each; 1: more; 3: one each, and no company was seen."""
        if any(one.varied for one in self.prompts):
            return FOUND
        return CLEAN if self.in_company else NO_COMPANY

    @property
    def sentence(self) -> str:
        """The result in words."""
        varied = sum(one.answers.distinct > 1 for one in self.prompts)
        most = max(one.answers.distinct for one in self.prompts)
        text = f"{varied} of {len(self.prompts)} prompts gave more than one completion in {self.design.n}"
        text += f", at most {most} distinct"
        shares = [one.seeds for one in self.prompts if one.seeds is not None]
        if shares:
            agreed = Share(count=sum(one.count for one in shares), total=sum(one.total for one in shares))
            text += f"; of the seeds asked twice {agreed.text()} agreed"
        return text if self.in_company else f"{text}; {NOTHING_SHOWN}"


def count_census(
    design: Design, rounds: Sequence[Round], captures: Sequence[Traces], caps: Sequence[str] = ()
) -> Census:
    """Counts every copy of every round. Raises ComparisonError for a copy without an answer."""
    from harness.judged import find_judged

    places: dict[str, dict[int | None, list[tuple[Traces, int]]]] = {}
    lengths: dict[str, int] = {}
    for one, traces in zip(rounds, captures, strict=True):
        judged = find_judged(traces)
        at = {key.id: j for j, key in enumerate(judged.keys)}
        for copy in one.copies:
            rows = places.setdefault(copy.prompt, {}).setdefault(copy.seed, [])
            rows.append((traces, at[copy.request.id]))
            lengths[copy.prompt] = len(copy.request.prompt_token_ids)
    return Census(
        design=design, prompts=tuple(_prompt(name, lengths[name], places[name]) for name in sorted(places)),
        rounds=len(rounds), occupancy=occupancy(captures), caps=tuple(caps),
    )  # fmt: skip


def _prompt(name: str, length: int, rows: Mapping[int | None, Sequence[tuple[Traces, int]]]) -> PromptCensus:
    greedy = rows[None]
    seeded = [[read_completion(*row) for row in rows[seed]] for seed in rows if seed is not None]
    agreed = sum(len(set(pair)) == 1 for pair in seeded)
    return PromptCensus(
        prompt=name, prompt_tokens=length, answers=count_answers(name, greedy),
        tree=build_tree(Counter(read_completion(*row)[0] for row in greedy)),
        seeds=Share(count=agreed, total=len(seeded)) if seeded else None,
        seed_distinct=len({completion for pair in seeded for completion in pair}),
    )  # fmt: skip
