"""The commands `gate`, `nightly`, `release` and `verify`. They hold no logic of their own.

Rules: heavy packages are imported inside the commands; the environment is read here and nowhere below.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from harness import registry
from harness.errors import ModelError, OutputError, UsageError
from harness.options import deadline_option, subject_options

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from harness.engine import Tokenizer
    from harness.fingerprint.privacy import Private
    from harness.finished import FinishedRun
    from harness.release.decision import Decision, Row

F = TypeVar("F", bound="Callable[..., object]")


def gate_options(function: F) -> F:
    """Options that choose what a run is held against. All are optional."""
    for option in reversed((
        click.option("--approvals", default=None, type=click.Path(path_type=Path), help="Folder of approvals."),
        click.option("--allowed-signers", "signers", default=None, type=click.Path(path_type=Path),
                     help="Who may sign, as git's gpg.ssh.allowedSignersFile has it."),
        click.option("--policy", default=None, type=click.Path(path_type=Path), help="What is demanded (TOML)."),
        click.option("--change-author", default=None, metavar="NAME", help="Who made this change, as CI knows it."),
        click.option("--annotations/--no-annotations", default=None, help="GitHub Actions annotations. [in Actions]"),
    )):  # fmt: skip
        function = option(function)
    return function


@click.command("gate")
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.option("--baselines", default=None, metavar="URL", help="Baselines to hold the run against.")
@gate_options
@click.option("--cost", default=None, type=click.Path(path_type=Path), help="The cost.json of `samebits cost`.")
@click.option("--out", default=None, type=click.Path(path_type=Path), help="Folder for the decision. [RUN]")
def gate_command(
    run: Path, cost: Path | None, baselines: str | None, approvals: Path | None, signers: Path | None,
    policy: Path | None, change_author: str | None, annotations: bool | None, out: Path | None,
) -> int:  # fmt: skip
    """Decide on a finished run. The exit code is the decision.

    \b
    0  whatever blocks is PASS, APPROVED, as declared, or UNSUPPORTED as foreseen
    1  a cell failed or drifted, and nobody has signed for it
    2  an option, a policy or a stored file cannot be used
    3  evidence the policy refuses, no baseline yet, pairs not judged
    4  an engine error
    5  an approval that this run calls upon cannot be honoured
    """
    from harness.finished import read_finished
    from harness.release.gate_run import GateInputs, gate

    finished = read_finished(run)
    inputs = GateInputs(
        baselines=baselines, approvals=approvals, signers=signers, policy=policy, change_author=change_author, cost=cost
    )
    decision = gate(finished, inputs, datetime.now(UTC))
    finish_gate(finished, decision, out or run, annotations=annotations)
    return decision.exit_code


def finish_gate(
    run: FinishedRun, decision: Decision, folder: Path, *, annotations: bool | None
) -> Mapping[str, object]:
    """Writes the decision and says it."""
    from harness.release.gate_run import write_gate

    record = write_gate(run, decision, folder, registry.load(registry.GATE_COMMENT), registry.load(registry.REPORTS))
    for note in decision.invalid:
        click.echo(f"approval {note.name}: {note.sentence}")
    for note in decision.obsolete:
        click.echo(f"obsolete approval {note.name}: {note.sentence}")
    for row in decision.rows:
        if str(row.outcome) != "PASS" or row.drift is not None:
            click.echo(f"{row.outcome:<13} {row.label}: {_why(row)}")
    for text in (*decision.warnings, *decision.costs):
        click.echo(f"note: {text}")
    click.echo(f"gate: {decision.sentence}")
    click.echo(f"decision: {folder / 'gate.json'}")
    shown = os.environ.get("GITHUB_ACTIONS") == "true" if annotations is None else annotations
    if shown:
        click.echo(registry.load(registry.GATE_ANNOTATIONS)(record), nl=False)
    return record


def _why(row: Row) -> str:
    if str(row.outcome) == "PASS" and row.drift is not None:
        return row.drift.sentence
    return "; ".join(row.reasons)


@click.command("nightly")
@click.argument("matrices", nargs=-1, required=True, metavar="MATRIX_OR_PATH...")
@subject_options
@click.option("--cell", "cells", multiple=True, metavar="NAME", help="Only this cell; repeatable.")
@click.option("--history", required=True, metavar="DIR", help="Where nights are kept: a folder, or any fsspec URL.")
@click.option("--baselines", default=None, metavar="URL", help="What the run is held against. [HISTORY/baselines]")
@gate_options
@click.option(
    "--out", type=click.Path(path_type=Path), default=None, help="Folder for the run. [.samebits/nightly/...]"
)
@click.option("--overwrite", is_flag=True, help="Replace a finished or foreign run in --out.")
@deadline_option
@click.option("--quiet", is_flag=True, help="No progress; the outcome is still printed.")
def nightly_command(
    matrices: tuple[str, ...], engine: str, model: str | None, mode: str | None, assignments: tuple[str, ...],
    cells: tuple[str, ...], history: str, baselines: str | None, approvals: Path | None, signers: Path | None,
    policy: Path | None, change_author: str | None, annotations: bool | None, out: Path | None, overwrite: bool,
    deadline: float, quiet: bool,
) -> int:  # fmt: skip
    """Run, hold against the last accepted baseline, append to the history, and report with the trend."""
    from harness.choose import choose_plan
    from harness.finished import read_finished
    from harness.progress import open_progress
    from harness.release.gate_run import GateInputs
    from harness.release.nightly import BASELINES, conclude_night, write_trend
    from harness.release.policy import read_policy
    from harness.run import RunRequest, run

    begun, now = time.monotonic(), datetime.now(UTC)
    if policy is not None:
        read_policy(policy)  # a mistake in it is said before the night, not after
    plan = choose_plan(matrices, engine=engine, model=model, mode=mode, assignments=assignments, cells=cells)
    shelf = baselines or f"{history.rstrip('/')}/{BASELINES}"
    folder = out or Path(".samebits") / "nightly" / f"{now:%Y%m%dT%H%M%SZ}-{plan.matrix.name}-{plan.engine}"
    progress = open_progress(sys.stderr, quiet=quiet)
    request = RunRequest(plan=plan, adapter=registry.adapter(engine), folder=folder, progress=progress, begun=begun,
                         deadline_s=deadline, overwrite=overwrite, baselines=shelf, nightly=True)  # fmt: skip
    try:
        run(request, registry.load(registry.REPORTS))
    except KeyboardInterrupt:
        click.echo(f"interrupted; the same command with --out {folder} resumes", err=True)
        return 130
    finished = read_finished(folder)
    inputs = GateInputs(
        baselines=shelf, approvals=approvals, signers=signers, policy=policy, change_author=change_author
    )
    night = conclude_night(finished, history, inputs, datetime.now(UTC))
    finish_gate(finished, night.decision, folder, annotations=annotations)
    write_trend(night, folder, registry.load(registry.TREND))
    for line in (*night.states, *night.onsets, *night.damaged):
        click.echo(line)
    click.echo(f"trend: {folder / 'trend.html'}")
    return night.decision.exit_code


@click.command("release")
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.option("--out", default=None, type=click.Path(path_type=Path), help="The archive. [RUN/release.tar]")
@click.option("--with-logs", is_flag=True, help="Keep log tails, host name and paths: read them first.")
@click.option("--rejected", is_flag=True, help="Archive a run that the gate did not accept, as evidence.")
def release_command(run: Path, out: Path | None, with_logs: bool, rejected: bool) -> int:
    """Put corpus, verdicts, cost, fingerprint and gate decision of RUN into one archive."""
    import hashlib

    from harness.finished import read_finished
    from harness.release.archive import Disclosure, make_archive
    from harness.release.gate_record import read_gate

    finished = read_finished(run)
    gate = read_gate(run, finished)
    if gate["exit_code"] != 0 and not rejected:
        raise UsageError(f"{run}: the gate did not accept it (exit code {gate['exit_code']}: {gate['outcome']}); "
                         "pass --rejected to archive it as evidence")  # fmt: skip
    content = make_archive(finished, _tokenizer(finished), Disclosure(private=_private(), logs=with_logs))
    file = out or run / "release.tar"
    write_bytes(file, content)
    click.echo(f"{hashlib.sha256(content).hexdigest()}  {file}")
    return 0


@click.command("verify")
@click.argument("file", type=click.Path(path_type=Path), metavar="ARCHIVE")
def verify_command(file: Path) -> int:
    """Re-check a release archive, offline. Exit 1 if anything in it was changed."""
    from harness.release.verify import verify_archive

    try:
        content = file.read_bytes()
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from error
    checked = verify_archive(content)
    for fault in checked.faults:
        click.echo(f"{file}: {fault}")
    if checked.faults:
        return 1
    click.echo(f"{file}: {checked.files} files whole, of run {checked.run[:12]}; gate: {checked.outcome}")
    return 0


def _tokenizer(run: FinishedRun) -> Tokenizer | None:
    try:
        return registry.adapter(run.engine).tokenizer(str(run.raw["model"]))
    except ModelError:
        return None


def _private() -> Private:
    """What is private on this host."""
    import getpass
    import socket
    import tempfile

    from harness.fingerprint.privacy import private_words

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = ""
    folders = [str(Path.home()), str(Path.cwd()), tempfile.gettempdir()]
    return private_words(os.environ, user=user, host=socket.gethostname(), folders=folders)


def write_bytes(file: Path, content: bytes) -> None:
    """Writes a file whole or not at all. Raises OutputError."""
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        aside.write_bytes(content)
        aside.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise OutputError(f"{file}: cannot be written: {error.strerror}; choose another --out") from error


release_commands = (gate_command, nightly_command, release_command, verify_command)
