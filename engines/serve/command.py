"""`samebits serve`: reads its options, starts the engine, serves, stops. The command line's own part is elsewhere.

Rules: variables that must be there before anything is imported are set by starting this process anew; one line on
standard output says where the server listens, everything else goes to standard error.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import click

from harness.choose import default_model
from harness.engine import Scalar
from harness.errors import UsageError
from harness.registry import adapter
from harness.settings import mode_settings, parse_assignments, resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The command's options."""

    engine: str
    model: str | None  # None: the engine's default
    mode: str | None
    assignments: tuple[str, ...]
    host: str
    port: int
    default_seed_policy: str  # "refuse" | "derive"
    grace_s: float
    max_body_bytes: int


def serve(**options: object) -> int:
    """Serves until a signal comes; returns 0. Raises SamebitsError for what cannot be served."""
    return run_server(ServeOptions(**options))  # type: ignore[arg-type]


def run_server(options: ServeOptions) -> int:
    """Starts, serves and stops. Raises UsageError, ModelError, EngineError."""
    if options.engine != "bundled":
        raise UsageError(
            f"--engine {options.engine!r}: only the bundled engine is served; start another engine's own server"
        )
    requested = _settings(options)
    _refuse_fronts(requested)
    _enter_environment(adapter(options.engine).environment(requested))

    from engines.bundled_adapter import harness_errors
    from engines.bundled_lifetime import start_lifetime
    from engines.serve.app import create_app
    from engines.serve.seeds import SEED_BITS, Seeding
    from engines.serve.server import listen, serve_until_signal, url_of
    from engines.serve.service import open_service

    listener = listen(options.host, options.port)
    url = url_of(listener)
    with harness_errors():
        lifetime = start_lifetime(options.model or default_model(options.engine), requested)
    seeding = Seeding(
        arithmetic=lifetime.arithmetic.name,
        policy="derive" if options.default_seed_policy == "derive" else "refuse",
        draw=lambda: secrets.randbits(SEED_BITS),
    )
    service = open_service(lifetime, requested, seeding)
    ready = f"serving {lifetime.model_name} ({lifetime.arithmetic.name}) at {url}, fingerprint {service.digest}"
    app = create_app(service, options.max_body_bytes)
    try:
        asyncio.run(
            serve_until_signal(app, service, listener, options.grace_s, lambda: click.echo(ready), _say)
        )  # fmt: skip
    finally:
        lifetime.stop()
    return 0


def _refuse_fronts(requested: Mapping[str, Scalar]) -> None:
    """Raises UsageError for engines of several engine processes, which run whole works only."""
    for name in ("replica", "disaggregated"):
        if requested[name] != "off":
            raise UsageError(f"--set {name}={requested[name]}: a server is one engine process; leave {name} off")


def _settings(options: ServeOptions) -> dict[str, Scalar]:
    chosen = adapter(options.engine)
    layers = [("--set", parse_assignments(chosen, options.assignments))]
    if options.mode is not None:
        layers.insert(0, ("--mode", dict(mode_settings(chosen, options.mode, "--mode"))))
    return dict(resolve(chosen, layers))


def _enter_environment(variables: Mapping[str, str]) -> None:
    """Starts this process anew with the variables, under the same process id, unless they are there already."""
    if any(os.environ.get(name) != value for name, value in variables.items()):
        sys.stdout.flush()
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **variables})  # noqa: S606 - this very program


def _say(text: str) -> None:
    click.echo(f"samebits serve: {text}", err=True)
