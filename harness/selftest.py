"""The selftest: plants every fault of `harness.faults.listing` in a trial that is PASS and sees each one found.

It does not know engines or the command line. Rules: the untouched trial must be PASS first, or nothing that follows
means anything; a fault is killed when the part that must find it does, where it must, and the judge comes to the
expected verdict; every other fault survives and is named.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.claims import check_claims
from harness.compare import compare
from harness.faults.listing import list_faults
from harness.faults.plants import Fault
from harness.judge import judge
from harness.judged import ComparisonError
from harness.specimen import Trial, make_trial
from harness.witness import witnessed


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivor:
    """A fault that was not found as it should have been, and what happened instead."""

    name: str
    place: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SelftestResult:
    """What became of the planted faults."""

    planted: int
    kinds: int
    survivors: tuple[Survivor, ...]

    @property
    def killed(self) -> int:
        """Faults found as they should be."""
        return self.planted - len(self.survivors)

    def text(self) -> str:
        """Survivors, one per line, then `N of N killed`."""
        lines = [f"survived: {item.name} ({item.place}): {item.what}" for item in self.survivors]
        lines.append(f"{self.killed} of {self.planted} killed ({self.kinds} kinds of faults)")
        return "\n".join(lines)


def run_selftest() -> SelftestResult:
    """Plants all faults, one at a time."""
    trial = make_trial()
    listed = list_faults()
    survivors = [*_check_untouched(trial)]
    for fault in listed:
        what = examine(fault, trial)
        if what is not None:
            survivors.append(Survivor(name=fault.name, place=fault.place, what=what))
    return SelftestResult(planted=len(listed), kinds=len({fault.name for fault in listed}), survivors=tuple(survivors))


def examine(fault: Fault, trial: Trial) -> str | None:
    """Plants one fault in a copy of the trial; None if it is found as it must be, else what went wrong."""
    planted = fault.plant(trial)
    missed = _missed(fault, planted)
    if missed is not None:
        return missed
    verdict = judge(planted.pair, planted.captures, planted.expected)
    if verdict.verdict.value != fault.expected:
        return f"judged {verdict.verdict.value}, expected {fault.expected}: {verdict.reason}"
    return None


def _check_untouched(trial: Trial) -> tuple[Survivor, ...]:
    verdict = judge(trial.pair, trial.captures, trial.expected)
    if verdict.verdict.value == "PASS":
        return ()
    what = f"judged {verdict.verdict.value}: {verdict.reason}"
    return (Survivor(name="nothing planted", place="the untouched trial must be PASS", what=what),)


def _missed(fault: Fault, planted: Trial) -> str | None:
    """What the part that must find the fault says instead, or None."""
    reference, varied = planted.reference.traces, planted.varied.traces
    if fault.found_by == "claims" and not check_claims(varied):
        return "no contradiction was found in the capture"
    if fault.found_by == "witness":
        count = witnessed(reference, varied, planted.pair.cell.axis.witness).positions
        return f"{count} positions were witnessed, expected none" if count else None
    if fault.found_by == "comparator" or fault.at is not None:
        return _misplaced(fault, planted)
    return None


def _misplaced(fault: Fault, planted: Trial) -> str | None:
    cell = planted.pair.cell
    try:
        result = compare(planted.reference.traces, planted.varied.traces, cell.rule, cell.replay)
    except ComparisonError as error:
        return None if fault.expected == "ERROR" and fault.at is None else f"not comparable: {error}"
    if result.first is None:
        return "the comparator found no difference"
    found = (result.first.request, result.first.position)
    return None if fault.at in (None, found) else f"located at {found}, expected at {fault.at}"
