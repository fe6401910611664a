"""What a choice is made of: pieces of text with the positions they came from. It knows no JSON shape.

Rules: the token that ends a choice (end of sequence or a stop id) is reported and not part of the text, unless the
request asks for it; offsets count characters of the text as it was generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engines.bundled.request import Sampling
from engines.bundled.sequence import FinishReason, Position
from engines.serve.bridge import Delta
from engines.serve.text import Decode, Text


class Piece(NamedTuple):
    """A part of one choice, or the whole."""

    text: str
    positions: tuple[Position, ...]
    offsets: tuple[int, ...]  # characters of text before each position's token
    finish: FinishReason | None
    stop_reason: str | int | None  # the stop string or stop id that ended it, None for any other end


class Choice:
    """One choice under way: turns what the engine reports into pieces."""

    def __init__(self, decode: Decode, sampling: Sampling, *, keep_stop: bool) -> None:
        """`keep_stop` leaves the stop string, or the text of the token that ended the choice, in the text."""
        self._text = Text(decode, sampling.stop, keep_stop=keep_stop)
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._keep_stop = keep_stop
        self._decode = decode
        self._sampling = sampling

    def take(self, delta: Delta, eos: frozenset[int]) -> Piece:
        """The piece a delta brings; `eos` are the model's end-of-sequence ids."""
        text, offsets = "", []
        ends = eos if not self._sampling.ignore_eos else frozenset[int]()
        for index, position in enumerate(delta.positions):
            offsets.append(self._text.length)
            last = delta.finish == "stop" and index == len(delta.positions) - 1
            if not (last and position.token in self._stop_ids | ends) or self._keep_stop:
                text += self._text.push(position.token)
        if delta.finish is not None:
            text += self._text.end()
        return Piece(text, delta.positions, tuple(offsets), delta.finish, self._stop_reason(delta))

    def _stop_reason(self, delta: Delta) -> str | int | None:
        if delta.finish != "stop":
            return None
        last = delta.positions[-1].token
        return last if last in self._stop_ids else self._text.found


def join(pieces: Sequence[Piece]) -> Piece:
    """All pieces of one choice as one."""
    return Piece(
        "".join(piece.text for piece in pieces),
        tuple(position for piece in pieces for position in piece.positions),
        tuple(offset for piece in pieces for offset in piece.offsets),
        pieces[-1].finish,
        pieces[-1].stop_reason,
    )


class Names:
    """How tokens are written: as their own text, or as `token_id:N` where the request asks for it."""

    def __init__(self, decode: Decode, *, as_ids: bool) -> None:
        """`decode` gives the text of ids."""
        self._decode = decode
        self._as_ids = as_ids

    def name(self, token: int) -> str:
        """The token as a string. Pieces of characters all read U+FFFD: only ids tell them apart."""
        return id_name(token) if self._as_ids else self._decode([token])

    def spell(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """The text of ids, and how many characters of it are whole before each."""
        text, offsets, written = Text(self._decode, (), keep_stop=False), [], ""
        for token in ids:
            offsets.append(text.length)
            written += text.push(token)
        return written + text.end(), offsets

    def octets(self, token: int) -> list[int] | None:
        """The token's bytes in UTF-8; None where its text alone is no valid UTF-8."""
        text = self._decode([token])
        return None if "\ufffd" in text else list(text.encode())


def id_name(token: int) -> str:
    """vLLM's way of writing an id as a string."""
    return f"token_id:{token}"
