"""Serves requests at an endpoint by the clock: the session behind `harness.engine.Timed`.

It does not know loads or latencies. Rules: streams are read on a thread of their own, and every token carries the time
at which its bytes arrived there, not when the caller came for it; a request that fails ends the session; the server's
steps are not seen, so none are shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future

from engines.http.answer import Offer
from engines.http.client import Client
from engines.http.exchange import Exchange, refuse_other_identity, run_exchange
from engines.http.metrics import Samples
from engines.http.run import Ran, Route
from engines.http.traces import write_traces
from harness.engine import Emission
from harness.errors import EngineError
from harness.traces import Traces

LONGEST_WAIT_S = 0.25
CLOSING_S = 10.0


class HttpSession:
    """One timed serving; implements `harness.engine.TimedSession`."""

    def __init__(
        self, open_client: Callable[[], Client], route: Route, prepared: Mapping[str, Exchange], offer: Offer
    ) -> None:
        """`prepared` are exchanges that were not sent, by request."""
        self._route, self._prepared, self._offer = route, dict(prepared), offer
        self._sent: dict[str, Exchange] = {}
        self._told: dict[tuple[str, int], int] = {}
        self._over: set[tuple[str, int]] = set()
        self._came: queue.SimpleQueue[Emission | BaseException] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="samebits-endpoint", daemon=True)
        self._thread.start()
        self._client = open_client()
        self._run(self._client.__aenter__())
        self._pending: list[Future[None]] = []
        self._began = time.perf_counter()

    def now(self) -> float:
        """Seconds since the session was opened."""
        return time.perf_counter() - self._began

    def submit(self, request: str) -> None:
        """Sends a request. Raises EngineError if it is unknown or was sent before."""
        exchange = self._prepared.pop(request, None)
        if exchange is None:
            raise EngineError(f"request {request!r}: not opened in this session, or submitted twice")
        self._sent[request] = exchange
        self._pending.append(asyncio.run_coroutine_threadsafe(self._exchange(exchange), self._loop))

    def advance(self, until_s: float | None) -> list[Emission]:
        """What has come, waiting for something no longer than `until_s`. Raises EngineError of a failed request."""
        wait = LONGEST_WAIT_S if until_s is None else min(until_s - self.now(), LONGEST_WAIT_S)
        came: list[Emission | BaseException] = []
        with contextlib.suppress(queue.Empty):
            came.append(self._came.get(timeout=wait) if wait > 0 else self._came.get_nowait())
            while True:
                came.append(self._came.get_nowait())
        return [self._unless_failed(one) for one in came]

    def finish(self) -> Traces:
        """The traces of everything sent, without steps; connections are closed."""
        self._close()
        refuse_other_identity(self._sent.values(), self._route.identity)
        ran = Ran(exchanges=tuple(self._sent.values()), samples=Samples())
        return dataclasses.replace(write_traces(ran, self._offer), steps=None)

    def _unless_failed(self, one: Emission | BaseException) -> Emission:
        if isinstance(one, BaseException):
            self._close()
            raise one
        return one

    async def _exchange(self, exchange: Exchange) -> None:
        try:
            await run_exchange(self._client, exchange, self._route.offer, lambda: self._tell(exchange))
        except Exception as error:  # noqa: BLE001 - carried to the caller's thread and raised there
            self._came.put(error)

    def _tell(self, exchange: Exchange) -> None:
        """Hands over tokens that were not told yet; the end is told once the whole answer was checked."""
        for sample, answer in enumerate(exchange.answers):
            key = (exchange.request.id, sample)
            for at in answer.times[self._told.get(key, 0) :]:
                self._came.put(Emission(request=key[0], sample=sample, tokens=1, finished=False, at_s=at - self._began))
            self._told[key] = len(answer.times)
            if exchange.done and key not in self._over:
                self._over.add(key)
                end = answer.times[-1] if answer.times else exchange.ended_at
                self._came.put(Emission(request=key[0], sample=sample, tokens=0, finished=True, at_s=end - self._began))

    def _close(self) -> None:
        if self._loop.is_closed():
            return
        for future in self._pending:
            future.cancel()
        self._run(self._client.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSING_S)
        if self._thread.is_alive():
            raise EngineError(f"the thread that reads answers did not end within {CLOSING_S:.0f} s")
        self._loop.close()

    def _run(self, action: Coroutine[object, object, object]) -> None:
        asyncio.run_coroutine_threadsafe(action, self._loop).result(CLOSING_S)
