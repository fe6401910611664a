"""`samebits corpus`: freeze traffic, verify corpora, show what is in one.

It knows how to print, not how to judge. Rules: everything that freezing filled in is printed; errors are
raised and become exit codes in the command line's entry point; nothing heavy is imported before a command
runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from harness.corpus.manifest import ARBITRARY_IDS
from harness.errors import CorpusError, UsageError
from harness.suggest import did_you_mean

if TYPE_CHECKING:
    from harness.corpus.freeze import Frozen

SEEDS_SHOWN: Final = 20


@click.group("corpus")
def corpus_commands() -> None:
    """Freeze traffic into a corpus, verify corpora, show what is in one."""


@corpus_commands.command("freeze")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@click.option("--name", help="Name of the corpus.  [default: the folder's name]")
@click.option("--description", default="", help="One sentence for people.")
@click.option("--engine", default="bundled", show_default=True, help="Engine whose model's tokenizer is used.")
@click.option("--model", default="smollm2", show_default=True, help="Model whose tokenizer is used.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="New tokens for lines that do not say.")
@click.option(
    "--default",
    "defaults",
    multiple=True,
    metavar="FIELD=JSON",
    help="Any sampling field for lines that do not say, for example temperature=0.7. Repeatable.",
)
@click.option(
    "--arbitrary-ids",
    multiple=True,
    type=click.Choice(ARBITRARY_IDS),
    help="Token ids in this field carry no meaning and may be folded into another vocabulary. Repeatable.",
)
@click.option("--keep-source", is_flag=True, help="Keep a copy of FILE in the folder as source.jsonl.")
@click.option("--force", is_flag=True, help="Replace the corpus that is already there.")
def freeze_command(
    file: Path,
    out: Path,
    name: str | None,
    description: str,
    engine: str,
    model: str,
    max_tokens: int | None,
    defaults: tuple[str, ...],
    arbitrary_ids: tuple[str, ...],
    keep_source: bool,
    force: bool,
) -> None:
    """Freeze FILE (JSON Lines: text, messages, token ids, or OpenAI Batch API requests) into a corpus."""
    from harness.corpus.freeze import Order, freeze
    from harness.registry import adapter

    fields = parse_defaults(defaults)
    if max_tokens is not None:
        fields["max_tokens"] = max_tokens
    order = Order(
        source=file,
        tokenizer=adapter(engine).tokenizer(model),
        tokenizer_name=model,
        name=name or out.resolve().name,
        description=description,
        defaults=fields,
        arbitrary_ids=tuple(sorted(set(arbitrary_ids))),
        keep_source=keep_source,
    )
    for line in frozen_lines(freeze(order, out, force=force)):
        click.echo(line)


@corpus_commands.command("verify")
@click.argument("corpora", nargs=-1, required=True, metavar="DIR_OR_NAME...")
def verify_command(corpora: tuple[str, ...]) -> None:
    """Check corpora against their manifests: files, content, digest."""
    from harness.corpus import load_corpus

    wrong = []
    for name in corpora:
        try:
            corpus = load_corpus(name)
        except CorpusError as error:
            wrong.append(str(error))
        else:
            click.echo(f"{corpus.name}: {len(corpus.requests)} requests, digest {corpus.digest} ({corpus.origin})")
    if wrong:
        raise CorpusError("\n".join(wrong))


@corpus_commands.command("show")
@click.argument("corpus", metavar="DIR_OR_NAME")
@click.option("--sample", default=6, show_default=True, type=click.IntRange(min=0), help="Requests to print.")
def show_command(corpus: str, sample: int) -> None:
    """Show a corpus: digest, prompt lengths, sampling, and some of its requests."""
    from rich.console import Console

    from harness.corpus import load_corpus
    from harness.corpus.show import show

    show(load_corpus(corpus), sample, Console(highlight=False))


def parse_defaults(pairs: Sequence[str]) -> dict[str, object]:
    """`FIELD=JSON` pairs. Raises UsageError for an unknown field, no `=`, or a value that does not fit."""
    from harness.corpus.json_lines import SAMPLING_READERS
    from harness.strict_json import Place, parse_json

    mistakes: list[str] = []
    known = sorted(set(SAMPLING_READERS) - {"seed"})
    fields: dict[str, object] = {}
    for pair in pairs:
        field, equals, value = pair.partition("=")
        if not equals or field not in known:
            raise UsageError(f"--default {pair!r}: expected FIELD=JSON; {did_you_mean(field, known)}")
        place = Place(file=f"--default {pair}", line=0, path="$", mistakes=mistakes)
        fields[field] = parse_json(place, value.encode())
        SAMPLING_READERS[field](place, fields[field])
    if mistakes:
        raise UsageError("\n".join(mistakes))
    return fields


def frozen_lines(frozen: Frozen) -> list[str]:
    """What was frozen, and everything that was filled in."""
    corpus = frozen.corpus
    size = f"{len(corpus.requests)} requests, {corpus.prompt_tokens} prompt tokens"
    lines = [f"{corpus.path}: {size}, longest prompt {corpus.longest_prompt}", f"digest {corpus.digest}"]
    if frozen.named:
        lines.append(f"ids assigned by line number: {len(frozen.named)} ({frozen.named[0]} to {frozen.named[-1]})")
    lines.extend(
        f"default {field} = {value} for {count} of {len(corpus.requests)} requests"
        for field, value, count in frozen.defaulted
    )
    lines.extend(f"dropped {field}, which decides no token, from {count} requests" for field, count in frozen.dropped)
    lines.extend(f"seed {seed} derived for request {name}" for name, seed in frozen.seeds[:SEEDS_SHOWN])
    if len(frozen.seeds) > SEEDS_SHOWN:
        lines.append(f"... and {len(frozen.seeds) - SEEDS_SHOWN} more seeds, all in requests.jsonl")
    return [*lines, *([corpus.weak] if corpus.weak else [])]
