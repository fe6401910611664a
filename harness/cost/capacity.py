"""Capacity at a latency target: the largest request rate at which p99 TTFT and p99 ITL stay within limits.

It does not know engines. Rules: arrivals are open-loop and Poisson, the same draws at every rate; a rate is within the
limits only by all of them; the search halves the gap between a rate that is and one that is not, a fixed number of
times, and says when no probed rate was within or all were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.cost.metric import QUANTILES, latencies, quantile
from harness.cost.timing import Timing

LOWEST = 1 / 32  # of the rate that closed loops reached
HIGHEST = 2.0
PROBES = 7

Probe = Callable[[float], Sequence[Timing]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Latency limits in seconds; None: no limit. `requests` arrive in each probe."""

    ttft_s: float | None
    itl_s: float | None
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What the search found. `rate` 0: none of the probed rates was within; `bounded` False: all of them were."""

    rate: float
    bounded: bool
    probes: tuple[tuple[float, bool], ...]


def find_capacity(probe: Probe, limits: Limits, reached: float) -> Capacity:
    """Searches between a thirty-second of and twice the rate that was `reached`, on a scale of ratios."""
    low, high = math.log(reached * LOWEST), math.log(reached * HIGHEST)
    probes: list[tuple[float, bool]] = []
    best = 0.0
    for _ in range(PROBES):
        rate = math.exp((low + high) / 2)
        within = is_within(probe(rate), limits)
        probes.append((rate, within))
        if within:
            best, low = rate, math.log(rate)
        else:
            high = math.log(rate)
    bounded = any(not within for _, within in probes)
    return Capacity(rate=best, bounded=bounded, probes=tuple(probes))


def is_within(timings: Sequence[Timing], limits: Limits) -> bool:
    """Whether a serving's p99 latencies keep every limit."""
    found = latencies(timings)
    for name, limit in (("ttft", limits.ttft_s), ("itl", limits.itl_s)):
        if limit is not None and len(found[name]) and quantile(found[name], QUANTILES["p99"]) > limit:
            return False
    return True
