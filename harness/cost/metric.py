"""The metrics of a serving, from its timings alone, so that they mean the same for every engine.

It does not know arms or intervals. Definitions (due: when the request was due; first: its first token's time):

    seconds                 last token of the load - first due time
    output_tokens_per_s     generated tokens / seconds
    prefill_tokens_per_s    prompt tokens not served from a cache / time in which somebody waited for a first token
    decode_tokens_per_s     tokens after the first / time in which somebody was past the first token and not done
    ttft_*, e2e_*           first - due, finish - due; one sample per answer
    itl_*                   time between tokens of one answer; tokens that came together are 0 apart

Rules: a quantile is a value that was measured (the smallest with at least that share at or below it), never one
interpolated below it; p99.9 exists from 10,000 values on; a quantile that fewer than ten values lie beyond says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np

from harness.cost.timing import Timing
from harness.traces import Float64

Sense = Literal["time", "rate", "size", "share"]  # a cost is on/off for times and sizes, off/on for rates
QUANTILES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
TAIL: Final = ("p999", 0.999)
LEAST_TAIL: Final = 10_000
FEW_BEYOND: Final = 10
CURVE_POINTS: Final = 41


class Metric(NamedTuple):
    """One measured quantity."""

    name: str
    unit: str
    sense: Sense
    title: str


_LATENCIES = (("ttft", "time to first token"), ("itl", "inter-token latency"), ("e2e", "end-to-end latency"))
SERVING: Final = (
    Metric("seconds", "s", "time", "time to serve the load"),
    Metric("output_tokens_per_s", "tokens/s", "rate", "output throughput"),
    Metric("prefill_tokens_per_s", "tokens/s", "rate", "prefill throughput"),
    Metric("decode_tokens_per_s", "tokens/s", "rate", "decode throughput"),
    *(
        Metric(f"{kind}_{name}", "s", "time", f"{title}, {name}")
        for kind, title in _LATENCIES
        for name in ("mean", *QUANTILES, TAIL[0])
    ),
    Metric("cache_hit_rate", "share", "share", "prompt tokens served from a cache"),
)
PROCESS: Final = (
    Metric("startup_s", "s", "time", "start-up time"),
    Metric("peak_memory_bytes", "bytes", "size", "peak memory"),
    Metric("peak_device_bytes", "bytes", "size", "peak device memory"),
    Metric("kv_capacity_tokens", "tokens", "rate", "KV-cache capacity"),
    Metric("capacity_per_s", "requests/s", "rate", "requests per second within the latency limits"),
)
BY_NAME: Final[Mapping[str, Metric]] = {metric.name: metric for metric in (*SERVING, *PROCESS)}


def serving_metrics(timings: Sequence[Timing]) -> dict[str, float]:
    """Every metric of one serving that it has values for."""
    seconds = max(one.finish_s for one in timings) - min(one.due_s for one in timings)
    tokens = sum(len(one.token_s) for one in timings)
    waiting = _covered([(one.due_s, one.token_s[0]) for one in timings])
    decoding = _covered([(one.token_s[0], one.finish_s) for one in timings])
    prompts = {(one.request, one.copy): one.prompt_tokens for one in timings}
    cached = {(one.request, one.copy): one.cached_tokens for one in timings}
    fresh = sum(prompts.values()) - sum(cached.values())
    found = {
        "seconds": seconds,
        "output_tokens_per_s": _rate(tokens, seconds),
        "prefill_tokens_per_s": _rate(fresh, waiting),
        "decode_tokens_per_s": _rate(tokens - len(timings), decoding),
        "cache_hit_rate": sum(cached.values()) / sum(prompts.values()),
    }
    for kind, values in latencies(timings).items():
        found |= {f"{kind}_{name}": value for name, value in summary(values).items()}
    return {name: value for name, value in found.items() if value is not None}


def latencies(timings: Sequence[Timing]) -> dict[str, Float64]:
    """TTFT, ITL and end-to-end latencies in seconds."""
    return {
        "ttft": np.array([one.token_s[0] - one.due_s for one in timings]),
        "itl": np.concatenate([np.diff(np.array(one.token_s)) for one in timings]),
        "e2e": np.array([one.finish_s - one.due_s for one in timings]),
    }


def summary(values: Float64) -> dict[str, float]:
    """Mean and quantiles; empty for no values."""
    if not len(values):
        return {}
    named = {**QUANTILES, **({TAIL[0]: TAIL[1]} if len(values) >= LEAST_TAIL else {})}
    return {"mean": float(values.mean()), **{name: quantile(values, share) for name, share in named.items()}}


def quantile(values: Float64, share: float) -> float:
    """The smallest value with at least `share` of all at or below it."""
    return float(np.quantile(values, share, method="inverted_cdf"))


def is_thin(count: int, name: str) -> bool:
    """Whether fewer than ten of `count` values lie beyond the quantile of this name."""
    share = {**QUANTILES, TAIL[0]: TAIL[1]}.get(name)
    return share is not None and count * (1 - share) < FEW_BEYOND


def curve(values: Float64) -> list[float]:
    """The quantile function at equal steps from 0 to 1, for drawing."""
    return [quantile(values, step / (CURVE_POINTS - 1)) for step in range(CURVE_POINTS)] if len(values) else []


def log_cost(metric: Metric, on: float, off: float) -> float | None:
    """The log of the cost ratio, above 0 where on costs more; None where there is none."""
    if metric.sense == "share" or not (on > 0 and off > 0):
        return None
    ratio = math.log(on / off)
    return -ratio if metric.sense == "rate" else ratio


def _rate(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 and amount > 0 else None


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds covered by at least one span."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
