"""The listening socket, signals and the end of a server. It knows no routes.

Rules: the port is taken before the model is loaded, so that a port in use is told at once; the first SIGTERM or SIGINT
lets orders under way finish within the grace, the second ends them; whatever is cut short is told so; exit code 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import uvicorn

from engines.serve.service import Service
from harness.errors import UsageError

if TYPE_CHECKING:
    from fastapi import FastAPI

BACKLOG = 2048
LAST_WORDS_S = 2.0  # for clients to read what they are told after the grace; then they are hung up on
SIGNALS = (signal.SIGINT, signal.SIGTERM)
Say = Callable[[str], None]


class SignalledServer(uvicorn.Server):
    """A uvicorn server that leaves signals to us and says when it is ready."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        """`on_ready` is called once requests are taken."""
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, then says so."""
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None: they are ours; uvicorn would take them too, and raise each a second time at the end."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UsageError if host and port cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        where = f"--host {host} --port {port}"
        raise UsageError(f"{where}: cannot listen there ({error.strerror}); choose another, port 0 for any") from error
    return listener


def url_of(listener: socket.socket) -> str:
    """The address that clients use."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"


def make_server(app: FastAPI, grace_s: float, on_ready: Callable[[], None]) -> SignalledServer:
    """A server for `app` that logs nothing of its own but errors."""
    config = uvicorn.Config(
        app, log_config=None, access_log=False, ws="none", lifespan="on", server_header=False,
        timeout_graceful_shutdown=int(grace_s + 3 * LAST_WORDS_S),  # uvicorn's own end, never reached
    )  # fmt: skip
    return SignalledServer(config, on_ready)


async def serve_until_signal(
    app: FastAPI, service: Service, listener: socket.socket, grace_s: float, on_ready: Callable[[], None], say: Say
) -> None:
    """Serves until a signal comes and everything under way is finished or told."""
    server = make_server(app, grace_s, on_ready)
    ending = _Ending(server, service, grace_s, say)
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, ending.begin, number)
    try:
        await server.serve(sockets=[listener])
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
    counts = service.bridge.counts
    say(f"stopped: {counts.admitted} sequences taken in, {ending.cut_short} of them cut short by the end")


class _Ending:
    """The way from the first signal to the end."""

    def __init__(self, server: uvicorn.Server, service: Service, grace_s: float, say: Say) -> None:
        self._server = server
        self._service = service
        self._grace_s = grace_s
        self._say = say
        self.cut_short = 0

    def begin(self, number: signal.Signals) -> None:
        """Called once per signal."""
        if self._service.draining:
            self._cut_short(f"a second {number.name}")
            return
        self._service.draining = True
        counts = self._service.bridge.counts
        self._say(f"{number.name}: {counts.running + counts.waiting} under way, {self._grace_s:g} s to finish")
        self._server.should_exit = True
        asyncio.get_running_loop().call_later(self._grace_s, self._cut_short, f"{self._grace_s:g} s of grace are over")

    def _cut_short(self, why: str) -> None:
        counts = self._service.bridge.counts
        self.cut_short += counts.running + counts.waiting
        self._service.bridge.cancel_all(f"the server is shutting down and did not finish this request: {why}")
        asyncio.get_running_loop().call_later(LAST_WORDS_S, self._hang_up)

    def _hang_up(self) -> None:
        """On clients that send no more of their request, or read no more of their answer."""
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
