"""What the first rank and the others say to each other beside collectives: short JSON lines over pipes.

It does not know models. Rules: one line, one message; a line is far shorter than a pipe's buffer, so that writing
never waits for a process that has stopped; arrays go through the group, which has deadlines; a closed pipe is an
answer too.
"""

from __future__ import annotations

import json
import os
import selectors
import time
from collections.abc import Mapping
from typing import IO

import numpy as np

from engines.bundled.batch import StepBatch
from engines.bundled.config import Int32
from engines.bundled.errors import RankError

Message = Mapping[str, object]


class CollectiveError(RankError):
    """A collective that did not come about: some rank is gone or silent. The first rank finds out which."""


class Silence(Exception):  # noqa: N818 - an event, not a fault of the caller
    """No answer by the deadline."""


def write_line(stream: IO[bytes], message: Message) -> None:
    """Writes one message. Raises BrokenPipeError when nobody reads any more."""
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


class Lines:
    """Messages from a pipe."""

    def __init__(self, stream: IO[bytes]) -> None:
        """`stream` is unbuffered."""
        self._stream = stream
        self._buffer = b""

    def read(self, deadline_s: float | None) -> Message | None:
        """The next message, None at the end. Raises Silence when none came within `deadline_s`."""
        limit = None if deadline_s is None else time.monotonic() + deadline_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._stream, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                left = None if limit is None else max(0.0, limit - time.monotonic())
                if not selector.select(left):
                    raise Silence
                chunk = os.read(self._stream.fileno(), 1 << 16)
                if not chunk:
                    return None
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: Message = json.loads(line)
        return message


def flatten(batch: StepBatch) -> tuple[list[int], Int32]:
    """Sizes (tokens, sequences, pages per sequence, wanted) and every number of a step in one array."""
    sizes = [len(batch.token), *batch.page_table.shape, len(batch.wanted)]
    parts = (batch.token, batch.sequence, batch.position, batch.page_table.reshape(-1), batch.wanted)
    return sizes, np.concatenate(parts)


def empty_step(sizes: list[int]) -> Int32:
    """Room for the numbers of a step of these sizes."""
    tokens, sequences, pages, wanted = sizes
    return np.empty(3 * tokens + sequences * pages + wanted, np.int32)


def unflatten(sizes: list[int], numbers: Int32) -> StepBatch:
    """The step that `flatten` took apart."""
    tokens, sequences, pages, wanted = sizes
    token, sequence, position, table, last = np.split(numbers, np.cumsum([tokens, tokens, tokens, sequences * pages]))
    if len(last) != wanted:
        raise ValueError(f"step: expected {wanted} wanted rows, got {len(last)}")
    return StepBatch(
        token=token, sequence=sequence, position=position, page_table=table.reshape(sequences, pages), wanted=last
    )
