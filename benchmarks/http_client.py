"""What the HTTP client costs and how true its clock is: streamed requests against a scripted server.

Usage: python benchmarks/http_client.py [--requests 10000] [--concurrency 64] [--chunks 32] [--interval-ms 25]

The server is a process of its own that writes one event per token at a steady pace, and logs when it read a request and
when it wrote each event (CLOCK_MONOTONIC, which all processes of a host share). The client is the one that judges
endpoints, reading and checking every event. Aims: at most 1 core-second per 100 requests of 32 chunks, nothing lost,
latencies within 1 ms of the server's log at the median and within 5 ms at the 99th percentile (of absolute differences:
early and late do not cancel). The client's cost is its process's processor time while requests are under way.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

sys.path[0] = str(Path(__file__).resolve().parents[1])  # `benchmarks` is a package of the root

from engines.http.answer import Offer  # noqa: E402
from engines.http.client import Bounds, Client  # noqa: E402
from engines.http.dialect import Prompt  # noqa: E402
from engines.http.dialects.openai import OpenAi  # noqa: E402
from engines.http.exchange import Exchange, open_exchange, run_exchange  # noqa: E402
from harness.errors import EngineError  # noqa: E402
from harness.request import Request, Sampling  # noqa: E402

BOUNDS = Bounds(silence_s=60.0, request_s=600.0, most_bytes=64 << 20)
COST_AIM_S, MEDIAN_AIM_MS, P99_AIM_MS = 1.0, 1.0, 5.0  # core-seconds per 100 requests; milliseconds
CANDIDATES = 5
VOCAB = 50_000


# the server


class Server:
    """Answers completions with tokens that follow from the prompt; logs times by the prompt's first id."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.log: dict[int, list[float]] = {}  # request read, then each event written

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, request after request."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = next((int(x.split(":")[1]) for x in head.split("\r\n") if x.startswith("content-length")), 0)
                body = await reader.readexactly(length)
                await (self._tell(writer) if head.startswith("get") else self._stream(json.loads(body), writer))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _tell(self, writer: asyncio.StreamWriter) -> None:
        data = json.dumps(self.log).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data))
        writer.write(data)
        await writer.drain()

    async def _stream(self, body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        read = time.perf_counter()
        prompt = cast("list[int]", body["prompt"])
        times = self.log.setdefault(prompt[0], [read])
        count = cast("int", body["max_tokens"])
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for number in range(1, count + 1):
            event = build_event(prompt, number - 1, count)  # one at a time: all at once would keep others waiting
            await asyncio.sleep(max(0.0, read + number * self.interval_s - time.perf_counter()))
            times.append(time.perf_counter())
            writer.write(b"%x\r\n%s\r\n" % (len(event), event))
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def build_event(prompt: list[int], position: int, count: int) -> bytes:
    """The event of a token; the last of `count` carries the finish reason, the usage and [DONE]."""
    token = expected_token(prompt[0], position)
    top = {f"token_id:{(token + i) % VOCAB}": -0.5 - i / 8 for i in range(CANDIDATES)}
    logprobs = {"tokens": [f"token_id:{token}"], "token_logprobs": [-0.5], "top_logprobs": [top]}
    is_last = position == count - 1
    choice = {
        "index": 0, "text": " word", "token_ids": [token], "logprobs": logprobs,
        "finish_reason": "length" if is_last else None,
    }  # fmt: skip
    event = _event({"id": "cmpl", "object": "text_completion", "choices": [choice]})
    if not is_last:
        return event
    usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
    return event + _event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"


def expected_token(request: int, position: int) -> int:
    """The token that the server says at a position."""
    return (request * 31 + position * 7) % VOCAB


def _event(value: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


async def serve(interval_s: float) -> None:
    """Listens on a free port, prints it, and serves until its standard input ends."""
    server = Server(interval_s)
    listener = await asyncio.start_server(server.connection, "127.0.0.1", 0)
    print(listener.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(os.read, 0, 1)
    listener.close()


# the client


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Differences are client minus server, in milliseconds, of requests that were answered."""

    requests: int
    lost: int  # failed, or answered with other tokens than the server logged
    first_loss: str
    cpu_s: float
    wall_s: float
    first_token: tuple[float, ...]  # time to first token
    whole: tuple[float, ...]  # time to last token
    arrivals: tuple[float, ...]  # each event: stamped at the client, minus written by the server


def make_exchange(number: int, chunks: int, dialect: OpenAi) -> Exchange:
    """Request `number`."""
    sampling = Sampling(
        temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, frequency_penalty=0.0,
        presence_penalty=0.0, seed=None, max_tokens=chunks, min_tokens=0, ignore_eos=True, stop=(),
        stop_token_ids=(), logit_bias=(), logprobs=CANDIDATES, n=1,
    )  # fmt: skip
    ids = (number, *range(1, 64))
    request = Request(id=str(number), prompt_token_ids=ids, text=None, messages=None, sampling=sampling, grammar=None,
                      images=())  # fmt: skip
    return open_exchange(dialect, request, Prompt(ids=ids), "scripted", companion=False, leave_after=None)


async def measure(url: str, requests: int, concurrency: int, chunks: int) -> Measured:
    """Sends everything and compares with the server's log."""
    dialect = OpenAi(chat=False, additions=True)
    offer = Offer(naming="ids", logprobs=True, topk=True)
    exchanges = [make_exchange(number, chunks, dialect) for number in range(requests)]
    waiting, failed = iter(exchanges), dict[str, str]()
    async with Client(url, None, BOUNDS) as client:

        async def work() -> None:
            for exchange in waiting:
                try:
                    await run_exchange(client, exchange, offer, lambda: None)
                except EngineError as error:
                    failed[exchange.request.id] = str(error)

        wall, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(work() for _ in range(concurrency)))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        log = {int(key): value for key, value in (await client.get_json("/log")).items()}
    return compare(exchanges, failed, cast("dict[int, list[float]]", log), chunks, cpu, wall)


def compare(
    exchanges: list[Exchange], failed: dict[str, str], log: dict[int, list[float]], chunks: int, cpu: float, wall: float
) -> Measured:
    """Counts what is lost, and subtracts latencies."""
    lost, first, whole, arrivals = dict(failed), list[float](), list[float](), list[float]()
    for number, exchange in enumerate(exchanges):
        if exchange.request.id in failed:
            continue
        answer, (read, *written) = exchange.answers[0], log[number]
        expected = [expected_token(number, position) for position in range(chunks)]
        if answer.tokens != expected or len(written) != chunks:
            lost[exchange.request.id] = f"request {number}: {len(answer.tokens)} tokens, {len(written)} were written"
            continue
        first.append(1e3 * ((answer.times[0] - exchange.sent_at) - (written[0] - read)))
        whole.append(1e3 * ((answer.times[-1] - exchange.sent_at) - (written[-1] - read)))
        arrivals += [1e3 * (at - wrote) for at, wrote in zip(answer.times, written, strict=True)]
    return Measured(
        requests=len(exchanges), lost=len(lost), first_loss=next(iter(lost.values()), ""), cpu_s=cpu, wall_s=wall,
        first_token=tuple(first), whole=tuple(whole), arrivals=tuple(arrivals),
    )  # fmt: skip


def report(found: Measured) -> bool:
    """Prints the figures against the aims; True when all are met."""
    cost = 100 * found.cpu_s / found.requests
    print(f"{found.requests} requests in {found.wall_s:.1f} s, {found.lost} lost or wrong {found.first_loss}")
    if found.lost == found.requests:
        return False
    print(f"client: {cost:.3f} core-seconds per 100 requests (aim: at most {COST_AIM_S})")
    met = [found.lost == 0, cost <= COST_AIM_S]
    for name, values in (("time to first token", found.first_token), ("time to last token", found.whole)):
        apart = [abs(value) for value in values]
        median, p99 = statistics.median(apart), percentile(apart, 0.99)
        print(f"{name}, client from server: median {median:.3f} ms (aim {MEDIAN_AIM_MS}), p99 {p99:.3f} ms "
              f"(aim {P99_AIM_MS})")  # fmt: skip
        met += [median <= MEDIAN_AIM_MS, p99 <= P99_AIM_MS]
    arrivals = found.arrivals
    print(f"each event, stamped minus written: median {statistics.median(arrivals):.3f} ms, "
          f"p99 {percentile(arrivals, 0.99):.3f} ms")  # fmt: skip
    return all(met)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> int:
    """Starts the server, measures, stops it. Exit 1 if an aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=32)
    parser.add_argument("--interval-ms", type=float, default=25.0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.interval_ms / 1e3))
        return 0
    command = [sys.executable, __file__, "--serve", "--interval-ms", str(options.interval_ms)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        port = cast("str", server.stdout.readline() if server.stdout else "").strip()
        url = f"http://127.0.0.1:{port}"
        found = asyncio.run(measure(url, options.requests, options.concurrency, options.chunks))
        server.communicate("\n")
    return 0 if report(found) else 1


if __name__ == "__main__":
    sys.exit(main())
