"""Text as tokens come: whole characters only, and nothing that may yet turn out to be a stop string.

It does not know tokenizers beyond `decode`. Rules: what was given out is never taken back; all pieces together are
the text of all tokens, cut before the first stop string; the same whether asked token by token or at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
UNFINISHED = "\ufffd"  # what the first bytes of a character decode to


class Detokenizer:
    """Turns tokens into text piece by piece.

    Decodes a window that begins one piece back, as vLLM's detokenizer does, since some decoders treat a text's
    first token differently; a window that ends within a character waits for the rest.
    """

    def __init__(self, decode: Decode) -> None:
        """`decode` gives the text of ids; bytes that are no UTF-8 become U+FFFD."""
        self._decode = decode
        self._window: list[int] = []
        self._read = 0  # tokens of the window whose text was given out

    def push(self, token: int) -> str:
        """The text that became whole with this token."""
        self._window.append(token)
        return self._advance(whole=False)

    def flush(self) -> str:
        """What is left, whole or not."""
        return self._advance(whole=True)

    def _advance(self, *, whole: bool) -> str:
        text = self._decode(self._window)
        if not whole and text.endswith(UNFINISHED):
            return ""
        piece = text[len(self._decode(self._window[: self._read])) :] if self._read else text
        self._window = self._window[self._read :]
        self._read = len(self._window)
        return piece


class Text:
    """One choice's text. `stop` strings end it and are left out, unless `keep_stop`."""

    def __init__(self, decode: Decode, stop: Sequence[str], *, keep_stop: bool) -> None:
        """`decode` gives the text of ids."""
        self._pieces = Detokenizer(decode)
        self._stop = tuple(stop)
        self._keep_stop = keep_stop
        self._seen = ""
        self._given = 0
        self.found: str | None = None  # the stop string that ended the text

    @property
    def length(self) -> int:
        """Characters that became whole so far, given out or held back."""
        return len(self._seen)

    def push(self, token: int) -> str:
        """Text that is certain now."""
        self._add(self._pieces.push(token))
        return self._give(len(self._seen) - self._held())

    def end(self) -> str:
        """The rest, when no token comes any more."""
        self._add(self._pieces.flush())
        return self._give(len(self._seen))

    def _add(self, piece: str) -> None:
        """Takes a piece; cuts at the first stop string and takes nothing after it."""
        if self.found is not None:
            return
        begin = max(0, len(self._seen) - max(map(len, self._stop), default=0))
        self._seen += piece
        places = [(place, stop) for stop in self._stop if (place := self._seen.find(stop, begin)) >= 0]
        if places:
            place, self.found = min(places, key=lambda found: (found[0], len(found[1])))
            self._seen = self._seen[: place + (len(self.found) if self._keep_stop else 0)]

    def _held(self) -> int:
        """Characters at the end that may begin a stop string."""
        if self.found is not None:
            return 0
        longest = max(map(len, self._stop), default=1) - 1
        ends = (self._seen[-count:] for count in range(min(longest, len(self._seen)), 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stop)), 0)

    def _give(self, until: int) -> str:
        piece = self._seen[self._given : until]
        self._given = max(self._given, until)
        return piece
