"""A corpus as people look at it: digest, prompt lengths, sampling, a sample of its requests.

It does not judge. Rules: control characters and line feeds of a prompt are shown as escapes; text that
looks like markup is printed as it is; a weak corpus says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from rich.markup import escape

from harness.request import Request, Sampling

if TYPE_CHECKING:
    from rich.console import Console

    from harness.corpus import Corpus

PROMPT_CHARACTERS: Final = 60
BAR: Final = 40  # characters of a bar that stands for all requests, where they are more than that
BINS: Final = (16, 32, 64, 128, 200, 256, 512, 1024)  # prompt tokens, upper bounds not included


def filtered(sampling: Sampling) -> bool:
    """Whether candidates are cut off by rank or probability."""
    return sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0


def penalised(sampling: Sampling) -> bool:
    """Whether earlier tokens change later ones beyond the model itself."""
    return sampling.repetition_penalty != 1 or bool(sampling.frequency_penalty or sampling.presence_penalty)


MIX: Final[tuple[tuple[str, Callable[[Request], bool]], ...]] = (
    ("greedy (temperature 0)", lambda request: request.sampling.temperature == 0),
    ("seeded (temperature above 0)", lambda request: request.sampling.temperature > 0),
    ("top-p, top-k or min-p", lambda request: filtered(request.sampling)),
    ("penalties", lambda request: penalised(request.sampling)),
    ("logit bias", lambda request: bool(request.sampling.logit_bias)),
    ("grammar", lambda request: request.grammar is not None),
    ("images", lambda request: bool(request.images)),
    ("messages", lambda request: request.messages is not None),
    ("token ids only", lambda request: request.messages is None and request.text is None),
)


def show(corpus: Corpus, sample: int, console: Console) -> None:
    """Prints a corpus; tables are drawn for the console's width."""
    tokenizer = f"{escape(corpus.tokenizer.name)} {corpus.tokenizer.digest}"
    lines = [
        f"[bold]{escape(corpus.name)}[/bold]  {escape(corpus.description)}",
        f"from       {escape(corpus.origin)}",
        f"digest     {corpus.digest}",
        f"tokenizer  {tokenizer}, {corpus.tokenizer.vocab_size} ids",
        *([f"[yellow]{escape(corpus.weak)}[/yellow]"] if corpus.weak else []),
    ]
    for line in lines:
        console.print(line, soft_wrap=True)
    print_lengths(corpus, console)
    print_sampling(corpus, console)
    print_sample(corpus, sample, console)


def print_lengths(corpus: Corpus, console: Console) -> None:
    """A histogram of prompt lengths."""
    lengths = sorted(len(request.prompt_token_ids) for request in corpus.requests)
    console.print(
        f"\n{len(lengths)} prompts, {sum(lengths)} tokens: "
        f"shortest {lengths[0]}, median {lengths[len(lengths) // 2]}, longest {lengths[-1]}"
    )
    for label, count in length_bins(lengths):
        bar = "#" * max(1, round(count * BAR / max(BAR, len(lengths))))
        console.print(f"  {label:>9} tokens {bar} {count}")


def length_bins(lengths: Sequence[int]) -> list[tuple[str, int]]:
    """(range, count) for every bin that holds a prompt."""
    edges = (0, *BINS)
    bins = []
    for low, high in zip(edges, (*BINS, None), strict=True):
        count = sum(low <= length and (high is None or length < high) for length in lengths)
        label = f"{low}+" if high is None else f"{low}-{high - 1}"
        bins.append((label, count))
    return [(label, count) for label, count in bins if count]


def print_sampling(corpus: Corpus, console: Console) -> None:
    """How many requests use what."""
    console.print()
    for label, holds in MIX:
        count = sum(holds(request) for request in corpus.requests)
        if count:
            console.print(f"  {label:<28} {count}")
    for field in ("max_tokens", "logprobs"):
        values = sorted({getattr(request.sampling, field) for request in corpus.requests})
        console.print(f"  {field:<28} {', '.join(str(value) for value in values)}")


def print_sample(corpus: Corpus, sample: int, console: Console) -> None:
    """The first `sample` requests, one line each, cut at the console's width."""
    rows = [
        (request.id, str(len(request.prompt_token_ids)), sampled(request), prompt(request))
        for request in corpus.requests[:sample]
    ]
    rows = [("id", "tokens", "sampling", "prompt"), *rows] if rows else []
    widths = [max(len(row[column]) for row in rows) for column in range(3)] if rows else []
    console.print()
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)]
        console.print(escape("  ".join([*cells, row[3]])), no_wrap=True, overflow="ellipsis", crop=True)


def sampled(request: Request) -> str:
    """Temperature and seed in a few words."""
    sampling = request.sampling
    return "greedy" if sampling.temperature == 0 else f"T {sampling.temperature:g} seed {sampling.seed}"


def prompt(request: Request) -> str:
    """The beginning of a prompt on one line."""
    if request.messages is not None:
        text = " ".join(f"[{message.role}] {message.content}" for message in request.messages)
    else:
        text = request.text or " ".join(str(token) for token in request.prompt_token_ids[:20])
    line = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
    return line if len(line) <= PROMPT_CHARACTERS else f"{line[: PROMPT_CHARACTERS - 3]}..."
