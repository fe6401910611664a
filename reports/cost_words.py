"""A measuring session in words and figures: shared by the terminal table and the page.

Rules: a figure carries its unit; what was not measured is said to be so; a ratio never stands without its interval.
"""

from __future__ import annotations

from reports.cost_record import Cost, Difference, Equality, Estimate, Measured, Served

_PREFIXES = ((1.0, "s", 1), (1e-3, "ms", 1e3), (1e-6, "µs", 1e6))
_BYTES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
STATUS = {"resolved": "good", "not resolved": "open", "not reproducible": "bad", "answered from a cache": "bad"}


def status(cost: Cost) -> str:
    """The page's colour word for the outcome."""
    return STATUS.get(cost.state, "bad")


def title(cost: Cost) -> str:
    """The outcome in a few words."""
    if status(cost) == "bad":
        return f"Cost cell failed: {cost.state}"
    if cost.state == "not resolved":
        return "Cost not resolved"
    ratio = cost.primary.ratio or 1.0
    return f"On costs {abs(ratio - 1) * 100:.1f} % {'more' if ratio >= 1 else 'less'} time"


def value(amount: float | None, unit: str) -> str:
    """A measured value with its unit."""
    if amount is None:
        return "not measured"
    if unit == "s":
        return seconds(amount)
    if unit == "bytes":
        size, name = next(((size, name) for size, name in _BYTES if amount >= size), (1, "B"))
        return f"{amount / size:.1f} {name}"
    if unit == "share":
        return f"{amount * 100:.1f} %"
    if unit == "tokens":
        return f"{amount:,.0f} tokens"
    return f"{_three(amount)} {unit}"


def seconds(amount: float | None) -> str:
    """A time in the unit that reads best."""
    if amount is None:
        return "not measured"
    _, unit, factor = next((entry for entry in _PREFIXES if abs(amount) >= entry[0]), _PREFIXES[-1])
    return f"{_three(amount * factor)} {unit}"


def ratio(estimate: Estimate | None) -> str:
    """A ratio alone."""
    return "not measured" if estimate is None or estimate.ratio is None else f"{estimate.ratio:.3f}"


def interval(low: float | None, high: float | None) -> str:
    """The ends of an interval."""
    return f"{_end(low, 'none')} to {_end(high, 'unbounded')}"


def same(equality: Equality) -> str:
    """How many timed answers were the untimed reference's, to the bit."""
    if equality.same_bits is None or not equality.answers:
        return "none checked"
    return f"{equality.same_bits:,} of {equality.answers:,}"


def performance(measured: Measured) -> str:
    """The performance envelope in a line."""
    process = dict(measured.process)
    parts = [
        f"{_range(measured, 'output_tokens_per_s')} tokens/s out",
        f"TTFT p50 {_times(measured, 'ttft_p50')}, p99 {_times(measured, 'ttft_p99')}",
        f"ITL p50 {_times(measured, 'itl_p50')}, p99 {_times(measured, 'itl_p99')}",
        f"peak memory {value(process.get('peak_memory_bytes'), 'bytes')}",
        f"KV cache {value(process.get('kv_capacity_tokens'), 'tokens')}",
    ]
    return "; ".join(parts)


def reproducibility(measured: Measured) -> str:
    """The reproducibility envelope in a line."""
    found = measured.equality
    if not found.answers:
        return "no answer checked"
    distinct = "1 answer" if found.most_distinct == 1 else f"up to {found.most_distinct} different answers"
    return (
        f"{same(found)} timed answers equal the untimed reference to the bit "
        f"({found.same_tokens or 0:,} in their tokens); {distinct} per request"
    )


def difference(one: Difference) -> str:
    """A configuration difference in a line."""
    moved = " (moves with the mode)" if one.owned else ""
    return f"{one.name}: on {_field(one.on)}, off {_field(one.off)}{moved}"


def metric_pair(served: Served | None, name: str, unit: str) -> str:
    """A metric of one load, or that it was not measured."""
    return value(None if served is None else served.value(name), unit)


def _field(text: str | None) -> str:
    return "unknown" if text is None else text


def _end(end: float | None, otherwise: str) -> str:
    if end is None:
        return otherwise
    return f"{end:.3f}" if 0.01 < end < 100 else f"{end:.2g}"


def _three(number: float) -> str:
    digits = 0 if abs(number) >= 100 else 1 if abs(number) >= 10 else 2
    return f"{number:,.{digits}f}"


def _values(measured: Measured, name: str) -> list[float]:
    return [found for served in measured.loads if (found := served.value(name)) is not None]


def _range(measured: Measured, name: str) -> str:
    values = _values(measured, name)
    if not values:
        return "no"
    return _three(min(values)) if len(values) == 1 else f"{_three(min(values))} to {_three(max(values))}"


def _times(measured: Measured, name: str) -> str:
    values = _values(measured, name)
    if not values:
        return "not measured"
    return seconds(values[0]) if len(values) == 1 else f"{seconds(min(values))} to {seconds(max(values))}"
