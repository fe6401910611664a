"""One measuring session: untimed references, then rounds of fresh engine processes in mirrored order.

It does not know processes, statistics or reports. Rules: every arm of a round gets the same loads in the same order
after the same warm-up; warm-up answers are checked like all others and their times are dropped; a session that cannot
be finished is an error, never a shorter session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.cost.arm import COMPARED, Arms
from harness.cost.audit import Reference
from harness.cost.bench import Bench, OpenBench, Started
from harness.cost.capacity import Capacity, Limits, find_capacity
from harness.cost.interval import LEAST_PAIRS
from harness.cost.load import Load, closed_loop, poisson
from harness.cost.metric import serving_metrics
from harness.cost.order import Turn, turns
from harness.cost.timing import Timing
from harness.engine import Footprint
from harness.errors import UsageError

SHOWN_ROUNDS = 2
WARM_UP_REQUESTS = 4
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """What a session does. `limits` None: capacity is not looked for."""

    loads: tuple[Load, ...]
    pairs: int
    limits: Limits | None
    seed: int
    ids: tuple[str, ...]  # the corpus's requests, in order


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """One load served in one process."""

    load: str
    timings: tuple[Timing, ...]
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One engine process of a round. `extra` are warm-up and capacity probes: checked, not timed."""

    turn: Turn
    startup_s: float
    footprint: Footprint
    servings: tuple[Serving, ...]
    extra: tuple[Timing, ...]
    capacity: Capacity | None

    def serving(self, load: str) -> Serving:
        """The serving of a load."""
        return next(serving for serving in self.servings if serving.load == load)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Everything that was measured. References and what engines said are by the arm's own name."""

    design: Design
    arms: Arms
    references: dict[str, Reference]
    started: dict[str, Started]
    trials: tuple[Trial, ...]
    drifted: tuple[str, ...] = ()  # identity fields in which an arm's processes were not all the same, in sentences

    def of(self, arm: str) -> tuple[Trial, ...]:
        """The trials of an arm, in the order of rounds."""
        return tuple(trial for trial in self.trials if trial.turn.arm == arm)


def run_session(design: Design, arms: Arms, open_bench: OpenBench, note: Note) -> Session:
    """Measures. Raises UsageError for too few pairs or loads; EngineError, Unsupported."""
    if design.pairs < LEAST_PAIRS:
        raise UsageError(f"--pairs {design.pairs}: expected at least {LEAST_PAIRS}; fewer give no interval")
    if not design.loads:
        raise UsageError("nothing to measure: give --concurrency, --rate or --trace")
    references: dict[str, Reference] = {}
    started: dict[str, Started] = {}
    for arm in arms.kinds():
        with open_bench(arm, f"reference-{arm.name}") as bench:
            started[arm.name] = bench.started
            references[arm.name] = bench.reference(served_ids(design))
        note(f"reference of {arm.name} ({arm.label}): {len(references[arm.name])} answers, each alone")
    compared, shown = arms.turns()
    order = turns(compared, design.pairs, shown, SHOWN_ROUNDS)
    trials: list[Trial] = []
    drifted: dict[str, None] = {}
    for number, turn in enumerate(order):
        arm = arms.of(turn.arm)
        with open_bench(arm, f"{number:03d}-{turn.arm.replace(' ', '-')}") as bench:
            trials.append(_trial(turn, bench, design))
            drifted |= dict.fromkeys(_drift(arm.name, started[arm.name], bench.started))
        note(f"process {number + 1}/{len(order)}, round {turn.round + 1}, {turn.arm}: {_told(trials[-1])}")
    return Session(design=design, arms=arms, references=references, started=started, trials=tuple(trials),
                   drifted=tuple(drifted))  # fmt: skip


def _drift(arm: str, first: Started, now: Started) -> list[str]:
    """Identity fields that changed since the arm's first process."""
    before = {field.name: field.value for field in first.fields if field.field_class == "identity"}
    after = {field.name: field.value for field in now.fields if field.field_class == "identity"}
    return [
        f"arm {arm}: {name} was not the same in all of its processes"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def served_ids(design: Design) -> tuple[str, ...]:
    """Every request that is served, in the corpus's order."""
    used = {name for load in design.loads for name in load.requests} | set(warm_up(design).requests)
    if design.limits is not None:
        used |= set(design.ids)
    return tuple(name for name in design.ids if name in used)


def warm_up(design: Design) -> Load:
    """A few requests together, before anything counts."""
    widest = max((load.concurrency or 1 for load in design.loads), default=1)
    return closed_loop(design.ids, min(widest, WARM_UP_REQUESTS), min(len(design.ids), WARM_UP_REQUESTS))


def _trial(turn: Turn, bench: Bench, design: Design) -> Trial:
    extra = list(bench.serve(warm_up(design)))
    servings = tuple(_serve(bench, load) for load in design.loads)
    capacity = None
    if design.limits is not None and turn.arm in COMPARED:
        capacity = _capacity(bench, design, design.limits, servings, extra)
    return Trial(
        turn=turn, startup_s=bench.started.startup_s, footprint=bench.footprint(), servings=servings,
        extra=tuple(extra), capacity=capacity,
    )  # fmt: skip


def _serve(bench: Bench, load: Load) -> Serving:
    timings = bench.serve(load)
    return Serving(load=load.name, timings=timings, metrics=serving_metrics(timings))


def _capacity(
    bench: Bench, design: Design, limits: Limits, servings: Sequence[Serving], extra: list[Timing]
) -> Capacity:
    """Probes rates around what the closed loops reached."""

    def probe(rate: float) -> tuple[Timing, ...]:
        timings = bench.serve(poisson(design.ids, rate, limits.requests, design.seed))
        extra.extend(timings)
        return timings

    reached = max(_answers_per_s(serving) for serving in servings)
    return find_capacity(probe, limits, reached)


def _answers_per_s(serving: Serving) -> float:
    answers = len({(one.request, one.copy) for one in serving.timings})
    return answers / serving.metrics["seconds"] if serving.metrics["seconds"] > 0 else 1.0


def _told(trial: Trial) -> str:
    parts = [f"started in {trial.startup_s:.1f} s"]
    parts += [f"{serving.load} {serving.metrics['seconds']:.2f} s" for serving in trial.servings]
    if trial.capacity is not None:
        parts.append(f"capacity {trial.capacity.rate:.2f}/s")
    return ", ".join(parts)


__all__ = ["Design", "Serving", "Session", "Trial", "run_session", "served_ids", "warm_up"]
