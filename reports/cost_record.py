"""The record of a measuring session as frozen values, field for field as `cost.json` has them.

It does not know files or how a report looks. Rules: a number that the record does not have is None, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.errors import StoreError
from reports.reader import read_as
from reports.record import Corpus, Fingerprint

SCHEMA = 1
Numbers = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One side: what was asked for."""

    name: str
    label: str
    slowed: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arms:
    """Both sides, and what is shown beside them."""

    on: Arm
    off: Arm
    shown: tuple[Arm, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What was served."""

    name: str
    kind: str
    concurrency: int | None
    rate: float | None
    requests: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One process."""

    round: int | None
    arm: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """How it was measured."""

    pairs: int | None
    processes: int | None
    order: tuple[Turn, ...]
    loads: tuple[Load, ...]
    seed: int | None
    limits: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A ratio of identical arms."""

    ratio: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A cost ratio; above 1, on costs more."""

    metric: str
    title: str
    unit: str
    load: str
    on: float | None
    off: float | None
    ratio: float | None
    low: float | None
    high: float | None
    identical: Ratio
    pairs: tuple[float, ...]
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmeasured:
    """A metric without a ratio."""

    metric: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A field in which the arms differ beyond what was asked for."""

    name: str
    on: str | None
    off: str | None
    owned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Equality:
    """Timed answers that are the untimed reference's."""

    answers: int | None
    same_tokens: int | None
    same_bits: int | None
    most_distinct: int | None
    first_different: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """Whether the answers were computed."""

    faults: tuple[str, ...]
    cached_tokens: int | None
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A latency's quantile function at equal steps from 0 to 1, in seconds."""

    latency: str
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One load in one arm: medians over processes."""

    load: str
    metrics: Numbers
    samples: Numbers
    curves: tuple[Curve, ...]
    latest_hand_over_s: float | None
    preemptions: int | None
    equality: Equality

    def value(self, metric: str) -> float | None:
        """A metric's median."""
        return dict(self.metrics).get(metric)

    def curve(self, latency: str) -> tuple[float, ...]:
        """A latency's quantile function."""
        return next((curve.values for curve in self.curves if curve.latency == latency), ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One arm's two envelopes."""

    arm: str
    label: str
    processes: int | None
    served_s: float | None
    process: Numbers
    loads: tuple[Served, ...]
    equality: Equality
    cache: Cache

    def served(self, load: str) -> Served | None:
        """One load."""
        return next((served for served in self.loads if served.load == load), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Everything reports show of one session."""

    samebits: str
    engine: str
    model: str
    corpus: Corpus
    started: str
    finished: str
    seconds: float | None
    exit_code: int | None
    state: str
    outcome: str
    identical_arms: bool
    arms: Arms
    design: Design
    primary: Estimate
    rest: tuple[Estimate, ...]
    unmeasured: tuple[Unmeasured, ...]
    differences: tuple[Difference, ...]
    measured: tuple[Measured, ...]
    gate: Numbers
    notes: tuple[str, ...]
    fingerprint: Fingerprint

    def estimate(self, metric: str, load: str) -> Estimate | None:
        """One metric of one load; the load of a whole process is empty."""
        return next((one for one in self.rest if one.metric == metric and one.load == load), None)

    def arm(self, name: str) -> Measured | None:
        """One arm's measurements."""
        return next((measured for measured in self.measured if measured.arm == name), None)


def read_cost(record: Mapping[str, object]) -> Cost:
    """The record as values. Raises StoreError for another schema."""
    if record.get("schema") != SCHEMA:
        raise StoreError(f"cost.json at $.schema: expected {SCHEMA}, found {record.get('schema')!r}; measure again")
    return read_as(Cost, record)
