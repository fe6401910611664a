"""The command line: `samebits`. The composition root together with the pytest plugin.

It holds no logic of its own: each command reads its options, calls one function and prints. Rules: heavy packages are
imported inside the commands; every SamebitsError becomes one message and its exit code; Ctrl-C is 130; output
that nobody reads any more is 1, which click sees to.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness import __version__, registry
from harness.errors import SamebitsError
from harness.options import deadline_option, subject_options

if TYPE_CHECKING:
    from harness.doctor.live import Observation
    from harness.engine import Field, Scalar
    from harness.plan import Plan


def main() -> None:
    """Runs the command line and exits with its code."""
    try:
        code = commands.main(prog_name="samebits", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = 2
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        code = 130
    except SamebitsError as error:
        click.echo(f"samebits: {error}", err=True)
        code = error.exit_code
    sys.exit(code if isinstance(code, int) else 0)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="samebits")
def commands() -> None:
    """Say what must stay equal, run it both ways, compare bit for bit.

    \b
    To begin with:
      samebits cells list              what can be run
      samebits plan quick              what a run would do; starts nothing
      samebits run quick               capture, compare, judge, report
      samebits gate RUN --policy FILE  decide on a finished run
    """


@commands.command("run")
@click.argument("matrices", nargs=-1, required=True, metavar="MATRIX_OR_PATH...")
@subject_options
@click.option("--cell", "cells", multiple=True, metavar="NAME", help="Only this cell; repeatable.")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Folder for the run. [.samebits/runs/...]")
@click.option("--overwrite", is_flag=True, help="Replace a finished or foreign run in --out.")
@deadline_option
@click.option("--baselines", default=None, metavar="URL", help="What cells on an environment axis are held against.")
@click.option("--quiet", is_flag=True, help="No progress; the verdict table is still printed.")
def run_command(
    matrices: tuple[str, ...], engine: str, model: str | None, mode: str | None, assignments: tuple[str, ...],
    cells: tuple[str, ...], out: Path | None, overwrite: bool, deadline: float, baselines: str | None, quiet: bool,
) -> int:  # fmt: skip
    """Run matrices: capture, compare, judge, report. The exit code is the verdict.

    A matrix is a shipped one (`samebits cells list`), or a folder or file of cells.

    \b
    0  every planned pair is PASS, as declared, or UNSUPPORTED as foreseen
    1  a cell failed
    2  the command line, a cell, a corpus or a folder cannot be used
    3  INSUFFICIENT, UNSUPPORTED that nobody foresees, pairs not judged
    4  an engine error
    130  interrupted; the same command with the same --out resumes
    """
    from harness.progress import open_progress
    from harness.run import RunRequest, run

    begun = time.monotonic()
    plan = _plan(matrices, engine, model, mode, assignments, cells)
    folder = out or default_folder(plan, datetime.now(UTC))
    progress = open_progress(sys.stderr, quiet=quiet)
    progress.note(f"matrix {plan.matrix.path}, engine {plan.engine}, model {plan.model}, folder {folder}")
    request = RunRequest(plan=plan, adapter=registry.adapter(engine), folder=folder, progress=progress,
                         deadline_s=deadline, overwrite=overwrite, begun=begun, baselines=baselines)  # fmt: skip
    try:
        record = run(request, _report)
    except KeyboardInterrupt:
        click.echo(f"interrupted; the same command with --out {folder} resumes", err=True)
        return 130
    _print_table(record)
    if record["cost"] is not None:
        click.echo(f"cost: {record['cost']}")
    click.echo(f"report: {folder / 'report.html'}")
    return int(str(record["exit_code"]))


@commands.command("plan")
@click.argument("matrices", nargs=-1, required=True, metavar="MATRIX_OR_PATH...")
@subject_options
@click.option("--cell", "cells", multiple=True, metavar="NAME", help="Only this cell; repeatable.")
def plan_command(
    matrices: tuple[str, ...], engine: str, model: str | None, mode: str | None, assignments: tuple[str, ...],
    cells: tuple[str, ...],
) -> int:  # fmt: skip
    """Print what a run would do. Starts no engine."""
    from harness.plan_text import plan_text

    click.echo(plan_text(_plan(matrices, engine, model, mode, assignments, cells)))
    return 0


@commands.group("cells")
def cells_group() -> None:
    """List and check cells."""


@cells_group.command("list")
@click.argument("matrices", nargs=-1, metavar="[MATRIX_OR_PATH...]")
def cells_list(matrices: tuple[str, ...]) -> int:
    """List cells of the named matrices, or of all shipped ones."""
    from harness.matrix import load_matrix, shipped_names

    for name in matrices or shipped_names():
        matrix = load_matrix(name)
        click.echo(f"{matrix.name} ({matrix.path.name}, {len(matrix.cells)} cells)")
        for cell in matrix.cells:
            values = ", ".join(str(value) for value in cell.variants)
            click.echo(f"  {cell.name:<26} {cell.axis.name} {cell.reference} -> {values}; rule {cell.rule}, "
                       f"{cell.replay}, corpus {cell.corpus}")  # fmt: skip
            click.echo(f"  {'':<26} {cell.invariant}")
    return 0


@cells_group.command("check")
@click.argument("matrices", nargs=-1, required=True, metavar="MATRIX_OR_PATH...")
def cells_check(matrices: tuple[str, ...]) -> int:
    """Check cell files; every mistake is listed with its path. Exit 2 if there is one."""
    from harness.matrix import load_matrix

    for name in matrices:
        matrix = load_matrix(name)
        click.echo(f"{matrix.path}: {len(matrix.cells)} cells, no mistakes")
    return 0


@commands.command("compare")
@click.argument("reference", type=click.Path(path_type=Path), metavar="DIR")
@click.argument("variant", type=click.Path(path_type=Path), metavar="DIR")
def compare_command(reference: Path, variant: Path) -> int:
    """Compare the captures of two runs, case by case. Exit 1 if anything differs."""
    from harness.compare.runs import compare_runs

    text, same = compare_runs(reference, variant)
    click.echo(text)
    return 0 if same else 1


@commands.command("report")
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
def report_command(folder: Path) -> int:
    """Write report.html, summary.md and junit.xml again from a run's run.json."""
    from harness.record import read_record

    _report(read_record(folder), folder)
    click.echo(f"report: {folder / 'report.html'}")
    return 0


