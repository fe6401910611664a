"""Attribution of a drift over a history: the first run that has it, and the fields that changed there. Pure.

It does not know files or baselines. Rules: a night without a captured digest says nothing and is passed over; the
drift begins after the last night that still had the baseline's bits; every later change of the bits is a step of its
own; where no field changed, that is said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.baseline.drift import NO_SUSPECT, suspected
from harness.fingerprint import Fingerprint
from harness.release.history import Night


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One change of a pair's bits: in which run, from and to which judged digest, and what changed there."""

    run: str
    started: str
    old: str
    new: str
    changed: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """What changed, in words."""
        return f"changed: {'; '.join(self.changed)}" if self.changed else NO_SUSPECT


@dataclass(frozen=True, slots=True, kw_only=True)
class Onset:
    """Where a drift came from. `last_good` None: no recorded night had the baseline's bits.

    `steps` begin with the first run that has the drift; more follow where the bits moved again.
    """

    label: str
    baseline: str
    last_good: Night | None
    steps: tuple[Step, ...]

    @property
    def sentence(self) -> str:
        """The attribution in words."""
        first = self.steps[0]
        if self.last_good is None:
            since = f"every recorded night differs from the baseline, the first on {first.started}"
            return f"{self.label}: {since}; {first.sentence}"
        again = f"; the bits moved {len(self.steps) - 1} more times since" if len(self.steps) > 1 else ""
        return (
            f"{self.label}: drifts since the run of {first.started} (the last good one was {self.last_good.started}); "
            f"{first.sentence}{again}"
        )


def attribute(
    nights: Sequence[Night],
    fingerprint: Callable[[str], Fingerprint],
    baseline: Callable[[], Fingerprint] | None = None,
) -> Onset | None:
    """The onset of the drift that the newest of a pair's nights (oldest first) has; None when it has none.

    `fingerprint` opens a night's, `baseline` that of the baseline in force.
    """
    seen = [night for night in nights if night.judged_digest]
    if not seen or not seen[-1].drifted:
        return None
    accepted = seen[-1].baseline_digest
    begin = len(seen)
    while begin and seen[begin - 1].judged_digest != accepted:
        begin -= 1
    last_good = seen[begin - 1] if begin else None
    steps: list[Step] = []
    before, digest = last_good, accepted
    for night in seen[begin:]:
        if night.judged_digest != digest:
            steps.append(_step(before, night, digest, fingerprint, baseline))
        before, digest = night, night.judged_digest
    return Onset(label=seen[-1].label, baseline=accepted, last_good=last_good, steps=tuple(steps))


def _step(
    before: Night | None, night: Night, digest: str, fingerprint: Callable[[str], Fingerprint],
    baseline: Callable[[], Fingerprint] | None,
) -> Step:  # fmt: skip
    now = fingerprint(night.fingerprint)
    earlier = fingerprint(before.fingerprint) if before is not None else baseline() if baseline is not None else None
    changed = suspected(earlier, now)[0] if earlier is not None else ()
    return Step(run=night.run, started=night.started, old=digest, new=night.judged_digest, changed=changed)
