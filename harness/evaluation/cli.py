"""`samebits eval`: what a drift is worth in points. It holds no logic of its own."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("eval")
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--answers", type=click.Path(path_type=Path), default=None, metavar="FILE",
              help="The answer key. [answers.json beside the corpus]")  # fmt: skip
def eval_command(folder: Path, answers: Path | None) -> int:
    """Score the captures of the finished run in DIR by rules, and say item by item what moved between the arms.

    Exit code 1 if an answer moved between reference and variant of a pair.
    """
    from harness import registry
    from harness.evaluation.run import evaluate
    from harness.record import write_json

    record = evaluate(folder, answers)
    write_json(folder / "eval.json", record)
    registry.load(registry.EVAL_REPORT)(record, folder)
    click.echo(registry.load(registry.EVAL_TABLE)(record))
    click.echo(f"report: {folder / 'eval.md'}")
    return int(str(record["exit_code"]))
