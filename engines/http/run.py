"""Runs one work of the harness against a server. It does not know traces' columns or how the server is described.

Rules: arrivals follow what streams show: an arrival `at_step` n is sent once the request that is furthest has n
tokens, and one that waits for another is sent once that one's stream has got there; one failed request ends the
work, and the others are given up; nothing is sent twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engines.arrivals import Arrivals, Standing
from engines.http.answer import Answer, Offer
from engines.http.client import Client
from engines.http.dialect import Dialect, Prompt
from engines.http.exchange import Exchange, open_exchange, refuse_other_identity, run_exchange
from engines.http.flavours import Flavour
from engines.http.metrics import Samples, sampled
from engines.http.scoring import ScoredPath, Scorer, check_paths, plan_paths
from harness.engine import Progress, Work
from harness.errors import EngineError
from harness.schedule import Arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where requests go and in which words. `offer` and `identity` are what every answer must carry."""

    flavour: Flavour
    dialect: Dialect
    model: str
    offer: Offer | None
    identity: str = ""  # in the header; empty: none is sent


@dataclass(slots=True, kw_only=True)
class Ran:
    """What a work came to: its exchanges in the schedule's order, and what the metrics showed."""

    exchanges: tuple[Exchange, ...]
    samples: Samples


async def run_work(
    client: Client, route: Route, work: Work, prompts: Mapping[str, Prompt], progress: Progress,
    paths: Mapping[str, ScoredPath] = MappingProxyType({}),
) -> Ran:  # fmt: skip
    """Runs the work to its end; requests that have a path are read along it.

    Raises EngineError naming the first request that failed; Unsupported before any is sent.
    """
    requests = {request.id: request for request in work.requests}
    arrivals = Arrivals(work.schedule, requests)

    def prepare(one: Arrival) -> Exchange:
        path = paths.get(one.request)
        dialect, prompt = (route.dialect, prompts[one.request]) if path is None else (path, Prompt(ids=path.text))
        return open_exchange(
            dialect, requests[one.request], prompt, route.model, companion=one.companion,
            leave_after=one.cancel_after_tokens,
        )  # fmt: skip

    prepared = {one.request: prepare(one) for one in work.schedule.arrivals}
    async with sampled(client, route.flavour) as samples:
        await _Runner(client, route, prepared, arrivals, progress).run()
    refuse_other_identity(prepared.values(), route.identity)
    return Ran(exchanges=tuple(prepared[one.request] for one in work.schedule.arrivals), samples=samples)


async def run_paths(
    client: Client, route: Route, work: Work, prompts: Mapping[str, Prompt], progress: Progress, scorer: Scorer,
    sent: str,
) -> Ran:  # fmt: skip
    """Reads golden paths, or in natural replay what was generated just before. `sent` as in `check_paths`.

    Raises what `run_work` does.
    """
    before, made = check_paths(work, prompts, sent), dict[str, Answer]()
    if work.replay == "natural":
        generated = await run_work(client, route, work, prompts, progress)
        made = {one.request.id: one.answers[0] for one in generated.exchanges}
    return await run_work(client, route, work, prompts, progress, plan_paths(work, scorer, before, made))


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
            group.create_task(run_exchange(self._client, exchange, self._route.offer, self._notify))
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
