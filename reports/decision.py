"""What a run came to: the decision behind its exit code, and how each verdict weighs on it.

It does not know how a report looks. Rules: a run that left planned pairs unjudged is never a good one, whatever its
exit code says; an expected verdict weighs as a good one; a verdict of an unknown name is the worst.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from reports.record import Run, Verdict
from reports.words import count, verdict_words

SEVERITY = ("ERROR", "FAIL", "INSUFFICIENT", "UNSUPPORTED", "APPROVED", "PASS")  # worst first
Status = Literal["good", "bad", "open", "idle"]


class Decision(NamedTuple):
    """What a run came to, for the top of a report."""

    title: str
    meaning: str
    status: Status


_DECISIONS: dict[int | None, Decision] = {
    0: Decision("Accepted", "every planned cell was judged and none is open", "good"),
    1: Decision("Rejected", "a cell failed and nobody has signed for it", "bad"),
    2: Decision("Not run", "the command line, a cell, a corpus or a policy file cannot be used", "bad"),
    3: Decision("Not shown", "the evidence is not enough to accept or reject", "open"),
    4: Decision("Engine error", "an engine did not answer or answered wrongly", "bad"),
    5: Decision("Approval not valid", "an approval that the run calls upon is invalid, expired or changed", "bad"),
    130: Decision("Interrupted", "the run was stopped before its end and can be resumed", "open"),
}


def decide(run: Run) -> Decision:
    """The decision behind the exit code; never a good one when pairs were left unjudged."""
    decision = _DECISIONS.get(run.exit_code)
    if decision is None:
        code = "no exit code" if run.exit_code is None else f"exit code {run.exit_code}, which has no meaning"
        return Decision("No decision", f"the record has {code}", "bad")
    if decision.status == "good" and unjudged(run):
        return Decision("Not shown", f"exit code 0, yet {unjudged(run)}", "bad")
    return decision


def unjudged(run: Run) -> str:
    """Says what was planned and has no verdict here; empty when everything has one."""
    planned, found = run.plan.pairs, len(run.verdicts)
    if planned is None:
        return "" if found else "nothing was judged"
    if found == 0:
        return f"none of {count(planned, 'planned pair')} was judged"
    return f"{found:,} of {count(planned, 'planned pair')} were judged" if found != planned else ""


def status(verdict: Verdict) -> Status:
    """How a verdict weighs on a release."""
    if verdict.is_expected or verdict.verdict in ("PASS", "APPROVED"):
        return "good"
    if verdict.verdict == "UNSUPPORTED":
        return "idle" if verdict.foreseen else "open"
    return "open" if verdict.verdict == "INSUFFICIENT" else "bad"


def by_severity(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Worst first; verdicts that are expected rank with the good ones, before PASS. Stable otherwise."""
    return sorted(verdicts, key=_rank)


def _rank(verdict: Verdict) -> int:
    if verdict.is_expected:
        return SEVERITY.index("APPROVED")
    return SEVERITY.index(verdict.verdict) if verdict.verdict in SEVERITY else -1


def tally(run: Run) -> tuple[tuple[str, int], ...]:
    """(verdict in words, how many), worst first."""
    counts = Counter(verdict_words(verdict) for verdict in by_severity(run.verdicts))
    return tuple(counts.items())