@commands.command("models")
@click.option("--engine", default="bundled", show_default=True, help="Whose models.")
def models_command(engine: str) -> int:
    """List models and how to get what is missing."""
    for model in registry.adapter(engine).models():
        click.echo(f"{model.name:<22} {'available' if model.available else 'missing':<10} {model.description}")
        if not model.available:
            click.echo(f"{'':<33} {model.how_to_get}")
    return 0


@commands.command("selftest")
def selftest_command() -> int:
    """Plant faults in captures and see each one found. Exit 1 if one survives."""
    from harness.selftest import run_selftest

    result = run_selftest()
    click.echo(result.text())
    return 0 if result.survivors == () else 1


def _plan(
    matrices: tuple[str, ...], engine: str, model: str | None, mode: str | None, assignments: tuple[str, ...],
    cells: tuple[str, ...],
) -> Plan:  # fmt: skip
    from harness.choose import choose_plan

    return choose_plan(matrices, engine=engine, model=model, mode=mode, assignments=assignments, cells=cells)


def default_folder(plan: Plan, now: datetime) -> Path:
    """A new folder under .samebits/runs, named by time and matrix."""
    base = Path(".samebits") / "runs" / f"{now:%Y%m%dT%H%M%SZ}-{plan.matrix.name}-{plan.engine}"
    folder, number = base, 1
    while folder.exists():
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return folder


def _report(record: Mapping[str, object], folder: Path) -> None:
    registry.load(registry.REPORTS)(record, folder)


def _print_table(record: Mapping[str, object]) -> None:
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(registry.load(registry.TABLE)(record))
    else:
        click.echo(registry.load(registry.PLAIN_TABLE)(record))


def _subject_fields(engine: str, model: str) -> tuple[Field, ...]:
    from harness.observe import subject_fields

    return subject_fields(engine, model, {})


def _observe(engine: str, model: str, settings: Mapping[str, Scalar]) -> Observation:
    from harness.choose import default_model
    from harness.doctor.live import Observation
    from harness.observe import observe, worker_environment

    seen = observe(engine, model or default_model(engine), settings)
    return Observation(  # requested: what somebody asked for; defaults that resolve to something are no difference
        requested=settings, resolved=seen.resolved, observed=seen.observed, environment=worker_environment(seen)
    )


SHORT_HELPS = {  # of commands whose first sentence does not fit beside their name
    "census": "Count completions of the same prompts in changing company.",
    "corpus": "Freeze traffic into a corpus; verify and show corpora.",
    "cost": "Measure what one mode costs against another, in pairs.",
    "doctor": "Is the mode you think is on really on? Reads launch files.",
    "eval": "Score a run's answers; say what moved between the arms.",
    "fingerprint": "Show what it takes to reproduce the inference path here.",
    "nightly": "Run, hold against the baseline, append to a history.",
    "ops": "See which operators vary with a row's company.",
    "perplexity": "Log-likelihoods of a frozen text corpus, to the bit.",
    "release": "Put a run and the gate's decision into one archive.",
    "report": "Write the reports of a finished run again.",
    "soak": "Serve for long under background traffic, and compare.",
}


def _attach() -> None:
    from harness.approval.cli import approve_command, cosign_command
    from harness.baseline.cli import baseline_commands
    from harness.baseline.perplexity_cli import perplexity_commands
    from harness.canary.cli import canary_command
    from harness.census.cli import census_command
    from harness.corpus.cli import corpus_commands
    from harness.cost.cli import cost_command
    from harness.doctor.cli import doctor_command
    from harness.evaluation.cli import eval_command
    from harness.fingerprint.cli import build_command
    from harness.ops_cli import ops_command
    from harness.release.cli import release_commands
    from harness.serve_cli import serve_command
    from harness.soak.cli import soak_command

    commands.add_command(corpus_commands)
    commands.add_command(cost_command)
    commands.add_command(doctor_command(_observe))
    commands.add_command(ops_command)
    commands.add_command(serve_command)
    commands.add_command(canary_command)
    commands.add_command(census_command)
    commands.add_command(soak_command)
    commands.add_command(eval_command)
    commands.add_command(build_command(_subject_fields))
    for command in (baseline_commands, perplexity_commands, approve_command, cosign_command, *release_commands):
        commands.add_command(command)
    for name, text in SHORT_HELPS.items():
        commands.commands[name].short_help = text


_attach()

if __name__ == "__main__":
    main()
