"""`samebits serve` as the command line shows it: options alone. What serves is loaded when the command runs."""

from __future__ import annotations

import click

from harness import registry
from harness.options import subject_options

DEFAULT_PORT = 8000
DEFAULT_GRACE_S = 30.0
DEFAULT_BODY_BYTES = 4 << 20


@click.command("serve")
@subject_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True, help="0: any free one.")
@click.option(
    "--default-seed-policy",
    type=click.Choice(["refuse", "derive"]),
    default="refuse",
    show_default=True,
    help="A draw without a seed: refuse it, or derive a seed from the request.",
)
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(min=0),
    default=DEFAULT_GRACE_S,
    show_default=True,
    help="Seconds that requests may take to finish once the server is told to stop.",
)
@click.option(
    "--max-body-bytes",
    type=click.IntRange(min=1),
    default=DEFAULT_BODY_BYTES,
    show_default=True,
    help="Largest request body.",
)
def serve_command(
    engine: str, model: str | None, mode: str | None, assignments: tuple[str, ...], host: str, port: int,
    default_seed_policy: str, grace_s: float, max_body_bytes: int,
) -> int:  # fmt: skip
    """Serve the bundled engine over an OpenAI-compatible API."""
    code: int = registry.load(registry.SERVE)(
        engine=engine, model=model, mode=mode, assignments=assignments, host=host, port=port,
        default_seed_policy=default_seed_policy, grace_s=grace_s, max_body_bytes=max_body_bytes,
    )  # fmt: skip
    return code
