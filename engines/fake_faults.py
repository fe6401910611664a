"""The fake engine's faults: what it does wrong on purpose, by name.

It does not know verdicts. Rules: a fault is named in the settings and so in the fingerprint; it acts at one request
and one position; traces are altered after an honest run, except where the fault is to crash, hang, raise or be slow.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from engines.fake_run import Sequence
from harness.errors import EngineDied
from harness.faults import captures as faults
from harness.faults.captures import Place
from harness.traces import Traces

CRASH_STATUS = 70
HANG_S = 86_400.0
SLOW_S = 0.05  # per step


class Target(NamedTuple):
    """Where a fault acts: a request id ("" is the first judged request) and a position (-1 is its last)."""

    request: str
    position: int

    def place(self, traces: Traces) -> Place:
        """The target in finished traces."""
        judged = [name for name, other in zip(traces.requests.id, traces.requests.companion, strict=True) if not other]
        return Place(self.request or judged[0], self.position)

    def reached(self, sequences: list[Sequence]) -> bool:
        """Whether the target's position was generated in a run under way; -1 needs the request to be finished."""
        for sequence in sequences:
            if sequence.companion or (self.request and sequence.request.id != self.request):
                continue
            if self.position < 0:
                return sequence.finish_reason is not None
            return len(sequence.positions) > self.position
        return False


def is_batched(sequences: list[Sequence]) -> bool:
    """Whether more than one sequence is under way."""
    return sum(sequence.computed > 0 and sequence.finish_reason is None for sequence in sequences) > 1


def act_during(fault: str, target: Target, sequences: list[Sequence]) -> None:
    """What a fault does after a step."""
    if fault == "slow":
        time.sleep(SLOW_S)
    if fault not in ("crash", "die", "hang", "raise") or not target.reached(sequences):
        return
    if fault == "raise":
        raise RuntimeError("the fake engine raises on purpose (fault 'raise')")
    if fault == "die":
        raise EngineDied("the fake engine dies on purpose (fault 'die')")
    sys.stderr.write(f"the fake engine is about to {fault} on purpose\n")
    sys.stderr.flush()
    if fault == "crash":
        os._exit(CRASH_STATUS)
    time.sleep(HANG_S)


def act_after(fault: str, target: Target, traces: Traces, seats: int) -> Traces:
    """The traces as the fault leaves them."""
    plant = _PLANTS.get(fault)
    if plant is not None:
        return plant(traces, target.place(traces))
    if fault == "lie-batch":
        return faults.claim(traces, max_running=min(seats, len(traces.requests.id)))
    return show_together(traces) if fault == "lie-steps" else traces


def show_together(traces: Traces) -> Traces:
    """The step table as if every request had started in the first step; counters stay as they were."""
    steps = traces.steps
    if steps is None:
        return traces
    first = np.full(len(traces.requests.id), np.iinfo(np.int32).max, dtype=np.int32)
    np.minimum.at(first, steps.request, steps.step)
    moved = steps.step - first[steps.request]
    order = np.argsort(moved, kind="stable")
    columns = {"step": moved[order], "request": steps.request[order], "start": steps.start[order],
               "count": steps.count[order]}  # fmt: skip
    return faults.edit_steps(traces, columns)


_PLANTS: dict[str, Callable[[Traces, Place], Traces]] = {
    "one-ulp": faults.ulp_in_logprob,
    "swap": faults.swap_logits,
    "drop": lambda traces, place: faults.recount(faults.drop_request(traces, place.request)),
    "truncate": lambda traces, place: faults.truncate_request(traces, place.request),
    "nan": lambda traces, place: faults.logprob_becomes(traces, place, np.nan),
    "topk-order": faults.swap_candidates,
}
