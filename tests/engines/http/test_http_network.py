"""Connections that stamp bytes when they arrive: order, back-pressure, ends, TLS."""

import asyncio
import contextlib
import ssl
import time
from pathlib import Path

import httpcore
import pytest

from engines.http.network import ARRIVED, MOST_KEPT, StampedBackend

CERTIFICATE = Path(__file__).with_name("localhost.pem")  # self-signed, with its key; trusted by nobody but this test
DEADLINE_S = 30.0


@contextlib.asynccontextmanager
async def serving(handler, context=None):
    """A server on a free port; yields the port."""
    handled = []

    async def handle(reader, writer):
        handled.append(asyncio.current_task())
        try:
            await handler(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]
        await asyncio.gather(*handled)


async def read_all(stream):
    parts = []
    while part := await stream.read(1 << 16, DEADLINE_S):
        parts.append(part)
    return b"".join(parts)


def test_all_bytes_of_one_pass_have_one_time_and_a_late_reader_moves_none():
    writers, ready = [], asyncio.Event()

    async def handler(reader, writer):
        writers.append(writer)
        if len(writers) == 2:
            ready.set()
        await reader.read()

    async def run():
        backend = StampedBackend()
        async with serving(handler) as port:
            streams = [await backend.connect_tcp("127.0.0.1", port) for _ in range(2)]
            await ready.wait()
            for writer in writers:
                writer.write(b"first")
            for writer in writers:
                await writer.drain()
            time.sleep(0.02)  # both lie in their sockets before this loop looks again
            sent = time.perf_counter()
            for stream in streams:
                assert await stream.read(100, DEADLINE_S) == b"first"
            first = [stream.get_extra_info(ARRIVED) for stream in streams]
            assert first[0] == first[1] >= sent - 0.02
            writers[0].write(b"second")
            while not streams[0].get_extra_info("is_readable"):
                await asyncio.sleep(0)
            arrived = time.perf_counter()
            await asyncio.sleep(0.05)  # a reader that is busy elsewhere
            assert await streams[0].read(100, DEADLINE_S) == b"second"
            assert first[0] < streams[0].get_extra_info(ARRIVED) <= arrived
            for stream in streams:
                await stream.aclose()

    asyncio.run(run())


def test_a_reader_that_lags_stops_the_sender_and_loses_nothing():
    data = bytes(range(256)) * (1 << 15)  # 8 MiB

    async def handler(reader, writer):
        writer.write(data)
        await writer.drain()

    async def run():
        async with serving(handler) as port:
            stream = await StampedBackend().connect_tcp("127.0.0.1", port)
            for _ in range(200):
                await asyncio.sleep(0)
            assert stream._inlet.kept <= MOST_KEPT + (1 << 18)
            assert await read_all(stream) == data
            await stream.aclose()

    asyncio.run(run())


def test_silence_a_hang_up_and_nobody_there_are_told_apart():
    async def silent(reader, writer):
        await reader.read()

    async def run():
        async with serving(silent) as port:
            stream = await StampedBackend().connect_tcp("127.0.0.1", port)
            with pytest.raises(httpcore.ReadTimeout):
                await stream.read(10, 0.05)
            assert not stream.get_extra_info("is_readable")
            await stream.aclose()
        with pytest.raises(httpcore.ConnectError):
            await StampedBackend().connect_tcp("127.0.0.1", port)

        async def rude(reader, writer):
            pass

        async with serving(rude) as port:
            stream = await StampedBackend().connect_tcp("127.0.0.1", port)
            assert await stream.read(10, DEADLINE_S) == b""
            assert stream.get_extra_info("is_readable")
            await stream.aclose()

    asyncio.run(run())


def test_tls_is_spoken_and_a_stranger_is_refused():
    server, client = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
    server.load_cert_chain(CERTIFICATE)
    client.load_verify_locations(CERTIFICATE)

    async def echo(reader, writer):
        writer.write(await reader.readexactly(5))
        await writer.drain()

    async def run():
        async with serving(echo, server) as port:
            plain = await StampedBackend().connect_tcp("127.0.0.1", port)
            stream = await plain.start_tls(client, "localhost", DEADLINE_S)
            await stream.write(b"hello", DEADLINE_S)
            assert await stream.read(100, DEADLINE_S) == b"hello"
            assert stream.get_extra_info(ARRIVED) > 0
            assert stream.get_extra_info("ssl_object") is not None
            await stream.aclose()
            other = await StampedBackend().connect_tcp("127.0.0.1", port)
            with pytest.raises(httpcore.ConnectError, match="certificate"):
                await other.start_tls(ssl.create_default_context(), "localhost", DEADLINE_S)
            await other.aclose()

    asyncio.run(run())
