"""The command group `baseline`: accept captures of a run, show what is in force. They hold no logic of their own."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.errors import UsageError

if TYPE_CHECKING:
    from harness.baseline.entry import Baseline

BASELINES = "baselines"


@click.group("baseline")
def baseline_commands() -> None:
    """Accept captures as baselines, and show them."""


@baseline_commands.command("accept")
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.option("--cell", "cells", multiple=True, metavar="NAME", help="Only this cell or cell[variant]; repeatable.")
@click.option("--reason", required=True, help="Why these captures are accepted.")
@click.option("--author", default=None, help="Who accepts them. [git user.email]")
@click.option("--baselines", default=BASELINES, show_default=True, metavar="URL", help="A folder, or any fsspec URL.")
@click.option("--keep", type=click.Choice(["nothing", "logprobs", "topk"]), default="logprobs", show_default=True,
              help="What is kept beside ids and digests: it sizes a drift; digests find it either way.")  # fmt: skip
def accept_command(
    run: Path, cells: tuple[str, ...], reason: str, author: str | None, baselines: str, keep: str
) -> int:
    """Accept RUN's captures: from now on, runs are held against them."""
    from harness.approval.author import author_of
    from harness.baseline.accept import Acceptance, accept, refusal
    from harness.baseline.shelf import Shelf
    from harness.baseline.table import KEPT
    from harness.finished import read_finished

    finished = read_finished(run)
    kept = KEPT[: 0 if keep == "nothing" else KEPT.index(keep) + 1]
    terms = Acceptance(author=author_of(author), reason=reason, moment=datetime.now(UTC), keep=kept)
    for baseline in accept(finished, Shelf(baselines), cells, terms):
        click.echo(
            f"accepted {baseline.key}: {baseline.positions} positions, judged digest {baseline.judged_digest[:12]}"
        )
    if not cells:
        for pair in finished.pairs:
            if why := refusal(pair):
                click.echo(f"left out {pair.label}: {why}")
    return 0


@baseline_commands.command("show")
@click.argument("name", required=False, metavar="[CELL]")
@click.option("--baselines", default=BASELINES, show_default=True, metavar="URL", help="A folder, or any fsspec URL.")
def show_command(name: str | None, baselines: str) -> int:
    """Show the baselines in force; with CELL, all that it ever had, newest first."""
    from harness.baseline.shelf import Shelf
    from harness.suggest import did_you_mean

    shelf = Shelf(baselines)
    keys = shelf.keys()
    chosen = [key for key in keys if name is None or name in (key.cell, key.label)]
    if not chosen:
        if name is None:
            click.echo(f"no baseline yet in {baselines}; `samebits baseline accept RUN --reason …` puts one in force")
            return 0
        hint = did_you_mean(name, sorted({key.cell for key in keys} | {key.label for key in keys}))
        raise UsageError(f"{name!r}: no baseline of such a cell in {baselines}; {hint}")
    for key in chosen:
        for baseline in shelf.past(key)[: None if name else 1]:
            click.echo(describe(baseline))
    return 0


def describe(baseline: Baseline) -> str:
    """A baseline in a few lines."""
    kept = f", kept: {', '.join(baseline.kept)}" if baseline.kept else ""
    return "\n".join([
        f"{baseline.key}",
        f"  judged digest {baseline.judged_digest}",
        f"  {baseline.requests} requests, {baseline.positions} positions, rule {baseline.rule}{kept}",
        f"  verdict {baseline.verdict}; floor: {baseline.floor}; control: {baseline.control}",
        f"  accepted {baseline.accepted} by {baseline.author}: {baseline.reason}",
    ])  # fmt: skip
