"""The command group `perplexity`: measure, check against a baseline, accept one. They hold no logic of their own."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click

from harness.lifetime import DEADLINE_S
from harness.options import subject_options

BASELINE = Path("perplexity.json")


@click.group("perplexity")
def perplexity_commands() -> None:
    """The negative log-likelihood of a frozen text corpus, sample by sample, to the bit."""


@perplexity_commands.command("measure")
@click.argument("corpus")
@subject_options
@click.option("--part", default="1/1", show_default=True, metavar="N/M", help="Only every M-th sample, from the N-th.")
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="FILE", help="Where the numbers go.")
@click.option("--deadline", type=float, default=DEADLINE_S, show_default=True, help="Seconds it may take.")
def measure_command(
    corpus: str, engine: str, model: str | None, mode: str | None, assignments: tuple[str, ...], part: str, out: Path,
    deadline: float,
) -> int:  # fmt: skip
    """Force an engine along the texts of CORPUS and write what it gives for them."""
    from harness import registry
    from harness.baseline.measure import choose_subject, measure, parse_part
    from harness.baseline.perplexity import measurement_json
    from harness.record import write_json
    from harness.settings import mode_settings, parse_assignments

    adapter = registry.adapter(engine)
    overrides = dict(mode_settings(adapter, mode, "--mode")) if mode is not None else {}
    overrides.update(parse_assignments(adapter, assignments))
    found = measure(choose_subject(engine, model, overrides), corpus, parse_part(part), deadline)
    write_json(out, measurement_json(found))
    click.echo(f"{out}: {len(found.samples)} of {found.whole} samples, perplexity {found.perplexity:.6g}")
    return 0


@perplexity_commands.command("check")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option("--baseline", default=BASELINE, show_default=True, type=click.Path(path_type=Path), metavar="FILE")
def check_command(files: tuple[Path, ...], baseline: Path) -> int:
    """Compare a measurement with the baseline. Exit 1 if any sample differs, 3 if there is no baseline yet."""
    from harness.baseline.perplexity import (
        compare_perplexity,
        describe_changes,
        join,
        read_measurement,
        read_perplexity,
    )

    now = join([read_measurement(file) for file in files])
    if not baseline.exists():
        click.echo(f"no baseline yet at {baseline}; `samebits perplexity accept` puts one there")
        return 3
    accepted = read_perplexity(baseline)
    changes = compare_perplexity(accepted, now)
    click.echo(describe_changes(accepted, now, changes))
    return 1 if changes else 0


@perplexity_commands.command("accept")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option("--baseline", default=BASELINE, show_default=True, type=click.Path(path_type=Path), metavar="FILE")
@click.option("--reason", required=True, help="Why these numbers are accepted.")
@click.option("--author", default=None, help="Who accepts them. [git user.email]")
def accept_command(files: tuple[Path, ...], baseline: Path, reason: str, author: str | None) -> int:
    """Make a whole measurement the baseline; the only way to refresh it."""
    from harness.approval.author import author_of
    from harness.baseline.perplexity import accept_perplexity, baseline_json, read_measurement
    from harness.record import write_json

    parts = [read_measurement(file) for file in files]
    accepted = accept_perplexity(parts, author_of(author), reason, datetime.now(UTC))
    write_json(baseline, baseline_json(accepted))
    click.echo(
        f"{baseline}: {len(accepted.measurement.samples)} samples, perplexity {accepted.measurement.perplexity:.6g}"
    )
    return 0
