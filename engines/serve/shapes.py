"""The JSON of choices in both APIs. It knows no server and no engine beyond a position.

Rules: the keys are OpenAI's, additions are vLLM's; a float32 log-probability becomes the JSON number of equal value,
which every reader of doubles turns back into the same float32; nothing is rounded.
"""

from __future__ import annotations

from typing import NamedTuple

from engines.bundled.sequence import Position
from engines.serve.parameters import Wanted
from engines.serve.pieces import Names, Piece, id_name

Json = dict[str, object]


class Shape(NamedTuple):
    """What one request wants to see of each choice."""

    wanted: Wanted
    names: Names
    token_ids: bool
    prompt_top: int | None  # candidates per token of the prompt; None: its log-probabilities are not shown


class Prompt(NamedTuple):
    """A prompt's ids, and what scoring found from the second token on: nothing where it was not asked for."""

    ids: tuple[int, ...]
    positions: tuple[Position, ...]


def completion_choice(index: int, piece: Piece, shape: Shape, prompt: tuple[int, ...] | None) -> Json:
    """A choice of /v1/completions, whole or a piece of it. `prompt` goes in where it is given."""
    choice: Json = {
        "index": index,
        "text": piece.text,
        "logprobs": completion_logprobs(piece, shape) if shape.wanted.logprobs else None,
        "finish_reason": piece.finish,
        "stop_reason": piece.stop_reason,
    }
    if shape.token_ids:
        choice["token_ids"] = [position.token for position in piece.positions]
        choice |= {} if prompt is None else {"prompt_token_ids": list(prompt)}
    return choice


def chat_choice(index: int, piece: Piece, shape: Shape) -> Json:
    """A whole choice of /v1/chat/completions."""
    return _chat(index, piece, shape, {"message": {"role": "assistant", "content": piece.text, "refusal": None}})


def chat_chunk(index: int, piece: Piece, shape: Shape) -> Json:
    """A piece of a choice of /v1/chat/completions."""
    return _chat(index, piece, shape, {"delta": {"content": piece.text}})


def chat_opening(index: int) -> Json:
    """The first chunk of each choice: who speaks."""
    return {
        "index": index,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
        "stop_reason": None,
    }


def _chat(index: int, piece: Piece, shape: Shape, content: Json) -> Json:
    choice: Json = {
        "index": index,
        **content,
        "logprobs": chat_logprobs(piece, shape) if shape.wanted.logprobs else None,
        "finish_reason": piece.finish,
        "stop_reason": piece.stop_reason,
    }
    return choice | ({"token_ids": [position.token for position in piece.positions]} if shape.token_ids else {})


def completion_logprobs(piece: Piece, shape: Shape) -> Json:
    """Parallel lists; the chosen token is always among `top_logprobs`, which then has k or k + 1 entries."""
    lists = _completion_lists(piece, shape)
    return {
        "text_offset": lists.offsets,
        "token_logprobs": lists.logprobs,
        "tokens": lists.tokens,
        "top_logprobs": lists.top,
    }


class _Lists(NamedTuple):
    offsets: list[int]
    logprobs: list[float]
    tokens: list[str]
    top: list[dict[str, float]]


def _completion_lists(piece: Piece, shape: Shape) -> _Lists:
    return _Lists(
        list(piece.offsets),
        [position.logprob for position in piece.positions],
        [shape.names.name(position.token) for position in piece.positions],
        [_by_name(position, shape.names) for position in piece.positions],
    )


def prompt_logprobs(prompt: Prompt, shape: Shape) -> list[dict[str, Json] | None]:
    """vLLM's shape: per token null (the first) or entries by id, the token itself first.

    `rank` counts from 1 among the candidates asked for; null for a token that is none of them.
    """
    entries: list[dict[str, Json] | None] = [None]
    for position in prompt.positions:
        top = _top(position)[: shape.prompt_top]
        ranks = {token: rank for rank, (token, _) in enumerate(top, 1)}
        pairs = {position.token: position.logprob, **dict(top)}
        entries.append(
            {
                str(token): {"logprob": logprob, "rank": ranks.get(token), "decoded_token": shape.names.name(token)}
                for token, logprob in pairs.items()
            }
        )
    return entries


def echoed(piece: Piece, prompt: Prompt, shape: Shape) -> Json:
    """Text and log-probabilities of a choice of /v1/completions with the prompt before them; its first has none."""
    text, offsets = shape.names.spell(prompt.ids)
    changed: Json = {"text": text + piece.text}
    if shape.wanted.logprobs:
        k = shape.wanted.top
        positions = [
            one._replace(topk_ids=one.topk_ids[:k], topk_logprobs=one.topk_logprobs[:k]) for one in prompt.positions
        ]
        moved = piece._replace(offsets=tuple(len(text) + offset for offset in piece.offsets))
        spoken = _completion_lists(moved, shape)
        changed["logprobs"] = {
            "text_offset": offsets + spoken.offsets,
            "token_logprobs": [None, *(one.logprob for one in positions), *spoken.logprobs],
            "tokens": [shape.names.name(token) for token in prompt.ids] + spoken.tokens,
            "top_logprobs": [None, *(_by_name(one, shape.names) for one in positions), *spoken.top],
        }
    return changed


def _by_name(position: Position, names: Names) -> dict[str, float]:
    """Candidates by name, best first; one whose name is taken already is named by its id, so that none is lost."""
    result: dict[str, float] = {}
    for token, logprob in _candidates(position):
        name = names.name(token)
        result[id_name(token) if name in result else name] = logprob
    return result


def _candidates(position: Position) -> list[tuple[int, float]]:
    pairs = _top(position)
    chosen = (position.token, position.logprob)
    return pairs if chosen[0] in [token for token, _ in pairs] else [*pairs, chosen]


def _top(position: Position) -> list[tuple[int, float]]:
    return [(int(t), float(p)) for t, p in zip(position.topk_ids, position.topk_logprobs, strict=True)]


def chat_logprobs(piece: Piece, shape: Shape) -> Json:
    """One entry per token, each with its k best candidates."""
    return {"content": [_entry(position, shape.names) for position in piece.positions], "refusal": None}


def _entry(position: Position, names: Names) -> Json:
    top = [_named(token, logprob, names) for token, logprob in _top(position)]
    return {**_named(position.token, position.logprob, names), "top_logprobs": top}


def _named(token: int, logprob: float, names: Names) -> Json:
    return {"token": names.name(token), "logprob": logprob, "bytes": names.octets(token)}
