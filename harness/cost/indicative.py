"""An indicative cost from a run's own captures: the same requests, each alone, in the run's mode and in a control's.

It does not measure. Rules: the ratio is a range, of the reference's two captures; answers that took less than a second
in all are too short to say anything; nothing of it reaches the gate; it says that it is indicative, for so few
captures, in the order of the plan, show no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from harness.capture import Capture
from harness.judge import Captures
from harness.plan import Pair, Plan

ALONE = "alone"
SHORTEST_S: Final = 1.0  # of the control's answers together; below it a ratio is start-up and chance
Times = Mapping[tuple[str, int], tuple[int, float]]  # (request, sample) to (tokens, seconds)


@dataclass(slots=True)
class _Sums:
    """Seconds of the same answers in the run's mode, again in it, and in the control's."""

    modes: dict[str, None] = field(default_factory=dict)
    answers: int = 0
    reference: float = 0.0
    floor: float = 0.0
    control: float = 0.0


def indicative_line(plan: Plan, captures: Captures) -> str | None:
    """The cost in a sentence; None when no capture of a control has the reference's requests alone."""
    sums, seen = _Sums(), set()
    for pair in plan.pairs:
        key = (pair.reference, pair.control_reference)
        if key not in seen and pair.cell.control.kind == "mode":
            seen.add(key)
            _add(sums, pair, plan, captures)
    if not sums.answers or not min(sums.reference, sums.floor, sums.control) > 0:
        return None
    mode = " and ".join(sums.modes)
    if sums.control < SHORTEST_S:
        found = f"{sums.answers} answers in {sums.control:.2f} s of mode {mode} are too short to say"
    else:
        low, high = sorted((sums.reference / sums.control, sums.floor / sums.control))
        found = f"{low:.2f} to {high:.2f} times the time of mode {mode} over {sums.answers} answers, each alone"
    return f"indicative only: {found}; `samebits cost` measures it"


def _add(sums: _Sums, pair: Pair, plan: Plan, captures: Captures) -> None:
    cases = (pair.reference, pair.floor, pair.control_reference)
    known = [(plan.cases[case], captures.get(case)) for case in cases if case is not None]
    if len(known) != len(cases) or any(case.schedule.name != ALONE or case.replay != "natural" for case, _ in known):
        return
    reference, floor, control = (_times(made) if isinstance(made, Capture) else {} for _, made in known)
    for key in sorted(reference.keys() & floor.keys() & control.keys()):
        lengths = {side[key][0] for side in (reference, floor, control)}
        if len(lengths) == 1:
            sums.modes[str(pair.cell.control.mode)] = None
            sums.answers += 1
            sums.reference += reference[key][1]
            sums.floor += floor[key][1]
            sums.control += control[key][1]


def _times(capture: Capture) -> Times:
    table = capture.traces.requests
    return {
        (name, int(table.sample[row])): (int(table.length[row]), float(table.finish_s[row] - table.arrival_s[row]))
        for row, name in enumerate(table.id)
        if not table.companion[row]
    }
