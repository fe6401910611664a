"""Holds a verdict to what its cell declares as its point: the fault it is there to show, for the reason it names.

It does not judge. Rules: a fault shows the cell's point only if the axis can have caused it. So FAIL takes a floor that
held and a position that the axis reached; ERROR takes a reference and a floor that were captured, and a variant that
was not; RUN-TO-RUN takes a floor that differs. Whatever else the cell came to is INSUFFICIENT, UNSUPPORTED stays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from harness.capture import Capture
from harness.lifetime import Failure
from harness.plan import Pair
from harness.verdict import Verdict, VerdictName


def hold_to_point(pair: Pair, captures: Mapping[str, Capture | Failure], verdict: Verdict) -> Verdict:
    """The verdict, marked expected if it is the cell's point; INSUFFICIENT if it is not."""
    expect = pair.cell.expect
    if expect is None or verdict.verdict is VerdictName.UNSUPPORTED:
        return verdict
    declared = VerdictName.FAIL if expect == "RUN-TO-RUN" else VerdictName(expect)
    missed = f"it came to {verdict.verdict}" if verdict.verdict is not declared else _missed(pair, captures, verdict)
    if missed:
        reason = f"the cell's point is to show {expect}, but {missed}: {verdict.reason}"
        return dataclasses.replace(verdict, verdict=VerdictName.INSUFFICIENT, reason=reason)
    return dataclasses.replace(verdict, expected=declared, reason=f"as declared: {verdict.reason}")


def _missed(pair: Pair, captures: Mapping[str, Capture | Failure], verdict: Verdict) -> str:
    """Why the declared verdict does not show the cell's point; empty when it does."""
    if pair.cell.expect == "ERROR":
        roles = (("reference", pair.reference), ("floor", pair.floor))
        lost = [role for role, case in roles if case is not None and not isinstance(captures.get(case), Capture)]
        if lost:
            return f"the {lost[0]} errs already, so the axis shows nothing"
        return "" if verdict.failure is not None else "every capture was made, and what they hold is wrong"
    noisy = verdict.floor is not None and verdict.floor.verdict == "different"
    if pair.cell.expect == "RUN-TO-RUN":
        return "" if noisy else "the reference is the same twice"
    if noisy:
        return 'the reference differs from itself (a cell that is to show that declares expect = "RUN-TO-RUN")'
    if verdict.comparison is None or not verdict.comparison.witnessed:
        return "no position was reached by the axis"
    return ""
