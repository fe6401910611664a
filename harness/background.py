"""Background traffic: who else is served while the judged requests run, drawn from a seed, in steps of the engine.

It does not know engines or plans. Rules: a background is a function of its shape, its seed and the requests it is made
from, so the name `bursts:3` is the whole of it; it is written down all the same, and a file can be replayed; arrivals
are tied to steps or to each other's progress, never to the clock.

The shapes, over a corpus of ids without meaning:

    steady         a Poisson stream of middling requests
    rush           the very requests of `steady` at three times the rate
    bursts         eight at once, then nothing for a while, three times
    lengths        very long prompts with short answers among short prompts with long answers
    cancellations  a Poisson stream, of which two of three clients leave in mid-stream
    stay           the very stream of `cancellations`, in which nobody leaves
    agents         three agents that come back with the same long prefix and a longer tail, turn after turn
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.corpus.json_lines import MAX_TOKEN_ID, read_request, request_json
from harness.draws import Draws
from harness.errors import CorpusError
from harness.request import Request
from harness.schedule import Arrival
from harness.strict_json import Place, parse_json, raise_mistakes

SCHEMA = 1
SOURCE = "random"  # the corpus backgrounds are made from
NONE = "none"
NAMED = re.compile(r"([a-z]+):([0-9]{1,6})")
FROM_FILE = "file:"
STREAM = 24  # requests of a stream
SAME_DRAWS = {"stay": "cancellations", "rush": "steady"}  # shapes that are made of another's draws
PREFIX, TURN, TURNS = 320, 24, 4  # tokens of an agent's prefix and of what each turn adds, and its turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """Requests and their arrivals; every arrival is a companion's."""

    name: str  # bursts:3
    requests: tuple[Request, ...]
    arrivals: tuple[Arrival, ...]

    def to_json(self) -> dict[str, object]:
        """What is written down, and read again by `read_background`."""
        return {
            "schema": SCHEMA, "name": self.name, "requests": [request_json(one) for one in self.requests],
            "arrivals": [dataclasses.asdict(one) for one in self.arrivals],
        }  # fmt: skip


def background_mistake(value: str) -> str | None:
    """Why `value` names no background, or None."""
    match = NAMED.fullmatch(value)
    if value == NONE or (match and match[1] in SHAPES) or (value.startswith(FROM_FILE) and value.endswith(".json")):
        return None
    return f"expected {NONE!r}, file:PATH.json or SHAPE:SEED such as 'bursts:1' with {', '.join(SHAPES)}; got {value!r}"


def build_background(name: str, source: Sequence[Request]) -> Background:
    """The background `SHAPE:SEED` over requests of at least the shapes' lengths."""
    shape, seed = name.split(":")
    draws = Draws(int(seed), f"background {SAME_DRAWS.get(shape, shape)}")
    parts = _SHAPES[shape](draws, _Prompts(draws, source))
    return Background(name=name, requests=tuple(part[0] for part in parts), arrivals=tuple(part[1] for part in parts))


def read_background(file: Path) -> Background:
    """A background that was written down. Raises CorpusError with everything that is wrong with it."""
    mistakes: list[str] = []
    place = Place(file=file.name, line=0, path="$", mistakes=mistakes)
    try:
        value = parse_json(place, file.read_bytes())
    except OSError as error:
        raise CorpusError(f"background {file}: cannot be read ({error.strerror})") from error
    raise_mistakes(f"background {file}", mistakes)
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise CorpusError(f"background {file}: $.schema: expected {SCHEMA}; write it again with this version")
    items, rows = value.get("requests"), value.get("arrivals")
    if not isinstance(items, list) or not isinstance(rows, list) or not rows:
        raise CorpusError(f"background {file}: expected lists $.requests and $.arrivals, the latter with an entry")
    requests = tuple(
        read_request(place.at(f"requests[{index}]"), item, vocab_size=MAX_TOKEN_ID + 1)
        for index, item in enumerate(items)
    )
    arrivals = [_read_arrival(place.at(f"arrivals[{index}]"), row) for index, row in enumerate(rows)]
    raise_mistakes(f"background {file}", mistakes)
    name = str(value.get("name"))
    return Background(name=name, requests=requests, arrivals=tuple(one for one in arrivals if one is not None))


