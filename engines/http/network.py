"""Connections whose bytes are stamped when they arrive, not when somebody gets round to reading them.

It does not know HTTP. Rules: all bytes that one pass of the event loop finds have one time, for the order in which a
pass looks at its sockets tells nothing; a busy reader therefore moves no stamp, and two streams are in order only where
two passes saw them; a reader that lags stops its sender before much is kept.

The times are read back through httpcore's own extension: `get_extra_info(ARRIVED)` of a response's network stream is
the time of the bytes that were read last, `get_extra_info(SENT)` when bytes were last handed to the system.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections import deque
from collections.abc import Iterable
from typing import cast

import httpcore
import httpx

ARRIVED = "samebits_arrived_at"  # `time.perf_counter()`
SENT = "samebits_sent_at"  # likewise
KEPT_S = 2.0  # idle connections; servers hang up after 5 seconds, and a request sent just then would be lost
MOST_KEPT = 1 << 20  # bytes that wait for their reader before the sender is stopped


class PassClock:
    """One time per pass of the event loop."""

    def __init__(self) -> None:
        """Must be made inside the loop it is used in."""
        self._loop = asyncio.get_running_loop()
        self._time: float | None = None

    def now(self) -> float:
        """The time of this pass: when its first bytes were found."""
        if self._time is None:
            self._time = time.perf_counter()
            self._loop.call_soon(self._end)  # runs in the next pass, before that one's sockets are read
        return self._time

    def _end(self) -> None:
        self._time = None


class _Inlet(asyncio.Protocol):
    """What has arrived on one connection and was not read yet."""

    def __init__(self, clock: PassClock) -> None:
        self._clock = clock
        self.transport: asyncio.Transport | None = None
        self.queue: deque[tuple[float, bytes]] = deque()
        self.kept = 0
        self.ended = False
        self.error: Exception | None = None
        self._arrival: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.queue.append((self._clock.now(), data))
        self.kept += len(data)
        if self.kept > MOST_KEPT and self.transport is not None:
            self.transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        self.ended = True
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended, self.error = True, exc
        self._wake()
        self.resume_writing()

    def pause_writing(self) -> None:
        self._room = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        self._room = None

    async def arrival(self) -> None:
        """Returns once something is queued or the connection has ended."""
        if not self.queue and not self.ended:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival

    async def room(self) -> None:
        """Returns once more may be written."""
        if self._room is not None:
            await self._room

    def take(self, most: int) -> tuple[float, bytes]:
        """The oldest bytes, at most `most`, with their time."""
        at, data = self.queue.popleft()
        if len(data) > most:
            self.queue.appendleft((at, data[most:]))
            data = data[:most]
        self.kept -= len(data)
        if self.kept <= MOST_KEPT and self.transport is not None and not self.ended:
            self.transport.resume_reading()
        return at, data

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


class StampedStream(httpcore.AsyncNetworkStream):
    """One connection, as httpcore wants it."""

    def __init__(self, inlet: _Inlet, clock: PassClock) -> None:
        """`inlet` is connected."""
        self._inlet, self._clock = inlet, clock
        self._arrived_at = self._sent_at = 0.0

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Bytes, or none at the end. Raises httpcore's ReadTimeout, ReadError."""
        if not self._inlet.queue:
            try:
                async with asyncio.timeout(timeout):
                    await self._inlet.arrival()
            except TimeoutError as error:
                raise httpcore.ReadTimeout("no byte came") from error
        if self._inlet.queue:
            self._arrived_at, data = self._inlet.take(max_bytes)
            return data
        if self._inlet.error is not None:
            raise httpcore.ReadError(str(self._inlet.error)) from self._inlet.error
        return b""

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Raises httpcore's WriteTimeout, WriteError."""
        if self._inlet.ended and self._inlet.error is not None:
            raise httpcore.WriteError(str(self._inlet.error))
        self._transport.write(buffer)
        self._sent_at = time.perf_counter()
        try:
            async with asyncio.timeout(timeout):
                await self._inlet.room()
        except TimeoutError as error:
            raise httpcore.WriteTimeout("the server takes no more") from error

    async def aclose(self) -> None:
        """Hangs up."""
        self._transport.abort()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """The same connection under TLS. Raises httpcore's ConnectTimeout, ConnectError."""
        inlet = _Inlet(self._clock)
        try:
            async with asyncio.timeout(timeout):
                inlet.transport = await asyncio.get_running_loop().start_tls(
                    self._transport, inlet, ssl_context, server_hostname=server_hostname
                )
        except TimeoutError as error:
            raise httpcore.ConnectTimeout("TLS was not agreed on in time") from error
        except (OSError, ssl.SSLError) as error:
            raise httpcore.ConnectError(str(error)) from error
        return StampedStream(inlet, self._clock)

    def get_extra_info(self, info: str) -> object:
        """The time of the bytes read last or written last, and what httpcore asks for."""
        if info in (ARRIVED, SENT):
            return self._arrived_at if info == ARRIVED else self._sent_at
        if info == "is_readable":  # of an idle connection: the server has hung up, or said something unasked
            return bool(self._inlet.queue) or self._inlet.ended or self._transport.is_closing()
        names = {"client_addr": "sockname", "server_addr": "peername", "socket": "socket", "ssl_object": "ssl_object"}
        return self._transport.get_extra_info(names.get(info, info))

    @property
    def _transport(self) -> asyncio.Transport:
        if self._inlet.transport is None:
            raise httpcore.ReadError("the connection was never made")
        return self._inlet.transport


class StampedBackend(httpcore.AsyncNetworkBackend):
    """Makes stamped connections."""

    def __init__(self) -> None:
        """The clock is made with the first connection, inside the loop."""
        self._clock: PassClock | None = None

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Raises httpcore's ConnectTimeout, ConnectError."""
        self._clock = clock = self._clock or PassClock()
        source = None if local_address is None else (local_address, 0)
        try:
            async with asyncio.timeout(timeout):
                loop = asyncio.get_running_loop()
                transport, inlet = await loop.create_connection(lambda: _Inlet(clock), host, port, local_addr=source)
        except TimeoutError as error:
            raise httpcore.ConnectTimeout(f"{host}:{port} did not answer") from error
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        for option in socket_options or ():
            with contextlib.suppress(OSError):
                transport.get_extra_info("socket").setsockopt(*option)
        return StampedStream(inlet, clock)

    async def sleep(self, seconds: float) -> None:
        """Part of httpcore's protocol; used between retries, of which there are none."""
        await asyncio.sleep(seconds)


class StampedTransport(httpx.AsyncHTTPTransport):
    """httpx's own transport over stamped connections; no retries, no proxy, nothing from the environment."""

    def __init__(self, *, tls: bool) -> None:
        """`tls`: certificates are loaded and verified; plain HTTP has none to verify."""
        super().__init__(verify=tls, trust_env=False)
        context = httpx.create_ssl_context(trust_env=False) if tls else None
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=context, max_connections=None, max_keepalive_connections=256, keepalive_expiry=KEPT_S,
            retries=0, network_backend=StampedBackend(),
        )  # fmt: skip
