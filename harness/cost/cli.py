"""The command `samebits cost`. It holds no logic of its own.

Rules: heavy packages are imported inside the command; what it prints is what cost.json holds.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from harness import registry
from harness.lifetime import DEADLINE_S
from harness.options import subject_options


@click.command("cost")
@subject_options
@click.option("--on", "on", multiple=True, metavar="MODE|KEY=VALUE", help="The arm that costs. [deterministic]")
@click.option("--off", "off", multiple=True, metavar="MODE|KEY=VALUE", help="What it is held against. [ordinary]")
@click.option("--show", "shown", multiple=True, metavar="MODE|none",
              help="A mode shown beside, no part of the cost. [native, with the default arms]")  # fmt: skip
@click.option("--corpus", default="quick", show_default=True, help="The requests that are served.")
@click.option("--concurrency", default=None, metavar="N,…", help="Closed loops. [1,4,16 without --rate and --trace]")
@click.option("--rate", "rates", default=None, metavar="R,…", help="Poisson arrivals, requests per second.")
@click.option("--trace", type=click.Path(path_type=Path), default=None, help="Recorded arrivals (JSON Lines, at_s).")
@click.option("--requests", "count", type=click.IntRange(min=1), default=None,
              help="Requests per load. [twice the concurrency, at least 8; 32 for rates]")  # fmt: skip
@click.option("--pairs", default=6, show_default=True, help="Rounds; each gives one ratio. At least 5.")
@click.option("--ttft-limit", type=click.FloatRange(min=0, min_open=True), default=None, metavar="SECONDS",
              help="Find the largest rate whose p99 TTFT stays within.")  # fmt: skip
@click.option("--itl-limit", type=click.FloatRange(min=0, min_open=True), default=None, metavar="SECONDS",
              help="The same for p99 ITL.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Of drawn arrivals.")
@click.option("--plant-slowdown", "slowed", type=float, default=1.0, metavar="FACTOR",
              help="Slow the on arm down on purpose: it must be found.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Folder. [.samebits/cost/...]")
@click.option("--overwrite", is_flag=True, help="Replace an earlier measurement in --out.")
@click.option("--deadline", type=float, default=DEADLINE_S, show_default=True, help="Seconds one load may take.")
@click.option("--quiet", is_flag=True, help="No progress; the table is still printed.")
def cost_command(
    engine: str, model: str | None, mode: str | None, assignments: tuple[str, ...], on: tuple[str, ...],
    off: tuple[str, ...], shown: tuple[str, ...], corpus: str, concurrency: str | None, rates: str | None,
    trace: Path | None, count: int | None, pairs: int, ttft_limit: float | None, itl_limit: float | None, seed: int,
    slowed: float, out: Path | None, overwrite: bool, deadline: float, quiet: bool,
) -> int:  # fmt: skip
    """Measure what the on arm costs against the off arm: paired, interleaved, equality checked while timed."""
    from harness.cost.measure import CostRequest, measure

    request = CostRequest(
        engine=engine, model=model, mode=mode, assignments=assignments, on=on, off=off, shown=shown or None,
        corpus=corpus, concurrency=concurrency, rates=rates, trace=trace, count=count, pairs=pairs,
        ttft_limit=ttft_limit, itl_limit=itl_limit, seed=seed, slowed=slowed, out=out, overwrite=overwrite,
        deadline_s=deadline,
    )  # fmt: skip
    record, folder = measure(request, lambda text: None if quiet else click.echo(text, err=True))
    registry.load(registry.COST_REPORT)(record, folder)
    click.echo(registry.load(registry.COST_TABLE)(record, width=_width()))
    click.echo(f"report: {folder / 'cost.html'}")
    return int(str(record["exit_code"]))


def _width() -> int | None:
    """Columns of the terminal; None where the output is no terminal."""
    import shutil

    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
