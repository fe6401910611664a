"""How full an engine was: sequences per step and preemptions, read from step tables.

It does not know verdicts. Rules: what a table does not show is not counted; an engine without a step table has no
occupancy, which is not the same as an idle one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.traces import Traces


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """`running` counts steps by the number of sequences in them, ascending; `preemptions` are of all requests."""

    running: tuple[tuple[int, int], ...]
    preemptions: int

    @property
    def most(self) -> int:
        """Sequences in the fullest step."""
        return self.running[-1][0] if self.running else 0

    @property
    def text(self) -> str:
        """`running requests per step: 1 in 4 steps, 2 in 9; 0 preemptions`."""
        counts = [f"{size} in {steps}" for size, steps in self.running]
        if not counts:
            return "no step was shown"
        more = "".join(f", {one}" for one in counts[1:])
        times = "1 preemption" if self.preemptions == 1 else f"{self.preemptions} preemptions"
        return f"running requests per step: {counts[0]} steps{more}; {times}"

    def to_json(self) -> dict[str, object]:
        """For records."""
        return {"running": {str(size): steps for size, steps in self.running}, "preemptions": self.preemptions}


def occupancy(captures: Iterable[Traces]) -> Occupancy | None:
    """Over all captures; None if one of them shows no steps."""
    counts: Counter[int] = Counter()
    preemptions = 0
    for traces in captures:
        if traces.steps is None:
            return None
        in_step: dict[int, set[int]] = {}
        for step, request in zip(traces.steps.step.tolist(), traces.steps.request.tolist(), strict=True):
            in_step.setdefault(step, set()).add(request)
        counts.update(len(requests) for requests in in_step.values())
        preemptions += int(traces.requests.preemptions.sum())
    return Occupancy(running=tuple(sorted(counts.items())), preemptions=preemptions)
