"""`samebits ops` as the command line shows it: options alone. What surveys is loaded when the command runs."""

from __future__ import annotations

import click

from harness import registry


@click.command("ops")
@click.option("--impl", type=click.Choice(["bundled", "torch"]), required=True, help="Whose operators.")
@click.option("--model", required=True, help="A model's name or path; its shape alone is read.")
@click.option("--arithmetic", type=click.Choice(["portable", "free"]), default="portable", show_default=True,
              help="Of the bundled operators.")  # fmt: skip
@click.option("--dtype", "dtypes", multiple=True, metavar="NAME", help="float32, bfloat16, float16; repeatable.")
@click.option("--threads", type=click.IntRange(min=1), multiple=True, default=(1, 2), show_default=True)
@click.option("--rows", type=click.IntRange(min=2), default=256, show_default=True, help="Most rows in one call.")
@click.option("--repeat", type=click.IntRange(min=0), default=5, show_default=True,
              help="Timed calls for the cost relative to torch; 0: none.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ops_command(
    impl: str, model: str, arithmetic: str, dtypes: tuple[str, ...], threads: tuple[int, ...], rows: int, repeat: int,
    as_json: bool,
) -> int:  # fmt: skip
    """Does a row's result depend on its company? Per operator, shape, dtype and threads. Exit 1 if anything varies."""
    code: int = registry.load(registry.OPS)(
        impl=impl, model=model, arithmetic=arithmetic, dtypes=dtypes, threads=threads, rows=rows, repeat=repeat,
        as_json=as_json,
    )  # fmt: skip
    return code
