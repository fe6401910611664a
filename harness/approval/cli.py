"""The commands `approve` and `cosign`: write an approval of a difference, sign it, add a signature.

They hold no logic of their own. Rules: CI never writes approvals; an approval without a signature is written only when
asked for; what is written is said.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.errors import UsageError

if TYPE_CHECKING:
    from harness.baseline.drift import Drift
    from harness.finished import FinishedRun

APPROVALS = "approvals"


@click.command("approve")
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.argument("cell", metavar="CELL")
@click.option("--reason", required=True, help="Why this difference is accepted.")
@click.option("--expires", required=True, metavar="DATE|DAYS", help="2026-12-31, or days such as 30d.")
@click.option("--cause", default="", help="What caused it, in your words. [the run's diagnosis]")
@click.option("--author", default=None, help="Who approves, as allowed_signers names you. [git user.email]")
@click.option("--change-author", default=None, help="Who made the change. [the author]")
@click.option("--baselines", default=None, metavar="URL", help="Baselines the run drifted from. [what gate.json says]")
@click.option("--approvals", "folder", default=APPROVALS, show_default=True, type=click.Path(path_type=Path))
@click.option(
    "--key", default=None, type=click.Path(path_type=Path), help="SSH key to sign with. [git user.signingkey]"
)
@click.option("--unsigned", is_flag=True, help="Write it without a signature.")
def approve_command(
    run: Path, cell: str, reason: str, expires: str, cause: str, author: str | None, change_author: str | None,
    baselines: str | None, folder: Path, key: Path | None, unsigned: bool,
) -> int:  # fmt: skip
    """Approve the difference that CELL shows in RUN, until a date."""
    from harness.approval.author import author_of, key_of
    from harness.approval.cabinet import file_approval
    from harness.approval.draft import Words, draft, expiry, find_pair
    from harness.finished import read_finished
    from harness.release.decision import differences_of

    refuse_in_ci(os.environ)
    now = datetime.now(UTC).replace(microsecond=0)
    name = author_of(author)
    finished = read_finished(run)
    drifts = _drifts(finished, baselines)
    shown = {pair.label: differences_of(pair, drifts.get(pair.label)) for pair in finished.pairs}
    pair = find_pair(finished, cell, {label for label, found in shown.items() if found})
    if not shown[pair.label]:
        raise UsageError(f"{pair.label}: nothing to approve: its verdict is {pair.verdict} and no drift is on record")
    words = Words(reason=reason, cause=cause, author=name, change_author=change_author or name, created=now,
                  expires=expiry(expires, now))  # fmt: skip
    signing = None if unsigned else key_of(key)
    for difference in shown[pair.label]:
        approval = draft(finished, pair, difference, drifts.get(pair.label), words)
        _sign(file_approval(approval, folder), signing)
    return 0


@click.command("cosign")
@click.argument("file", type=click.Path(path_type=Path), metavar="APPROVAL")
@click.option(
    "--key", default=None, type=click.Path(path_type=Path), help="SSH key to sign with. [git user.signingkey]"
)
def cosign_command(file: Path, key: Path | None) -> int:
    """Add your signature to an approval. Read it first: you sign what it says."""
    from harness.approval.author import key_of
    from harness.approval.record import read_approval

    refuse_in_ci(os.environ)
    try:
        read_approval(file.read_bytes())
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from error
    _sign(file, key_of(key))
    return 0


def refuse_in_ci(environ: Mapping[str, str]) -> None:
    """Raises UsageError inside continuous integration: people approve, machines check."""
    if environ.get("CI", "").lower() not in ("", "0", "false"):
        raise UsageError("approvals are written by people: the variable CI says that this is continuous integration")


def _sign(file: Path, key: Path | None) -> None:
    from harness.approval.cabinet import file_signature
    from harness.approval.signature import sign

    if key is None:
        click.echo(f"wrote {file} WITHOUT a signature")
        return
    try:
        place = file_signature(file, sign(file.read_bytes(), key))
    except UsageError:
        click.echo(f"{file} is not signed; `samebits cosign {file} --key KEY` signs it", err=True)
        raise
    click.echo(f"wrote {place}")


def _drifts(run: FinishedRun, baselines: str | None) -> Mapping[str, Drift]:
    from harness.baseline.shelf import Shelf
    from harness.release.gate_record import GATE, drift_of, read_gate
    from harness.release.held import hold

    if baselines is not None:
        return hold(run, Shelf(baselines))
    folder = run.folder or Path()
    if not (folder / GATE).exists():
        return {}
    record = read_gate(folder, run)
    found = {pair.label: drift_of(record, pair.label) for pair in run.pairs}
    return {label: drift for label, drift in found.items() if drift is not None}
