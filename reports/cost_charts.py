"""The geometry of the cost charts: throughput against latency, ratio by load, latency distributions.

It does not know SVG or colours. Rules: scales say which they are and start where they say; an interval without an end
runs to the edge; what was not measured is left out, never drawn at 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from reports import cost_words as words
from reports.cost_record import Cost, Estimate, Measured

WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 14, 44
LATENCIES = (("ttft", "time to first token"), ("itl", "inter-token latency"), ("e2e", "end-to-end latency"))
ROW = 30  # pixels of one line of the ratio chart
LABELS = 150
RATIOS = (
    0.125, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 1.01, 1.02, 1.05, 1.1, 1.2, 1.4, 2.0, 4.0, 8.0,
)  # fmt: skip
FEW_TICKS = 3  # of a logarithmic scale
CLOSED = "c"  # marks points of closed loops, which a line joins


class Tick(NamedTuple):
    """A mark on an axis."""

    at: float
    text: str


class Point(NamedTuple):
    """A marked value."""

    x: float
    y: float
    text: str


class Line(NamedTuple):
    """One arm's line; `kind` is on, off or shown."""

    kind: str
    name: str
    path: str
    points: tuple[Point, ...]


class Plot(NamedTuple):
    """One chart."""

    title: str
    x_title: str
    y_title: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    lines: tuple[Line, ...]
    width: int = WIDTH
    height: int = HEIGHT


class RatioRow(NamedTuple):
    """One ratio with its interval and that of identical arms; positions in pixels."""

    y: float
    name: str
    at: float
    low: float
    high: float
    open_low: bool
    open_high: bool
    band_low: float
    band_high: float
    state: str
    words: str


class RatioChart(NamedTuple):
    """Ratios on a logarithmic scale."""

    rows: tuple[RatioRow, ...]
    ticks: tuple[Tick, ...]
    one: float  # where the ratio 1 lies
    width: int
    height: int


class Scale(NamedTuple):
    """Values to pixels."""

    place: Callable[[float], float]
    ticks: tuple[Tick, ...]


def throughput_plots(cost: Cost) -> tuple[Plot, ...]:
    """p50 ITL and p50 TTFT by output throughput, one line per arm through its closed loops."""
    loads = [load.name for load in cost.design.loads]
    charts = []
    for metric, title in (("itl_p50", "inter-token latency, p50"), ("ttft_p50", "time to first token, p50")):
        curves = [(measured, _points(measured, loads, metric)) for measured in cost.measured]
        charts.append(_throughput(title, [(measured, points) for measured, points in curves if points]))
    return tuple(chart for chart in charts if chart.lines)


def _points(measured: Measured, loads: Sequence[str], metric: str) -> list[tuple[float, float, str]]:
    found = []
    for name in loads:
        served = measured.served(name)
        if served is None:
            continue
        x, y = served.value("output_tokens_per_s"), served.value(metric)
        if x is not None and y:
            found.append((x, y, _short(name)))
    return found


def _throughput(title: str, curves: Sequence[tuple[Measured, list[tuple[float, float, str]]]]) -> Plot:
    x = _linear([point[0] for _, points in curves for point in points], LEFT, WIDTH - RIGHT, str_of=lambda v: f"{v:g}")
    y = _logarithmic([point[1] for _, points in curves for point in points] or [1.0], HEIGHT - BOTTOM, TOP)
    lines = []
    for measured, points in curves:
        placed = tuple(Point(x.place(a), y.place(b), text) for a, b, text in points)
        joined = [point for point in placed if point.text.startswith(CLOSED)]
        lines.append(Line(kind_of(measured.arm), measured.arm, _path(joined), placed))
    return Plot(f"{title[:1].upper()}{title[1:]}, by output throughput", "output tokens/s; time is logarithmic", title,
                x.ticks, y.ticks, tuple(lines))  # fmt: skip


def latency_plots(cost: Cost, load: str) -> tuple[Plot, ...]:
    """The share of latencies at or below each time, one chart per latency; a logarithmic time scale."""
    return tuple(plot for latency, title in LATENCIES if (plot := _distribution(cost, load, latency, title)).lines)


def _distribution(cost: Cost, load: str, latency: str, title: str) -> Plot:
    curves = [(m, served.curve(latency)) for m in cost.measured if (served := m.served(load)) is not None]
    positive = [value for _, values in curves for value in values if value > 0]
    if not positive:
        return Plot(title, "", "", (), (), ())
    width, height = 360, 230
    floor = min(positive)
    x = _logarithmic(positive, LEFT, width - RIGHT)
    lines = []
    for measured, values in curves:
        steps = [(x.place(max(value, floor)), _share(i, len(values), height)) for i, value in enumerate(values)]
        path = _path([Point(a, b, "") for a, b in steps])
        lines.append(Line(kind_of(measured.arm), measured.arm, path, ()))
    ticks = tuple(Tick(_share(i, 5, height), f"{25 * i} %") for i in range(5))
    return Plot(title, "time (logarithmic)", "share at or below", x.ticks, ticks, tuple(lines), width, height)


