"""Runs one work of the harness against a server. It does not know traces' columns or how the server is described.

Rules: arrivals follow what streams show: an arrival `at_step` n is sent once the request that is furthest has n
tokens, and one that waits for another is sent once that one's stream has got there; one failed request ends the
work, and the others are given up; nothing is sent twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from engines.arrivals import Arrivals, Standing
from engines.http.answer import Offer
from engines.http.client import Client
from engines.http.dialect import Dialect, Prompt
from engines.http.exchange import Exchange, open_exchange, run_exchange
from engines.http.flavours import Flavour
from engines.http.metrics import Samples, sampled
from harness.engine import Progress, Work
from harness.errors import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where requests go and in which words. `offer` is the evidence every answer must carry."""

    flavour: Flavour
    dialect: Dialect
    model: str
    offer: Offer | None


@dataclass(slots=True, kw_only=True)
class Ran:
    """What a work came to: its exchanges in the schedule's order, and what the metrics showed."""

    exchanges: tuple[Exchange, ...]
    samples: Samples


async def run_work(client: Client, route: Route, work: Work, prompts: Mapping[str, Prompt], progress: Progress) -> Ran:
    """Runs the work to its end. Raises EngineError naming the first request that failed; Unsupported before any."""
    requests = {request.id: request for request in work.requests}
    arrivals = Arrivals(work.schedule, requests)
    prepared = {
        one.request: open_exchange(
            route.dialect, requests[one.request], prompts[one.request], route.model, companion=one.companion,
            leave_after=one.cancel_after_tokens,
        )
        for one in work.schedule.arrivals
    }  # fmt: skip
    async with sampled(client, route.flavour) as samples:
        await _Runner(client, route, prepared, arrivals, progress).run()
    return Ran(exchanges=tuple(prepared[one.request] for one in work.schedule.arrivals), samples=samples)


class _Runner:
    """Sends what is due whenever a stream has moved."""

    def __init__(
        self, client: Client, route: Route, prepared: Mapping[str, Exchange], arrivals: Arrivals, progress: Progress
    ) -> None:
        self._client, self._route, self._prepared = client, route, prepared
        self._arrivals, self._progress = arrivals, progress
        self._sent: dict[str, Exchange] = {}
        self._moved = asyncio.Event()
        self._step = 0

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                while self._arrivals.pending or any(not one.done for one in self._sent.values()):
                    if not self._send_due(group):
                        await self._moved.wait()
                    self._moved.clear()
        except BaseExceptionGroup as failed:
            first = failed.exceptions[0]
            raise self._told(first) if isinstance(first, EngineError) else first from None

    def _send_due(self, group: asyncio.TaskGroup) -> bool:
        """Sends the arrivals that are due; True when something was sent or the step was moved on."""
        if not self._arrivals.pending:
            return False
        self._step = max([self._step, *(one.generated for one in self._sent.values())])
        standings = {name: Standing(generated=one.generated, finished=one.done) for name, one in self._sent.items()}
        due = self._arrivals.take_due(self._step, standings)
        for arrival in due:
            exchange = self._prepared[arrival.request]
            self._sent[arrival.request] = exchange
            group.create_task(
                run_exchange(self._client, self._route.dialect, exchange, self._route.offer, self._notify)
            )
        if not due and self._arrivals.pending and all(one.done for one in self._sent.values()):
            self._step = self._arrivals.next_step()
            return True
        return bool(due)

    def _notify(self) -> None:
        self._moved.set()
        sent = self._sent.values()
        self._progress(sum(one.done for one in sent), sum(one.generated for one in sent))

    def _told(self, error: EngineError) -> EngineError:
        finished = sum(one.ended_at > 0 for one in self._sent.values())
        others = len(self._sent) - finished - 1
        return type(error)(f"{error} ({finished} other requests finished, {max(0, others)} were given up)")
