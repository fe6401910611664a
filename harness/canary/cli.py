"""`samebits canary`: how often an endpoint says the same. It holds no logic of its own."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

import click

from harness.lifetime import DEADLINE_S
from harness.options import subject_options

MEASURED = 3  # what `run` returns for INSUFFICIENT


@click.command("canary")
@click.argument("corpus")
@subject_options
@click.option(
    "--repeats", type=click.IntRange(min=2), default=20, show_default=True, help="Times each request is sent."
)
@click.option("--variant", "variants", multiple=True, metavar="KEY=VALUE", help="A second arm with this setting.")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Folder. [.samebits/canaries/...]")
@click.option("--deadline", type=float, default=DEADLINE_S, show_default=True, help="Seconds one repetition may take.")
@click.option("--quiet", is_flag=True, help="No progress.")
def canary_command(
    corpus: str, engine: str, model: str | None, mode: str | None, assignments: tuple[str, ...], repeats: int,
    variants: tuple[str, ...], out: Path | None, deadline: float, quiet: bool,
) -> int:  # fmt: skip
    """Send the requests of CORPUS many times and count answers. It never passes: exit code 3 with numbers."""
    from harness import registry
    from harness.canary import CanaryRequest, run_canary
    from harness.choose import default_model
    from harness.errors import UsageError
    from harness.progress import open_progress
    from harness.record import write_json
    from harness.settings import mode_settings, parse_assignments

    adapter = registry.adapter(engine)
    overrides = dict(mode_settings(adapter, mode, "--mode")) if mode is not None else {}
    overrides.update(parse_assignments(adapter, assignments))
    folder = out or Path(".samebits") / "canaries" / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{corpus}-{engine}"
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"--out {folder}: expected a new or empty folder, found files; choose another")
    request = CanaryRequest(
        adapter=adapter, model=model or default_model(engine), overrides=overrides,
        variant=parse_assignments(adapter, variants), corpus=corpus, repeats=repeats, folder=folder,
        deadline_s=deadline,
    )  # fmt: skip
    found = run_canary(request, open_progress(sys.stderr, quiet=quiet))
    write_json(folder / "canary.json", found.to_json())
    click.echo(found.text())
    return MEASURED
