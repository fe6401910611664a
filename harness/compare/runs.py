"""Compares the captures of two run folders, case by case, under the strongest rule their evidence allows.

It does not know cells or verdicts. Rules: cases are matched by content; a case that only one folder has is a
difference; nothing in common is an error.
"""

from __future__ import annotations

from pathlib import Path

from harness.capture import Capture
from harness.compare import Comparison, compare, strongest_rule
from harness.errors import StoreError
from harness.judged import ComparisonError
from harness.store import Store


def compare_runs(reference: Path, variant: Path) -> tuple[str, bool]:
    """(text, whether all is the same). Raises StoreError."""
    left, right = Store(reference / "captures"), Store(variant / "captures")
    ours, theirs = left.cases(), right.cases()
    if not set(ours) & set(theirs):
        raise StoreError(f"{reference} and {variant}: no case in common; runs of the same matrix, engine, model and "
                         "settings can be compared")  # fmt: skip
    lines = [f"only in {reference}: case {case}" for case in ours if case not in theirs]
    lines += [f"only in {variant}: case {case}" for case in theirs if case not in ours]
    same = not lines
    positions = 0
    for case in (case for case in ours if case in theirs):
        try:
            result = _compare(left.read(case), right.read(case))
        except ComparisonError as error:
            lines.append(f"case {case}: cannot be compared: {error}")
            same = False
            continue
        positions += result.positions
        same &= result.outcome == "same"
        if result.outcome == "different":
            lines.append(f"case {case}: {_difference(result)}")
    common = len(set(ours) & set(theirs))
    lines.append(f"{common} cases compared, {positions} positions: {'same' if same else 'DIFFERENT'}")
    return "\n".join(lines), same


def _compare(a: Capture, b: Capture) -> Comparison:
    return compare(a.traces, b.traces, strongest_rule(a.traces, b.traces), "natural")


def _difference(result: Comparison) -> str:
    where = ""
    if result.first is not None:
        where = f", first in request {result.first.key} at position {result.first.position}"
    return f"{result.differing_positions} of {result.positions} positions differ{where}"
