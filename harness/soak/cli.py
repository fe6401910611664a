"""`samebits soak`: does a server that has served for long still say the same, as fast. It holds no logic of its own."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click

from harness.background import SHAPES
from harness.lifetime import DEADLINE_S
from harness.options import subject_options


@click.command("soak")
@click.argument("corpus", default="quick")
@subject_options
@click.option("--load", "shape", type=click.Choice(SHAPES), default="steady", show_default=True,
              help="Background traffic; its seeds 1 to 4 take turns.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=600.0, show_default=True,
              help="Life of the old server, at most.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(min=5), default=10_000, show_default=True, help="Rounds, at most.")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Folder. [.samebits/soak/...]")
@click.option("--deadline", type=float, default=DEADLINE_S, show_default=True, help="Seconds one round may take.")
@click.option("--quiet", is_flag=True, help="No progress; the table is still printed.")
def soak_command(
    corpus: str, engine: str, model: str | None, mode: str | None, assignments: tuple[str, ...], shape: str,
    seconds: float, rounds: int, out: Path | None, deadline: float, quiet: bool,
) -> int:  # fmt: skip
    """Serve the requests of CORPUS round after round under background traffic, then the same with a new server.

    Exit code 1 if answers drifted over time, with the background, or differ from the new server's.
    """
    from harness import registry
    from harness.choose import default_model
    from harness.errors import UsageError
    from harness.plan import Subject
    from harness.record import write_json
    from harness.settings import mode_settings, parse_assignments
    from harness.soak.measure import SoakRequest, run_soak

    adapter = registry.adapter(engine)
    overrides = dict(mode_settings(adapter, mode, "--mode")) if mode is not None else {}
    overrides.update(parse_assignments(adapter, assignments))
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{Path(corpus).name}-{engine}"
    folder = out or Path(".samebits") / "soak" / name
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"--out {folder}: expected a new or empty folder, found files; choose another")
    request = SoakRequest(
        subject=Subject(adapter=adapter, model=model or default_model(engine), overrides=overrides), corpus=corpus,
        shape=shape, rounds=rounds, seconds=seconds, folder=folder, deadline_s=deadline,
    )  # fmt: skip
    soak = run_soak(request, lambda text: None if quiet else click.echo(text, err=True))
    write_json(folder / "soak.json", {"engine": engine, "model": request.subject.model, "corpus": corpus,
                                      "load": shape, **soak.to_json()})  # fmt: skip
    click.echo(soak.text())
    return soak.exit_code
