"""Options that several commands share. They are read here and nowhere twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

F = TypeVar("F", bound=Callable[..., object])


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
