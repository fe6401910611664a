"""Whether a model judge is shown to be reproducible: by the verdicts of its own cells, over its own fingerprint.

It does not score. Rules: nothing is taken for shown; a judge without a run of its own, with another fingerprint than
that run's, with anything there but PASS, under a rule that does not cover how its answer is read, or that contradicted
itself, is marked with every reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.engine import RULES, Field, Rule
from harness.fingerprint import Fingerprint, fingerprint_of, undeclared
from harness.finished import FinishedRun, JudgedPair, read_finished
from harness.store import Store, subject_fields
from harness.verdict import VerdictName

MARK = "judge not shown reproducible"
MOST_NAMED = 3
ARMS = ("reference", "variant")


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """`reasons` are why a judge is not shown to be reproducible, none if it is; `caps` limit what that says."""

    reasons: tuple[str, ...]
    caps: tuple[str, ...] = ()
    run: str | None = None  # digest of its own run
    matrix: str | None = None

    @property
    def mark(self) -> str:
        """The mark of every score, or nothing."""
        return f"{MARK}: {'; '.join(self.reasons)}" if self.reasons else ""


def judge_standing(
    fields: Sequence[Field], rule: Rule, differed: int, folder: Path | None, command: str
) -> Standing:  # fmt: skip
    """The standing of a judge whose engine has `fields`. `command` says how its cells are run. Raises StoreError."""
    own = [f"it read {differed} of its own answers otherwise when asked again"] if differed else []
    if folder is None:
        return Standing(reasons=(*own, f"its own cells were not run (`{command} --out DIR`, then --judge-run DIR)"))
    run = read_finished(folder)
    judge = identity(fields)
    covered, nearest, caps = _covered(run, folder, judge)
    reasons = [*own, *_unsound(run)]
    if not covered:
        reasons.append(f"another fingerprint than in its own run: {nearest}")
    elif not any(RULES.index(pair.rule) >= RULES.index(rule) for pair in covered):
        reasons.append(f"its own cells were judged under rule {covered[0].rule}, its answers are read from {rule}")
    return Standing(reasons=tuple(reasons), caps=caps, run=run.digest, matrix=run.matrix)


def identity(fields: Sequence[Field]) -> Fingerprint:
    """The identity fields of an engine, without the work it was given."""
    kept = (field for field in fields if field.field_class == "identity" and not field.name.startswith("work."))
    return fingerprint_of(kept)


def _weakness(pair: JudgedPair) -> list[str]:
    """What a PASS of this pair does not say."""
    weak = [f"{pair.label}: {pair.weak}"] if pair.weak else []
    return [*weak, f"{pair.label}: its control tests the comparator only"] if pair.control == "planted" else weak


def _unsound(run: FinishedRun) -> list[str]:
    """What in the run is not a PASS."""
    if not run.pairs:
        return ["its own run judged nothing"]
    other = [f"{pair.label} {pair.verdict}" for pair in run.pairs if pair.verdict is not VerdictName.PASS]
    more = f" and {len(other) - MOST_NAMED} more" if len(other) > MOST_NAMED else ""
    found = [f"its own cells did not all PASS: {', '.join(other[:MOST_NAMED])}{more}"] if other else []
    if len(run.pairs) < run.planned:
        found.append(f"its own run judged {len(run.pairs)} of {run.planned} pairs")
    return found


def _covered(run: FinishedRun, folder: Path, judge: Fingerprint) -> tuple[list[JudgedPair], str, tuple[str, ...]]:
    """Pairs with an arm of this fingerprint, what the nearest other arm has changed, and what is unknown."""
    store, covered = Store(folder / "captures"), list[JudgedPair]()
    nearest: list[str] | None = None
    limits: dict[str, None] = {}
    for pair in run.pairs:
        for case in (pair.cases[role] for role in ARMS if role in pair.cases):
            if not store.has(case):
                continue
            found, caps = undeclared(identity(subject_fields(store.header(case))), judge, (), same_lifetime=False)
            if not found:
                covered.append(pair)
                limits |= dict.fromkeys([*caps, *_weakness(pair)])
                break
            told = [one.describe() for one in found]
            nearest = told if nearest is None or len(told) < len(nearest) else nearest
    if nearest is None:
        return covered, "its captures are gone", tuple(limits)
    more = f" and {len(nearest) - MOST_NAMED} more fields" if len(nearest) > MOST_NAMED else ""
    return covered, f"{', '.join(nearest[:MOST_NAMED])}{more}", tuple(limits)
