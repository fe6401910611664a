"""The census as one self-contained HTML page and as a table for terminals. It reads the record (`census.json`) alone.

Rules: escaping by the template engine, no script, nothing loaded; what is left out of a picture is said to be; a text
is shown with its invisible characters written out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path

from harness.errors import StoreError

SCHEMA = 1
MOST_BRANCHES = 120  # of one prompt's tree that are drawn
MOST_TEXT = 90  # characters of a branch that are shown
MOST_LINES = 12  # branches of one prompt that a terminal shows
WIDE = 150  # columns where the output is no terminal
STATUS = {0: "good", 1: "bad", 3: "open"}


def write_census_report(record: Mapping[str, object], folder: Path) -> None:
    """Writes census.html, whole or not at all. Raises StoreError for another schema, OutputError."""
    from reports.writing import write_whole

    write_whole(folder / "census.html", render_census(record))


def render_census(record: Mapping[str, object]) -> str:
    """The page as text. Raises StoreError for another schema."""
    from reports.html import template

    _check(record)
    prompts = [dict(one, where=where(one), drawn=_drawn(one), share=share(one["modal"])) for one in _prompts(record)]
    status = STATUS.get(int(str(record["exit_code"])), "open")
    return template("census.html.j2").render(census=record, prompts=prompts, status=status, share=share)


def census_table(record: Mapping[str, object], width: int | None = None) -> str:
    """One row per prompt, trees of those that part, company, limits, sentence. Raises StoreError: another schema."""
    from rich.console import Console
    from rich.table import Table

    _check(record)
    seeded = any(one["seeds"] is not None for one in _prompts(record))
    table = Table(box=None, pad_edge=False)
    for name in ("prompt", "tokens", "distinct", "modal share", "first divergence"):
        table.add_column(name, justify="right" if name in ("tokens", "distinct") else "left", overflow="fold")
    if seeded:
        table.add_column("seeds that agreed twice", overflow="fold")
    for one in _prompts(record):
        cells = [str(one["prompt"]), str(one["prompt_tokens"]), str(one["distinct"]), share(one["modal"]), where(one)]
        table.add_row(*cells, *([share(one["seeds"])] if seeded else []))
    out = StringIO()
    Console(file=out, width=width or WIDE, no_color=True, markup=False).print(table)
    company = record["company"]
    lines = [out.getvalue().rstrip(), *(line for one in _prompts(record) for line in _tree_lines(one))]
    lines += [str(company["sentence"])] if isinstance(company, Mapping) else ["the engine shows no steps"]
    lines += [f"! {cap}" for cap in _list(record["caps"])]
    return "\n".join([*lines, str(record["sentence"])])


def _tree_lines(prompt: Mapping[str, object]) -> list[str]:
    """Where one prompt's paths part, for terminals; nothing for one that has one path."""
    drawn = _drawn(prompt)
    branches = [branch for branch in _list(drawn["branches"]) if isinstance(branch, Mapping)]
    if len(branches) < 2:
        return []
    lines = [f"{prompt['prompt']}: where paths part"]
    for branch in branches[:MOST_LINES]:
        text = branch["shown"] or ("(no token in common)" if branch["depth"] == 0 else "(ends here)")
        lines.append(f"{'  ' * (int(branch['depth']) + 1)}{branch['count']} x from token {branch['start']}: {text}")
    more = len(_list(prompt["tree"])) - len(lines) + 1
    return [*lines, f"  {more} further branches are in census.json"] if more > 0 else lines


def share(value: object) -> str:
    """`199/200 (0.995, interval 0.97 to 1.00)`; `not asked` for None."""
    if not isinstance(value, Mapping):
        return "not asked"
    count, total = int(value["count"]), int(value["total"])
    low, high = value["interval"]
    return f"{count}/{total} ({count / total:.3f}, interval {low:.3f} to {high:.3f})"


def where(prompt: Mapping[str, object]) -> str:
    """Where its completions first part, and how close the choice was."""
    if prompt["first_divergence"] is None:
        return "never"
    gap = prompt["gap"]
    closeness = "" if gap is None else f", gap {float(str(gap)):.2g} nats"
    return f"token {prompt['first_divergence']}, {prompt['margin']}{closeness}"


def _drawn(prompt: Mapping[str, object]) -> dict[str, object]:
    """The branches that are drawn, with their text cut in the middle, and how many are not."""
    branches = [branch for branch in _list(prompt["tree"]) if isinstance(branch, Mapping)]
    shown = [dict(branch, shown=_shorten(str(branch["text"]))) for branch in branches[:MOST_BRANCHES]]
    return {"branches": shown, "more": len(branches) - len(shown)}


def _shorten(text: str) -> str:
    visible = text.encode("unicode_escape").decode("ascii") if not text.isprintable() else text
    if len(visible) <= MOST_TEXT:
        return visible
    half = MOST_TEXT // 2
    return f"{visible[:half]} … {visible[-half:]}"


def _check(record: Mapping[str, object]) -> None:
    if record.get("schema") != SCHEMA:
        raise StoreError(f"census.json: $.schema: expected {SCHEMA}, found {record.get('schema')!r}; take a new census")


def _prompts(record: Mapping[str, object]) -> list[Mapping[str, object]]:
    return [one for one in _list(record["prompts"]) if isinstance(one, Mapping)]


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, Sequence) else ()
