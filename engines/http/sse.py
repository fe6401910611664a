"""Server-sent events from bytes as they arrive. It knows no HTTP and no JSON.

Rules: only whole events come out; comments, names and ids of events are left aside, for no server here carries
evidence in them; a stream that ends inside an event is not whole. Format: WHATWG HTML, section 9.2.
"""

from __future__ import annotations

DONE = b"[DONE]"


class EventParser:
    """Feeds on bytes, gives the data of each finished event."""

    def __init__(self) -> None:
        """Empty."""
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that `chunk` completes, lines of one event joined by a newline."""
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        found: list[bytes] = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            elif line in (b"", b"\r") and self._data:
                found.append(b"\n".join(self._data))
                self._data = []
        return found

    @property
    def is_between_events(self) -> bool:
        """False when the bytes so far end inside an event."""
        return not self._data and not self._rest.strip()
