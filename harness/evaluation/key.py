"""The answer key of a corpus: one rule per request, read from `answers.json` beside its requests.

It does not know captures. Rules: unknown judges and keys are errors; all mistakes come at once; a key names the digest
of its corpus, and one that was made for another, names a request the corpus lacks, or leaves one out, is none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Literal

from harness.errors import CorpusError
from harness.strict_json import Place, parse_json, raise_mistakes, read_choice, read_string

SCHEMA = 1
ANSWERS = "answers.json"
JudgeName = Literal["exact", "regex", "numeric", "choice", "json_schema", "model"]
JUDGES: tuple[JudgeName, ...] = ("exact", "regex", "numeric", "choice", "json_schema", "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One request's rule. Which fields count follows from the judge; the others are empty.

    exact: one of `answers`, but for white space at the ends; regex: `pattern` is found; numeric: the last number equals
    the first of `answers`; choice: of `choices`, texts that begin the output, the first token of `answers`[0] has the
    largest logprob at the first position; json_schema: the output is JSON that satisfies `schema`; model: no rule, a
    model judge decides, who is shown `answers`.
    """

    request: str
    judge: JudgeName
    answers: tuple[str, ...] = ()
    pattern: str = ""
    choices: tuple[str, ...] = ()
    schema: object = None

    @property
    def by_rule(self) -> bool:
        """Whether a rule can score it."""
        return self.judge != "model"


def read_key(file: Path, corpus: str, requests: Sequence[str]) -> tuple[Item, ...]:
    """The key in the order of the requests; `corpus` is the digest of theirs.

    Raises CorpusError with everything that is wrong with it.
    """
    what, mistakes = f"answer key {file}", list[str]()
    place = Place(file=file.name, line=0, path="$", mistakes=mistakes)
    try:
        value = parse_json(place, file.read_bytes())
    except OSError as error:
        raise CorpusError(f"{what}: cannot be read ({error.strerror}); a key lies beside its corpus") from error
    raise_mistakes(what, mistakes)
    if not isinstance(value, dict) or value.get("schema") != SCHEMA or not isinstance(value.get("items"), list):
        raise CorpusError(f"{what}: expected {{'schema': {SCHEMA}, 'corpus': DIGEST, 'items': [...]}}")
    if value.get("corpus") != corpus:
        found = value.get("corpus")
        raise CorpusError(
            f"{what}: $.corpus: expected the corpus's digest {corpus}, found {found!r}; check the answers"
        )
    items = [_read_item(place.at("items").at(index), row) for index, row in enumerate(value["items"])]
    raise_mistakes(what, mistakes)
    found = {item.request: item for item in items if item is not None}
    if len(found) != len(items) or set(found) != set(requests):
        lacking = sorted(set(requests) - set(found)) or sorted(set(found) - set(requests)) or ["a request twice"]
        raise CorpusError(f"{what}: expected one item for each request of the corpus; see {', '.join(lacking[:5])}")
    return tuple(found[name] for name in requests)


def _read_item(place: Place, row: object) -> Item | None:
    if not isinstance(row, dict):
        place.mistake("an object", row)
        return None
    request = read_string(place.at("request"), row.get("request"))
    judge = read_choice(place.at("judge"), row.get("judge"), JUDGES)
    if judge not in _READERS:
        return None
    reader, keys = _READERS[judge]
    for key in sorted(set(row) - {"request", "judge", *keys}):
        place.at(key).say(f"unknown key for judge {judge}; it takes {', '.join(keys)}")
    for key in sorted(set(keys) - set(row)):
        place.say(f"judge {judge} needs {key!r}")
    return reader(place, request, row) if set(keys) <= set(row) else None


def _strings(place: Place, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
        place.mistake("a list of non-empty strings", value)
        return ()
    return tuple(value)


def _exact(place: Place, request: str, row: dict[str, object]) -> Item:
    return Item(request=request, judge="exact", answers=_strings(place.at("answers"), row["answers"]))


def _model(place: Place, request: str, row: dict[str, object]) -> Item:
    return Item(request=request, judge="model", answers=_strings(place.at("answers"), row["answers"]))


def _regex(place: Place, request: str, row: dict[str, object]) -> Item:
    pattern = read_string(place.at("pattern"), row["pattern"])
    try:
        re.compile(pattern)
    except re.error as error:
        place.at("pattern").say(f"no regular expression: {error}")
    return Item(request=request, judge="regex", pattern=pattern)


def _numeric(place: Place, request: str, row: dict[str, object]) -> Item:
    answer = read_string(place.at("answer"), row["answer"])
    try:
        Decimal(answer)
    except InvalidOperation:
        place.at("answer").mistake("a decimal number as a string", answer)
    return Item(request=request, judge="numeric", answers=(answer,))


def _choice(place: Place, request: str, row: dict[str, object]) -> Item:
    choices, answer = _strings(place.at("choices"), row["choices"]), read_string(place.at("answer"), row["answer"])
    if choices and answer not in choices:
        place.at("answer").mistake(f"one of the choices {', '.join(map(repr, choices))}", answer)
    return Item(request=request, judge="choice", answers=(answer,), choices=choices)


def _json_schema(place: Place, request: str, row: dict[str, object]) -> Item:
    from jsonschema.exceptions import SchemaError  # type: ignore[import-untyped]
    from jsonschema.validators import Draft202012Validator  # type: ignore[import-untyped]

    try:
        Draft202012Validator.check_schema(row["schema"])
    except SchemaError as error:
        place.at("schema").say(f"no JSON schema: {error.message}")
    return Item(request=request, judge="json_schema", schema=row["schema"])


_READERS: dict[str, tuple[Callable[[Place, str, dict[str, object]], Item], tuple[str, ...]]] = {
    "exact": (_exact, ("answers",)),
    "regex": (_regex, ("pattern",)),
    "numeric": (_numeric, ("answer",)),
    "choice": (_choice, ("choices", "answer")),
    "json_schema": (_json_schema, ("schema",)),
    "model": (_model, ("answers",)),
}