def _read_arrival(place: Place, row: object) -> Arrival | None:
    names = {field.name for field in dataclasses.fields(Arrival)}
    if not isinstance(row, dict) or set(row) != names:
        place.say(f"expected an object with exactly {', '.join(sorted(names))}")
        return None
    if not isinstance(row["request"], str) or row["companion"] is not True:
        place.say("expected the id of a request, and companion true: a background is never judged")
        return None
    return Arrival(**row)


class _Prompts:
    """Prompts of wanted lengths: ids of the source, cut and joined."""

    def __init__(self, draws: Draws, source: Sequence[Request]) -> None:
        self._draws, self._pool = draws, [token for one in source for token in one.prompt_token_ids]
        self._model = source[0]

    def ids(self, length: int) -> tuple[int, ...]:
        begin = self._draws.below(len(self._pool))
        return tuple(self._pool[(begin + step) % len(self._pool)] for step in range(length))

    def request(self, name: str, prompt: tuple[int, ...], max_tokens: int) -> Request:
        sampling = dataclasses.replace(
            self._model.sampling, temperature=0.0, seed=None, max_tokens=max_tokens, min_tokens=0, n=1, logprobs=0,
            ignore_eos=True, stop=(), stop_token_ids=(), logit_bias=(),
        )  # fmt: skip
        return dataclasses.replace(
            self._model, id=name, prompt_token_ids=prompt, text=None, messages=None, sampling=sampling, grammar=None
        )


_Parts = list[tuple[Request, Arrival]]


def _part(request: Request, step: int, *, leave: int | None = None) -> tuple[Request, Arrival]:
    return request, Arrival(request=request.id, companion=True, at_step=step, cancel_after_tokens=leave)


def _steady(draws: Draws, prompts: _Prompts, apart: float = 3.0) -> _Parts:
    parts, step = [], 0
    for number in range(STREAM):
        prompt = prompts.ids(16 + draws.below(112))
        parts.append(_part(prompts.request(f"steady-{number:02d}", prompt, 8 + draws.below(16)), step))
        step += draws.gap(apart)
    return parts


def _rush(draws: Draws, prompts: _Prompts) -> _Parts:
    return _steady(draws, prompts, apart=1.0)


def _bursts(draws: Draws, prompts: _Prompts) -> _Parts:
    parts, step = [], 0
    for number in range(STREAM):
        prompt = prompts.ids(8 + draws.below(80))
        step = number // 8 * (12 + draws.below(4)) if number % 8 == 0 else step
        parts.append(_part(prompts.request(f"burst-{number:02d}", prompt, 4 + draws.below(12)), step))
    return parts


def _lengths(draws: Draws, prompts: _Prompts) -> _Parts:
    parts, step = [], 0
    for number in range(STREAM):
        is_long = draws.below(4) == 0
        prompt = prompts.ids(300 + draws.below(400) if is_long else 4 + draws.below(16))
        most = 2 + draws.below(3) if is_long else 12 + draws.below(16)
        parts.append(_part(prompts.request(f"{'long' if is_long else 'short'}-{number:02d}", prompt, most), step))
        step += draws.gap(3.0)
    return parts


def _leaving(draws: Draws, prompts: _Prompts) -> _Parts:
    parts, step = [], 0
    for number in range(STREAM):
        request = prompts.request(f"leaves-{number:02d}", prompts.ids(16 + draws.below(112)), 12 + draws.below(12))
        leave = 1 + draws.below(8)
        parts.append(_part(request, step, leave=leave if draws.below(3) else None))
        step += draws.gap(2.0)
    return parts


def _staying(draws: Draws, prompts: _Prompts) -> _Parts:
    return [
        (request, dataclasses.replace(arrival, cancel_after_tokens=None))
        for request, arrival in _leaving(draws, prompts)
    ]


def _agents(draws: Draws, prompts: _Prompts) -> _Parts:
    parts: _Parts = []
    for agent in range(3):
        prompt = prompts.ids(PREFIX)
        for turn in range(TURNS):
            prompt += prompts.ids(TURN)
            request = prompts.request(f"agent-{agent}-{turn}", prompt, 6 + draws.below(6))
            before = f"agent-{agent}-{turn - 1}" if turn else None
            at = 0 if turn else 2 * agent
            parts.append((request, Arrival(request=request.id, companion=True, at_step=at, after=before)))
    return parts


_SHAPES: dict[str, Callable[[Draws, _Prompts], _Parts]] = {
    "steady": _steady,
    "rush": _rush,
    "bursts": _bursts,
    "lengths": _lengths,
    "cancellations": _leaving,
    "stay": _staying,
    "agents": _agents,
}
SHAPES = tuple(_SHAPES)
