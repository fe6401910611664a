"""Lies a step table can tell: each function returns the changed columns of one that contradicts its capture.

It does not know who must find them. Rules: one lie each, told of request 1 (the first judged one beside a companion)
where it concerns one request.
"""

from __future__ import annotations

import numpy as np

from harness.traces import Int32, Int64, StepTable

Columns = dict[str, Int32]


def leave_gap(steps: StepTable) -> Columns:
    """The last row of request 1 is gone and the one before it starts a token late."""
    start = steps.start.copy()
    start[np.flatnonzero(steps.request == 1)[1]] += 1
    return {"start": start}


def compute_twice(steps: StepTable) -> Columns:
    """Two tokens of request 1 are computed again without a preemption."""
    start = steps.start.copy()
    start[np.flatnonzero(steps.request == 1)[1]] -= 2
    return {"start": start}


def go_back(steps: StepTable) -> Columns:
    """The steps in reverse order."""
    return {"step": steps.step[::-1].copy()}


def run_twice_in_a_step(steps: StepTable) -> Columns:
    """Everything of request 1 in one step."""
    order = np.argsort(steps.request == 1, kind="stable")
    step = steps.step[order].copy()
    step[steps.request[order] == 1] = int(step.max()) + 1
    return _rows(steps, order) | {"step": step}


def never_run(steps: StepTable) -> Columns:
    """No row of request 1."""
    return _rows(steps, np.flatnonzero(steps.request != 1))


def stop_short(steps: StepTable) -> Columns:
    """The last row of request 1 is missing."""
    return _rows(steps, np.delete(np.arange(len(steps.step)), np.flatnonzero(steps.request == 1)[-1]))


def go_past(steps: StepTable) -> Columns:
    """The last row of request 1 computes three tokens more than there are."""
    count = steps.count.copy()
    count[np.flatnonzero(steps.request == 1)[-1]] += 3
    return {"count": count}


def name_unknown(steps: StepTable) -> Columns:
    """The last row belongs to a request that does not exist."""
    request = steps.request.copy()
    request[-1] = 99
    return {"request": request}


def show_together(steps: StepTable) -> Columns:
    """Every request moved to start in the first step, as if all had run together from the beginning."""
    first = np.full(int(steps.request.max()) + 1, np.iinfo(np.int32).max, dtype=np.int32)
    np.minimum.at(first, steps.request, steps.step)
    step = steps.step - first[steps.request]
    order = np.argsort(step, kind="stable")
    return _rows(steps, order) | {"step": step[order]}


def show_nothing(steps: StepTable) -> Columns:
    """No rows at all."""
    return _rows(steps, np.empty(0, dtype=np.int64))


def _rows(steps: StepTable, rows: Int64) -> Columns:
    return {
        "step": steps.step[rows], "request": steps.request[rows], "start": steps.start[rows], "count": steps.count[rows]
    }  # fmt: skip
