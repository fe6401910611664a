"""The cost table for terminals: one row per load, then what belongs to whole processes, then what explains it.

It does not know files. Rules: nothing is cut that a verdict rests on; the outcome comes last, where the eye is.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from reports import cost_words as words
from reports.cost_record import Cost, Estimate, read_cost
from reports.words import one_line

COLUMNS = ("load", "time on / off", "ratio", "95 %, together", "identical arms", "", "tokens/s on / off",
           "TTFT p50, p99", "ITL p50, p99", "same bits")  # fmt: skip
PROCESS = ("startup_s", "peak_memory_bytes", "peak_device_bytes", "kv_capacity_tokens", "capacity_per_s")
WIDEST = 160


def cost_table(record: Mapping[str, object], width: int | None = None) -> str:
    """The table as plain text; `width` wraps prose. Raises StoreError for another schema."""
    cost = read_cost(record)
    parts = [
        _grid([COLUMNS, *(_row(cost, load.name) for load in cost.design.loads)]),
        _grid([("of a process", "on", "off", "ratio", "95 %, together", "identical arms", ""), *_process_rows(cost)]),
        "\n".join(_prose(cost, width or WIDEST)),
    ]
    return "\n\n".join(part for part in parts if part)


def _row(cost: Cost, load: str) -> tuple[str, ...]:
    estimate, on, off = cost.estimate("seconds", load), cost.arm("on"), cost.arm("off")
    served, other = (arm.served(load) if arm else None for arm in (on, off))
    rate = [words.metric_pair(side, "output_tokens_per_s", "").strip() for side in (served, other)]
    return (
        load,
        _both(estimate),
        *_ratio(estimate),
        " / ".join(rate),
        *(
            ", ".join(words.metric_pair(served, f"{kind}_{name}", "s") for name in ("p50", "p99"))
            for kind in ("ttft", "itl")
        ),
        words.same(served.equality) if served else "none checked",
    )


def _process_rows(cost: Cost) -> list[tuple[str, ...]]:
    rows = []
    for name in PROCESS:
        estimate = cost.estimate(name, "")
        if estimate is not None:
            both = [words.value(side, estimate.unit) for side in (estimate.on, estimate.off)]
            rows.append((estimate.title, *both, *_ratio(estimate)))
    return rows


def _both(estimate: Estimate | None) -> str:
    if estimate is None:
        return "not measured"
    return f"{words.seconds(estimate.on)} / {words.seconds(estimate.off)}"


def _ratio(estimate: Estimate | None) -> tuple[str, ...]:
    if estimate is None:
        return ("not measured", "", "", "")
    return (
        words.ratio(estimate),
        words.interval(estimate.low, estimate.high),
        words.interval(estimate.identical.low, estimate.identical.high),
        estimate.state,
    )


def _prose(cost: Cost, width: int) -> list[str]:
    lines: list[str] = []
    for measured in cost.measured:
        lines.append(f"{measured.arm} ({measured.label})")
        lines.append(f"  performance: {words.performance(measured)}")
        lines.append(f"  reproducibility: {words.reproducibility(measured)}")
        lines.append(f"  cache audit: {measured.cache.sentence}")
    if cost.differences:
        lines.append("the arms differ beyond what was asked for:")
        lines += [f"  {words.difference(one)}" for one in cost.differences]
    else:
        lines.append("the arms differ in nothing but what was asked for")
    lines += [f"note: {note}" for note in cost.notes]
    lines.append(f"{cost.state}: {cost.outcome}")
    return [wrapped for line in lines for wrapped in _wrap(one_line_kept(line), width)]


def one_line_kept(line: str) -> str:
    """The line with its indent and nothing in it that ends a line."""
    indent = line[: len(line) - len(line.lstrip())]
    return indent + one_line(line, 2000)


def _wrap(line: str, width: int) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(line, max(width, 40), subsequent_indent=indent, drop_whitespace=True) or [line]


def _grid(rows: Sequence[Sequence[str]]) -> str:
    if len(rows) < 2:
        return ""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(f"{entry:<{width}}" for entry, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
