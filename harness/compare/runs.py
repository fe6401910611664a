"""Compares the captures of two run folders, case by case, under the strongest rule their evidence allows.

It does not know cells or verdicts. Rules: cases are matched by content; a case that only one folder has is a
difference; so is a planned one that neither has; nothing in common is an error.
"""

from __future__ import annotations

import json
from pathlib import Path

from harness.capture import Capture
from harness.compare import Comparison, compare, strongest_rule
from harness.errors import StoreError
from harness.judged import ComparisonError
from harness.record import PLAN
from harness.store import Store


def compare_runs(reference: Path, variant: Path) -> tuple[str, bool]:
    """(text, whether all is the same). Raises StoreError."""
    for folder in (reference, variant):
        if not folder.is_dir():
            raise StoreError(f"{folder}: no such folder; name the folders of two runs")
    left, right = Store(reference / "captures"), Store(variant / "captures")
    ours, theirs = left.cases(), right.cases()
    if not set(ours) & set(theirs):
        raise StoreError(f"{reference} and {variant}: no case in common; runs of the same matrix, engine, model and "
                         "settings can be compared")  # fmt: skip
    lines = [f"only in {reference}: case {case}" for case in ours if case not in theirs]
    lines += [f"only in {variant}: case {case}" for case in theirs if case not in ours]
    lines += _not_captured(reference, len(ours)) + _not_captured(variant, len(theirs))
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


def _not_captured(folder: Path, captured: int) -> list[str]:
    """What the folder's plan counts beyond its captures; a folder without a plan of its own is taken as it is."""
    file = folder / PLAN
    if not file.exists():
        return []
    try:
        planned = int(json.loads(file.read_text(encoding="utf-8"))["cases"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{file}: expected the plan of a run: {error!r}; restore it, or run again") from error
    return [f"{folder}: {captured} of {planned} planned cases were captured"] if captured < planned else []


def _compare(a: Capture, b: Capture) -> Comparison:
    return compare(a.traces, b.traces, strongest_rule(a.traces, b.traces), "natural")


def _difference(result: Comparison) -> str:
    where = ""
    if result.first is not None:
        where = f", first in request {result.first.key} at position {result.first.position}"
    return f"{result.differing_positions} of {result.positions} positions differ{where}"
