"""Finds the baselines that a plan's environment cells are held against. It does not judge."""

from __future__ import annotations

from harness.baseline.drift import Accepted
from harness.baseline.entry import Key
from harness.baseline.shelf import Shelf
from harness.finished import model_key
from harness.plan import Plan


def accepted_for(plan: Plan, url: str) -> dict[str, Accepted]:
    """Label to baseline, for the pairs on an environment axis that have one. Raises UsageError, StoreError."""
    shelf = Shelf(url)
    found: dict[str, Accepted] = {}
    for pair in plan.pairs:
        if pair.cell.axis.kind != "environment":
            continue
        variant = pair.label.partition("[")[2].rstrip("]")
        key = Key(engine=plan.engine, model=model_key(plan.model), cell=pair.cell.name, variant=variant)
        accepted = shelf.accepted(key)
        if accepted is not None:
            found[pair.label] = accepted
    return found
