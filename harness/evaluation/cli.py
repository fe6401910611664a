"""`samebits eval`: what a drift is worth in points. It holds no logic of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from harness.lifetime import DEADLINE_S


@click.command("eval")
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--answers", type=click.Path(path_type=Path), default=None, metavar="FILE",
              help="The answer key. [answers.json beside the corpus]")  # fmt: skip
@click.option("--judge", type=click.Path(path_type=Path), default=None, metavar="FILE",
              help="A language model as a judge (TOML), beside the rules.")  # fmt: skip
@click.option("--judge-run", type=click.Path(path_type=Path), default=None, metavar="DIR",
              help="The finished run of the judge's own cells; without a PASS its scores are marked.")  # fmt: skip
@click.option("--deadline", type=float, default=DEADLINE_S, show_default=True, help="Seconds the judge may take.")
@click.option("--quiet", is_flag=True, help="No progress; the table is still printed.")
def eval_command(
    folder: Path, answers: Path | None, judge: Path | None, judge_run: Path | None, deadline: float, quiet: bool
) -> int:
    """Score the captures of the finished run in DIR by rules, and say item by item what moved between the arms.

    Exit code 1 if an answer moved between reference and variant of a pair.
    """
    from harness import registry
    from harness.errors import UsageError
    from harness.evaluation.judge_spec import read_judge
    from harness.evaluation.run import JudgeRequest, evaluate
    from harness.progress import open_progress
    from harness.record import write_json

    if judge_run is not None and judge is None:
        raise UsageError("--judge-run without --judge: there is no judge whose cells these could be; name it")
    asked = None
    if judge is not None:
        progress = open_progress(sys.stderr, quiet=quiet)
        asked = JudgeRequest(spec=read_judge(judge), run=judge_run, deadline_s=deadline, progress=progress)
    record = evaluate(folder, answers, asked)
    write_json(folder / "eval.json", record)
    registry.load(registry.EVAL_REPORT)(record, folder)
    click.echo(registry.load(registry.EVAL_TABLE)(record))
    click.echo(f"report: {folder / 'eval.html'}")
    return int(str(record["exit_code"]))
