"""The cost report as one self-contained HTML page. It reads the record (`cost.json`) and nothing else.

Rules: those of the run's report: escaping by the template engine, no script, nothing loaded, states told by words and
never by colour alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_cost_report(record: Mapping[str, object], folder: Path) -> None:
    """Writes cost.html, whole or not at all. Raises StoreError for another schema, OutputError."""
    from reports.writing import write_whole

    write_whole(folder / "cost.html", render_cost(record))


def render_cost(record: Mapping[str, object]) -> str:
    """The page as text. Raises StoreError for another schema."""
    from reports import cost_charts, cost_words
    from reports.cost_record import read_cost
    from reports.html import template

    cost = read_cost(record)
    return template("cost.html.j2").render(
        cost=cost,
        words=cost_words,
        status=cost_words.status(cost),
        title=cost_words.title(cost),
        throughput=cost_charts.throughput_plots(cost),
        ratios=cost_charts.ratio_chart(cost),
        distributions=[(load, cost_charts.latency_plots(cost, load.name)) for load in cost.design.loads],
        kind_of=cost_charts.kind_of,
    )
