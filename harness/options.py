"""Options that several commands share. They are read here and nowhere twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

from harness.lifetime import DEADLINE_S

F = TypeVar("F", bound=Callable[..., object])


def deadline_option(function: F) -> F:
    """How long one case may take."""
    return click.option(
        "--deadline", type=click.FloatRange(min=0, min_open=True), default=DEADLINE_S, metavar="SECONDS",
        help=f"What one case may take at most. [{DEADLINE_S:.0f}]",
    )(function)  # fmt: skip


def subject_options(function: F) -> F:
    """Options that choose engine, model, mode and settings."""
    for option in reversed((
        click.option("--engine", default="bundled", show_default=True, help="Which engine to drive."),
        click.option("--model", default=None, help="Model name or path; `samebits models` lists them."),
        click.option("--mode", default=None, help="The engine's named way to compute, such as deterministic."),
        click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="An engine setting; repeatable."),
    )):  # fmt: skip
        function = option(function)
    return function
