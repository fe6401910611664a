"""The judges: whether one output earns its point, by rule. Pure and deterministic.

It does not know captures' files or verdicts. Rules: a point is 0 or 1; every judgement says what it saw; what cannot be
judged earns nothing and says why, it is never left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from harness.evaluation.key import Item

NUMBER = re.compile(r"[-+]?(?:\d[\d,]*)(?:\.\d+)?")
MOST_SHOWN = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What one request got: text, and the logprobs of the first position's candidates by id. `encode` gives ids."""

    text: str
    first: Mapping[int, float]
    encode: Callable[[str], tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One item's point and what earned or lost it."""

    points: int
    saw: str


def judge(item: Item, output: Output) -> Judgement:
    """The judgement of one output. An item for a model judge has no rule: KeyError."""
    return _JUDGES[item.judge](item, output)


def _exact(item: Item, output: Output) -> Judgement:
    return Judgement(points=int(output.text.strip() in item.answers), saw=shown(output.text.strip()))


def _regex(item: Item, output: Output) -> Judgement:
    match = re.search(item.pattern, output.text)
    return Judgement(points=int(match is not None), saw=shown(match[0] if match else output.text))


def _numeric(item: Item, output: Output) -> Judgement:
    found = NUMBER.findall(output.text)
    if not found:
        return Judgement(points=0, saw="no number")
    number = found[-1].replace(",", "")
    return Judgement(points=int(Decimal(number) == Decimal(item.answers[0])), saw=number)


def _choice(item: Item, output: Output) -> Judgement:
    best, saw = likeliest(item.choices, output)
    return Judgement(points=int(best == item.answers[0]), saw=saw)


def likeliest(choices: Sequence[str], output: Output) -> tuple[str | None, str]:
    """The choice whose first token is likeliest at the first position, and its logprob in words, or None and why.

    A tie goes to the choice named first.
    """
    ids = {choice: output.encode(choice)[0] for choice in choices}
    if len(set(ids.values())) < len(ids):
        return None, "two choices begin with the same token in this tokenizer"
    known = {choice: output.first[token] for choice, token in ids.items() if token in output.first}
    if not known:
        return None, "no choice is among the reported candidates"
    best = max(known, key=lambda choice: known[choice])
    return best, f"{best!r} at {known[best]:.6g}"


def _json_schema(item: Item, output: Output) -> Judgement:
    from jsonschema.validators import Draft202012Validator  # type: ignore[import-untyped]

    try:
        value = json.loads(output.text)
    except ValueError as error:
        return Judgement(points=0, saw=f"no JSON: {error}")
    mistakes = sorted(error.message for error in Draft202012Validator(item.schema).iter_errors(value))
    return Judgement(points=int(not mistakes), saw=shown(mistakes[0]) if mistakes else "valid")


def shown(text: str) -> str:
    """A text as a judgement shows it, cut where it is long."""
    return repr(text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 1] + "…")


_JUDGES: dict[str, Callable[[Item, Output], Judgement]] = {
    "exact": _exact,
    "regex": _regex,
    "numeric": _numeric,
    "choice": _choice,
    "json_schema": _json_schema,
}