def _share(index: int, count: int, height: int) -> float:
    return height - BOTTOM - (height - BOTTOM - TOP) * index / max(1, count - 1)


def ratio_chart(cost: Cost) -> RatioChart:
    """The primary ratio, then the time to serve of every load."""
    estimates = [("all loads (primary)", cost.primary)]
    for load in cost.design.loads:
        estimate = cost.estimate("seconds" if load.kind == "closed" else "e2e_mean", load.name)
        if estimate is not None:
            estimates.append((load.name, estimate))
    ends = [
        end for _, one in estimates for end in (one.low, one.high, one.ratio, one.identical.low, one.identical.high)
    ]
    reach = min(max([abs(math.log(end)) for end in ends if end] + [math.log(1.05)]) * 1.05, math.log(16))
    width, right = 760, 40

    def place(ratio: float | None, otherwise: float) -> float:
        log = math.log(ratio) if ratio else otherwise
        middle = (LABELS + width - right) / 2
        return middle + max(-reach, min(reach, log)) / reach * (width - right - LABELS) / 2

    rows = tuple(_ratio_row(index, name, one, place, reach) for index, (name, one) in enumerate(estimates))
    ticks = tuple(Tick(place(value, 0), f"{value:g}") for value in _ratio_ticks(reach))
    return RatioChart(rows, ticks, place(1.0, 0), width, TOP + ROW * len(rows) + 34)


def _ratio_row(
    index: int, name: str, one: Estimate, place: Callable[[float | None, float], float], reach: float
) -> RatioRow:
    beyond = math.exp(reach)
    return RatioRow(
        y=TOP + ROW * index + ROW / 2, name=name, at=place(one.ratio, 0), low=place(one.low, -reach),
        high=place(one.high, reach), open_low=one.low is None or one.low < 1 / beyond,
        open_high=one.high is None or one.high > beyond, band_low=place(one.identical.low, -reach),
        band_high=place(one.identical.high, reach), state=one.state,
        words=f"{name}: {words.ratio(one)}, {words.interval(one.low, one.high)}, {one.state}",
    )  # fmt: skip


def _ratio_ticks(reach: float) -> list[float]:
    """Round ratios within reach, the outermost first, no two closer than a tenth of the reach."""
    chosen = [1.0]
    for ratio in sorted(RATIOS, key=lambda ratio: -abs(math.log(ratio))):
        log = math.log(ratio)
        if abs(log) <= reach and all(abs(log - math.log(other)) >= reach / 10 for other in chosen):
            chosen.append(ratio)
    return sorted(chosen)


def kind_of(arm: str) -> str:
    """The class of an arm's line."""
    return arm if arm in ("on", "off") else "shown"


def _short(load: str) -> str:
    return load.replace("concurrency ", CLOSED)


def _path(points: Sequence[Point]) -> str:
    return "M" + " L".join(f"{point.x:.1f} {point.y:.1f}" for point in points) if points else ""


def _linear(values: Sequence[float], begin: float, end: float, *, str_of: Callable[[float], str]) -> Scale:
    """From 0 to a round number above the largest value."""
    most = max(values, default=1.0) or 1.0
    step = _round_step(most / 4)
    count = math.ceil(most * 1.02 / step)
    top = step * count

    def place(value: float) -> float:
        return begin + (end - begin) * value / top

    return Scale(place, tuple(Tick(place(step * i), str_of(step * i) if i else "0") for i in range(count + 1)))


def _logarithmic(values: Sequence[float], begin: float, end: float) -> Scale:
    low, high = math.log10(min(values)), math.log10(max(values))
    low, high = (low - 0.05, high + 0.05) if high - low > 0.1 else (low - 0.2, high + 0.2)

    def place(value: float) -> float:
        return begin + (end - begin) * (math.log10(value) - low) / (high - low)

    inside: list[float] = []
    for wanted in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9)):
        marks = [m * 10.0**e for e in range(math.floor(low), math.ceil(high) + 1) for m in wanted]
        inside = [mark for mark in marks if low <= math.log10(mark) <= high]
        if len(inside) >= FEW_TICKS:
            break
    return Scale(place, tuple(Tick(place(mark), _tick_text(mark)) for mark in inside))


def _tick_text(mark: float) -> str:
    """A round time without the zeros of a measured one."""
    number, _, unit = words.seconds(mark).partition(" ")
    return f"{float(number.replace(',', '')):g} {unit}"


def _round_step(rough: float) -> float:
    size = 10.0 ** math.floor(math.log10(rough))
    return next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= rough * 0.999)
