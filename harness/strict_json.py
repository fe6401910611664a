"""Strict reading of JSON values: every mistake is noted with its place, and reading goes on to the next one.

It does not know requests or corpora. Rules: nothing is coerced (a string is no number, true is no integer);
a key that nobody asked for is a mistake; so is a key given twice; NaN and infinity are never numbers; a
value that is absent is reported once, by the object it is absent from.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from harness.errors import CorpusError
from harness.suggest import did_you_mean

SHOWN = 50  # mistakes printed of one file; the rest is counted
QUOTED = 60  # characters of a wrong value that are quoted back


class Missing:
    """The type of `MISSING`: what a reader is handed for a key that is not there."""


MISSING: Final = Missing()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a value stands, as `file:line $.path`. Mistakes of one reading share the list `mistakes`."""

    file: str
    line: int  # counted from 1; 0 when the value is the whole file
    path: str
    mistakes: list[str]

    def at(self, key: str | int) -> Place:
        """The place of one member of the object, or item of the list, that stands here."""
        step = f"[{key}]" if isinstance(key, int) else f".{key}"
        return Place(file=self.file, line=self.line, path=self.path + step, mistakes=self.mistakes)

    def mistake(self, expected: str, found: object, remedy: str = "") -> None:
        """Notes what was expected here, what was found, and what to do about it."""
        self.say(f"expected {expected}, found {quoted(found)}" + (f"; {remedy}" if remedy else ""))

    def say(self, sentence: str) -> None:
        """Notes a mistake in its own words."""
        where = f"{self.file}:{self.line}" if self.line else self.file
        self.mistakes.append(f"{where} {self.path}: {sentence}")


def raise_mistakes(what: str, mistakes: Sequence[str]) -> None:
    """Raises one CorpusError that lists `mistakes`, or returns when there are none."""
    if not mistakes:
        return
    if len(mistakes) == 1:
        raise CorpusError(f"{what}: {mistakes[0]}")
    rest = [f"... and {len(mistakes) - SHOWN} more"] if len(mistakes) > SHOWN else []
    listed = "\n".join(f"  {line}" for line in [*mistakes[:SHOWN], *rest])
    raise CorpusError(f"{what}: {len(mistakes)} mistakes\n{listed}")


def quoted(value: object) -> str:
    """A wrong value as an error shows it: its JSON, shortened, and its type."""
    if value is MISSING:
        return "nothing"
    if value is None:
        return "null"
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = text if len(text) <= QUOTED else f"{text[: QUOTED - 3]}..."
    return f"{text} ({type(value).__name__})"


def parse_json(place: Place, raw: bytes) -> object:
    """The JSON value in `raw` (UTF-8), or MISSING after noting why there is none."""
    twice: list[str] = []

    def members(pairs: list[tuple[str, object]]) -> dict[str, object]:
        counts = Counter(name for name, _ in pairs)
        twice.extend(sorted(name for name, count in counts.items() if count > 1))
        return dict(pairs)

    try:
        value: object = json.loads(raw.decode("utf-8"), object_pairs_hook=members)
    except UnicodeDecodeError as error:
        place.say(f"expected UTF-8, found byte 0x{raw[error.start]:02x} at byte {error.start}; save it as UTF-8")
        return MISSING
    except (
        ValueError,
        RecursionError,
    ) as error:  # malformed, a number of thousands of digits, nested too deep
        place.say(f"expected one JSON value, found {quoted(raw[:40].decode('utf-8', 'replace'))} ({error})")
        return MISSING
    for name in twice:
        place.say(f"the key {name!r} appears twice in one object; keep one")
    return value


def read_object(
    place: Place, value: object, *, required: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, object]:
    """Every required member (MISSING where absent) and the optional ones that are there.

    Missing and unknown keys are noted, the latter with a "did you mean".
    """
    known = (*required, *optional)
    members = value if isinstance(value, dict) else {}
    if value is not members and value is not MISSING:
        place.mistake("an object", value)
    elif value is members:
        for key in [key for key in members if key not in known]:
            place.at(key).say(f"unknown key; {did_you_mean(key, known)}")
        for key in [key for key in required if key not in members]:
            place.at(key).say("required key is missing; add it")
    absent = dict.fromkeys(required, MISSING)
    return {**absent, **{key: members[key] for key in known if key in members}}


def read_integer(place: Place, value: object, *, low: int, high: int | None = None) -> int:
    """An integer from `low` to `high`, both included; `low` after a noted mistake."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high):
        return value
    if value is not MISSING:
        place.mistake(f"an integer {bounds(low, high)}", value)
    return low


def read_number(
    place: Place, value: object, *, low: float = -math.inf, high: float = math.inf, above: bool = False
) -> float:
    """A finite number from `low` to `high`, `low` itself excluded if `above`; 1.0 after a noted mistake."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = as_float(value)
        if math.isfinite(number) and low <= number <= high and not (above and number == low):
            return number + 0.0  # -0.0 becomes 0.0
    if value is not MISSING:
        place.mistake(f"a finite number {bounds(low, high, above=above)}".rstrip(), value)
    return 1.0


def as_float(value: float) -> float:
    """The float nearest to a JSON number; infinity for an integer beyond float range."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def bounds(low: float, high: float | None, *, above: bool = False) -> str:
    """A range in words; empty when there is no bound."""
    lower = "" if low == -math.inf else f"above {low:g}" if above else f"of at least {low:g}"
    upper = "" if high is None or high == math.inf else f"at most {high:g}" if high < 1e6 else f"at most {high}"
    return " and ".join(part for part in (lower, upper) if part)


def read_string(place: Place, value: object, *, empty: bool = False) -> str:
    """A string that can be stored as UTF-8; one that is empty only where that is allowed."""
    if isinstance(value, str) and (value or empty):
        if not any("\ud800" <= character <= "\udfff" for character in value):
            return value
        place.say("the text holds half of a surrogate pair, which is no Unicode character; remove or repair it")
    elif value is not MISSING:
        place.mistake("a string" if empty else "a string that is not empty", value)
    return ""


def read_choice(place: Place, value: object, choices: Sequence[str]) -> str:
    """One of `choices`; the first of them after a noted mistake."""
    if isinstance(value, str) and value in choices:
        return value
    if value is not MISSING:
        place.mistake(f"one of {', '.join(repr(choice) for choice in choices)}", value)
    return choices[0]


def read_flag(place: Place, value: object) -> bool:
    """true or false."""
    if isinstance(value, bool):
        return value
    if value is not MISSING:
        place.mistake("true or false", value)
    return False


def read_items(place: Place, value: object, *, empty: bool = True) -> list[tuple[Place, object]]:
    """The items of a list, each with its place."""
    if isinstance(value, list) and (value or empty):
        return [(place.at(index), item) for index, item in enumerate(value)]
    if value is not MISSING:
        place.mistake("a list" if empty else "a list that is not empty", value)
    return []
