"""`samebits census`: how many different completions the same prompts get. It holds no logic of its own."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

import click

from harness.lifetime import DEADLINE_S
from harness.options import subject_options


@click.command("census")
@click.argument("corpus", default="census")
@subject_options
@click.option(
    "--n", "n", type=click.IntRange(min=2), default=1000, show_default=True, help="Times each prompt is sent."
)
@click.option("--seeds", type=click.IntRange(min=0), default=0, show_default=True, help="Seeds drawn with, twice each.")
@click.option("--prompts", type=click.IntRange(min=1), default=None, help="Only the first so many of CORPUS. [all]")
@click.option("--max-tokens", type=click.IntRange(min=1), default=None, help="Tokens of each answer. [each prompt's]")
@click.option("--companions", default="smoke:8", show_default=True, metavar="CORPUS:COUNT|none",
              help="Who may run beside the copies; each round draws some.")  # fmt: skip
@click.option("--per-round", type=click.IntRange(min=1), default=16, show_default=True,
              help="Copies that run in one round, at most; the number is drawn.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Of everything drawn here.")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Folder. [.samebits/census/...]")
@click.option("--deadline", type=float, default=DEADLINE_S, show_default=True, help="Seconds one round may take.")
@click.option("--quiet", is_flag=True, help="No progress; the table is still printed.")
def census_command(
    corpus: str, engine: str, model: str | None, mode: str | None, assignments: tuple[str, ...], n: int, seeds: int,
    prompts: int | None, max_tokens: int | None, companions: str, per_round: int, seed: int, out: Path | None,
    deadline: float, quiet: bool,
) -> int:  # fmt: skip
    """Send the prompts of CORPUS many times among changing companions, and count distinct completions.

    Exit code 1 with more than one completion of a prompt at temperature 0, or a seed that gave two; 3 when nothing was
    seen to run beside anything else.
    """
    from harness import registry
    from harness.census.rounds import Design
    from harness.census.run import CensusRequest, run_census
    from harness.choose import default_model
    from harness.errors import UsageError
    from harness.progress import open_progress
    from harness.record import write_json
    from harness.schedules import companion_source
    from harness.settings import mode_settings, parse_assignments

    adapter = registry.adapter(engine)
    overrides = dict(mode_settings(adapter, mode, "--mode")) if mode is not None else {}
    overrides.update(parse_assignments(adapter, assignments))
    beside = companion_source(companions) if companions != "none" else (corpus, 0)
    if beside is None:
        raise UsageError(f"--companions {companions!r}: expected none or CORPUS:COUNT such as 'smoke:8'")
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{Path(corpus).name}-{engine}"
    folder = out or Path(".samebits") / "census" / name
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"--out {folder}: expected a new or empty folder, found files; choose another")
    design = Design(n=n, seeds=seeds, per_round=per_round, seed=seed, max_tokens=max_tokens)
    request = CensusRequest(
        adapter=adapter, model=model or default_model(engine), overrides=overrides, corpus=corpus, prompts=prompts,
        companions=beside, design=design, folder=folder, deadline_s=deadline,
    )  # fmt: skip
    record = run_census(request, open_progress(sys.stderr, quiet=quiet))
    write_json(folder / "census.json", record)
    registry.load(registry.CENSUS_REPORT)(record, folder)
    click.echo(registry.load(registry.CENSUS_TABLE)(record))
    click.echo(f"report: {folder / 'census.html'}")
    return int(str(record["exit_code"]))
