"""From a session's trials to what the mode costs, with what is resolved and what is not.

It does not know engines or files. Rules:

1. the ratio of a pair is that of neighbours in one round, above 1 where on costs more;
2. one primary metric: the geometric mean over loads of the time to serve (of the mean latency, where arrivals are
   open-loop); its interval is alone, all others' hold together;
3. the same is computed for off against off again (A/A); an effect within the A/A interval's reach, or whose own
   interval holds 1, is *not resolved*;
4. timed answers that are not the reference's, or that were not computed, make the whole comparison a failure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from harness.cost.arm import OFF, OFF_AGAIN, ON
from harness.cost.audit import CacheAudit, Equality, audit_cache, check_equality
from harness.cost.interval import Interval, as_ratio, interval, simultaneous
from harness.cost.metric import BY_NAME, PROCESS, SERVING, Metric, log_cost
from harness.cost.session import Session, Trial

PRIMARY: Final = Metric("slowdown", "s", "time", "time to serve, geometric mean over loads")
WHOLE: Final = ""  # the load of metrics that belong to a process


class State(StrEnum):
    """What can be said of a ratio."""

    RESOLVED = "resolved"
    NOT_RESOLVED = "not resolved"
    SAME = "same"
    NOT_REPRODUCIBLE = "not reproducible"
    NOT_COMPUTED = "answered from a cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One metric of one load. Ratios are exponentials of mean logs; `pairs` are the ratios of single pairs."""

    metric: Metric
    load: str
    on: float  # median of the trials
    off: float
    pairs: tuple[float, ...]
    effect: Interval  # of log ratios
    identical: Interval  # the same between off and off again

    @property
    def state(self) -> State:
        """Resolved only beyond its own interval and beyond the A/A interval's reach; same where nothing ever varied."""
        if set(self.pairs) == {1.0} and self.identical == Interval(0.0, 0.0, 0.0):
            return State.SAME
        beyond = self.effect.excludes_zero and abs(self.effect.mean) > self.identical.reach
        return State.RESOLVED if beyond else State.NOT_RESOLVED

    @property
    def ratio(self) -> float:
        """Above 1 where on costs more."""
        return math.exp(self.effect.mean)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmFacts:
    """One arm's answers: equality with its reference per load, and where they came from."""

    equality: Equality
    by_load: tuple[tuple[str, Equality], ...]
    cache: CacheAudit


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a session came to. `unmeasured` names metrics without a ratio, with the reason."""

    state: State
    sentence: str
    primary: Estimate
    rest: tuple[Estimate, ...]
    unmeasured: tuple[tuple[str, str], ...]
    facts: dict[str, ArmFacts]  # by the arm's own name


class _Row(NamedTuple):
    metric: Metric
    load: str
    on: list[float]
    off: list[float]
    effects: list[float]
    identical: list[float]


def compare(session: Session) -> Comparison:
    """Judges a session."""
    facts = {arm.name: _facts(session, arm.name) for arm in session.arms.kinds()}
    rows, unmeasured = _rows(session)
    effects = simultaneous([row.effects for row in rows])
    identical = simultaneous([row.identical for row in rows])
    rest = tuple(_estimate(row, *found) for row, *found in zip(rows, effects, identical, strict=True))
    first = _primary(session)
    primary = _estimate(first, interval(first.effects), interval(first.identical))
    state, sentence = _conclude(primary, facts[ON])
    return Comparison(state=state, sentence=sentence, primary=primary, rest=rest, unmeasured=unmeasured, facts=facts)


def _conclude(primary: Estimate, on: ArmFacts) -> tuple[State, str]:
    equality = on.equality
    if not equality.whole:
        lost = equality.answers - equality.same_bits
        return State.NOT_REPRODUCIBLE, (
            f"{lost} of {equality.answers} timed answers of the on arm are not those of its untimed reference "
            f"({', '.join(equality.first_different)}): there is no cost of determinism where there is none"
        )
    if on.cache.faults:
        return State.NOT_COMPUTED, f"the on arm's answers were not all computed: {on.cache.faults[0]}"
    shown = (
        f"on takes {math.exp(primary.effect.mean):.3f} times as long as off ({_percent(primary.effect)}; "
        f"identical arms: {_percent(primary.identical)})"
    )
    if primary.state is State.RESOLVED:
        return State.RESOLVED, shown
    return State.NOT_RESOLVED, f"{shown}, which noise or identical arms may show as well"


def _percent(found: Interval) -> str:
    low, high = (as_ratio(end) for end in (found.low, found.high))
    return f"95 % {0 if low is None else low:.3f} to {'any' if high is None else f'{high:.3f}'}"


def _facts(session: Session, arm: str) -> ArmFacts:
    reference = session.references[arm]
    trials = [trial for trial in session.trials if trial.turn.arm in ((arm, OFF_AGAIN) if arm == OFF else (arm,))]
    by_load = [
        (load.name, [one for trial in trials for one in trial.serving(load.name).timings])
        for load in session.design.loads
    ]
    everything = [one for _, timings in by_load for one in timings] + [one for trial in trials for one in trial.extra]
    cache_is_off = session.started[arm].resolved.get("prefix_cache") is not True
    return ArmFacts(
        equality=check_equality(everything, reference),
        by_load=tuple((name, check_equality(timings, reference)) for name, timings in by_load),
        cache=audit_cache(everything, cache_is_off=cache_is_off),
    )


def _rows(session: Session) -> tuple[list[_Row], tuple[tuple[str, str], ...]]:
    """Every metric that has a ratio in every pair, and those that have none."""
    rows: list[_Row] = []
    unmeasured: list[tuple[str, str]] = []
    for load in session.design.loads:
        for metric in SERVING:
            values = [
                [trial.serving(load.name).metrics.get(metric.name) for trial in session.of(arm)]
                for arm in (ON, OFF, OFF_AGAIN)
            ]
            _add(rows, unmeasured, metric, load.name, values)
    for metric in PROCESS:
        values = [[process_value(trial, metric.name) for trial in session.of(arm)] for arm in (ON, OFF, OFF_AGAIN)]
        _add(rows, unmeasured, metric, WHOLE, values)
    return rows, tuple(unmeasured)


def process_value(trial: Trial, name: str) -> float | None:
    """A metric of a whole process."""
    if name == "startup_s":
        return trial.startup_s
    if name == "capacity_per_s":
        return trial.capacity.rate if trial.capacity is not None else None
    value = getattr(trial.footprint, name)
    return None if value is None else float(value)


def _add(
    rows: list[_Row], unmeasured: list[tuple[str, str]], metric: Metric, load: str, values: list[list[float | None]]
) -> None:
    on, off, again = ([value for value in side if value is not None] for side in values)
    if metric.sense == "share":
        return
    where = f"{metric.name}, {load}" if load else metric.name
    if not len(on) == len(off) == len(again) == len(values[0]):
        unmeasured.append((where, "no value in at least one process"))
        return
    row = _row(metric, load, on, off, again)
    if row is None:
        unmeasured.append((where, "zero in at least one process, so there is no ratio"))
    else:
        rows.append(row)


def _row(metric: Metric, load: str, on: list[float], off: list[float], again: list[float]) -> _Row | None:
    effects = [log_cost(metric, a, b) for a, b in zip(on, off, strict=True)]
    identical = [log_cost(metric, a, b) for a, b in zip(again, off, strict=True)]
    known, floor = [v for v in effects if v is not None], [v for v in identical if v is not None]
    if len(known) != len(effects) or len(floor) != len(identical):
        return None
    return _Row(metric, load, on, off, known, floor)


def _primary(session: Session) -> _Row:
    on, off, again = ([served_time(session, trial) for trial in session.of(arm)] for arm in (ON, OFF, OFF_AGAIN))
    row = _row(PRIMARY, WHOLE, on, off, again)
    if row is None:
        raise ArithmeticError("a load took no time at all; there is nothing to compare")
    return row


def served_time(session: Session, trial: Trial) -> float:
    """The primary metric of one process: seconds, geometric mean over loads."""
    logs = [
        math.log(trial.serving(load.name).metrics["seconds" if load.kind == "closed" else "e2e_mean"])
        for load in session.design.loads
    ]
    return math.exp(sum(logs) / len(logs))


def _estimate(row: _Row, effect: Interval, identical: Interval) -> Estimate:
    return Estimate(
        metric=row.metric, load=row.load, on=_median(row.on), off=_median(row.off),
        pairs=tuple(math.exp(value) for value in row.effects), effect=effect, identical=identical,
    )  # fmt: skip


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


__all__ = ["BY_NAME", "PRIMARY", "Comparison", "Estimate", "State", "compare", "process_value", "served_time"]
