"""One order on the engine, seen from asyncio: pieces arrive as the engine makes them.

It does not know JSON. Rules: the event loop never waits for the engine, only for events; `release` may be called at
any time and more than once, and gives back whatever the order still holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from engines.bundled.sequence import Position
from engines.bundled.tokenizer import Tokenizer
from engines.serve.bridge import Bridge, Event, Failed
from engines.serve.errors import ApiError
from engines.serve.orders import Order
from engines.serve.pieces import Choice, Piece, join


class Exchange:
    """An order under way. Make it inside the event loop."""

    def __init__(self, order: Order, bridge: Bridge, tokenizer: Tokenizer, eos: frozenset[int]) -> None:
        """Hands the order's requests to the engine; `eos` are the model's end-of-sequence ids."""
        self.order = order
        self._bridge = bridge
        self._eos = eos
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._choices = [
            Choice(tokenizer.decode, request.sampling, keep_stop=order.keep_stop) for request in order.requests
        ]
        self._asked = (*order.requests, *order.scores)
        self._open = len(self._asked)
        self._cached = [0] * len(self._asked)
        self._scores: list[list[Position]] = [[] for _ in order.scores]
        self._job = bridge.submit(self._asked, self._receive)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache, each prompt counted once: by its first sample."""
        return sum(self._cached[: len(self.order.requests) : self.order.samples])

    @property
    def scores(self) -> list[tuple[Position, ...]]:
        """What scoring found of each prompt from its second token on; nothing where it was not asked for."""
        if not self.order.scores:
            return [() for _ in self.order.prompts]
        found = iter(self._scores)
        return [tuple(next(found)) if len(prompt) > 1 else () for prompt in self.order.prompts]

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """(choice, piece) as they come, until everything is finished. Raises ApiError when the engine fails."""
        while self._open:
            event = await self._events.get()
            if isinstance(event, Failed):
                self._open = 0
                raise as_error(event)
            self._open -= event.finish is not None
            self._cached[event.choice] = event.cached
            if event.choice < len(self._choices):
                yield event.choice, self._choices[event.choice].take(event, self._eos)
            else:
                self._scores[event.choice - len(self._choices)] += event.positions

    async def whole(self) -> list[Piece]:
        """Every choice, finished. Raises ApiError when the engine fails."""
        found: list[list[Piece]] = [[] for _ in self._choices]
        async for index, piece in self.pieces():
            found[index].append(piece)
        return [join(pieces) for pieces in found]

    def release(self) -> None:
        """Takes what is unfinished out of the engine."""
        if self._open:
            self._open = 0
            self._bridge.cancel(self._job)

    def _receive(self, event: Event) -> None:
        """Called in the engine's thread."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)


def as_error(failed: Failed) -> ApiError:
    """What a client is told of an order that did not finish."""
    if failed.kind == "shutdown":
        return ApiError(503, failed.message, None, "shutting_down")
    return ApiError(500, failed.message, None, "engine_error")
