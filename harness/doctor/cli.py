"""`samebits doctor`: the command line over `diagnose` and `live`.

It starts no engine itself: `--live` asks the callable that the composition root brings. The command returns its exit
code (0 clean, 1 findings) and raises UsageError (2) for what cannot be used; only click is imported before it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from harness.errors import UsageError

if TYPE_CHECKING:
    from harness.doctor.diagnose import Diagnosis
    from harness.doctor.finding import Finding
    from harness.doctor.live import Observe
    from harness.doctor.settings import DoctorSettings
    from harness.engine import Scalar

Format = Literal["text", "json", "sarif"]


def doctor_command(observe: Observe | None = None) -> click.Command:
    """The click command; `observe` starts or asks a running engine for `--live`."""

    @click.command(name="doctor")
    @click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
    @click.option("--format", "output", type=click.Choice(["text", "json", "sarif"]), default="text")
    @click.option("--exclude", multiple=True, metavar="GLOB", help="Leave out paths that match; may be repeated.")
    @click.option("--config", type=click.Path(path_type=Path), help="Read the [doctor] table from this file.")
    @click.option("--live", is_flag=True, help="Check a running engine's observed configuration too.")
    @click.option("--engine", default="", help="With --live: the engine.")
    @click.option("--model", default="", help="With --live: the model.")
    @click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="With --live: engine settings.")
    def doctor(
        paths: tuple[Path, ...],
        output: Format,
        exclude: tuple[str, ...],
        config: Path | None,
        live: bool,
        engine: str,
        model: str,
        assignments: tuple[str, ...],
    ) -> int:
        """Is the mode you think is on really on? Reads launch scripts, containers and units; runs nothing.

        Exit status: 0 clean, 1 findings, 2 usage.
        """
        from harness.doctor.diagnose import diagnose

        _check_usage(paths, live=live, engine=engine, model=model, assignments=assignments)
        settings = _settings(paths, config)
        result = diagnose(paths, settings, exclude=exclude)
        findings = result.findings
        if not result.files and not live:
            raise UsageError(f"{paths[0]}: no file here is of a kind the doctor reads; give another path")
        if live:
            findings = _add_live(result, settings, observe, engine, model, _assignments(assignments))
        click.echo(_render(output, findings, result, settings), nl=False)
        return 1 if findings else 0

    return doctor


def _check_usage(paths: tuple[Path, ...], *, live: bool, engine: str, model: str, assignments: tuple[str, ...]) -> None:
    if not paths and not live:
        raise UsageError("give at least one path, or --live --engine NAME")
    if live and not engine:
        raise UsageError("--live needs --engine NAME")
    if not live and (engine or model or assignments):
        raise UsageError("--engine, --model and --set belong to --live; add --live or drop them")


def _settings(paths: tuple[Path, ...], config: Path | None) -> DoctorSettings:
    from harness.doctor.rules import RULES
    from harness.doctor.settings import find_settings, load_settings

    if config is not None:
        if not config.is_file():
            raise UsageError(f"{config}: no such file; give the TOML file with the [doctor] table")
        return load_settings(config, RULES)
    return find_settings(paths[0] if paths else Path(), RULES)


def _assignments(words: tuple[str, ...]) -> dict[str, Scalar]:
    found: dict[str, Scalar] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {word}: expected KEY=VALUE")
        found[key] = _scalar(value)
    return found


def _scalar(text: str) -> Scalar:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _add_live(
    result: Diagnosis,
    settings: DoctorSettings,
    observe: Observe | None,
    engine: str,
    model: str,
    given: Mapping[str, Scalar],
) -> tuple[Finding, ...]:
    from harness.doctor.live import check_observed, compare_static_live, static_settings

    if observe is None:
        raise UsageError("--live is not available here: no engine is attached to this command")
    seen = observe(engine, model, given)
    live = check_observed(engine, seen.requested, seen.resolved, seen.observed, seen.environment, settings=settings)
    static = static_settings(result.launches, engine)
    now = {**seen.resolved, **seen.observed}
    differing = compare_static_live(static, now, environment=seen.environment)
    return tuple(sorted({*result.findings, *live, *differing}))


def _render(output: Format, findings: tuple[Finding, ...], result: Diagnosis, settings: DoctorSettings) -> str:
    from harness.doctor.render import render_json, render_sarif, render_text
    from harness.doctor.rules import RULES

    launches = len(result.launches)
    if output == "json":
        return render_json(findings, files=result.files, launches=launches)
    if output == "sarif":
        return render_sarif(findings, RULES, settings.severities)
    return render_text(findings, files=result.files, launches=launches, colour=sys.stdout.isatty())
