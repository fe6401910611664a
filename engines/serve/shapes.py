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
    return {
        "text_offset": list(piece.offsets),
        "token_logprobs": [position.logprob for position in piece.positions],
        "tokens": [shape.names.name(position.token) for position in piece.positions],
        "top_logprobs": [_by_name(position, shape.names) for position in piece.positions],
    }


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
