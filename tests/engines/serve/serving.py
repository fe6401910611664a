"""A real server on a free loopback port, in this process or in one of its own, and a small client."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engines.bundled_adapter import BundledAdapter
from engines.serve.app import create_app
from engines.serve.seeds import Seeding
from engines.serve.server import SignalledServer, listen, make_server
from engines.serve.service import Service, open_service

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 60
ADAPTER = BundledAdapter()
SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "page_size": 8, "num_pages": 1200, "threads": 1}


@dataclass
class Running:
    """A server in a thread of this process."""

    port: int
    service: Service
    server: SignalledServer


@contextlib.contextmanager
def running(policy="refuse", max_body_bytes=1 << 20, **settings) -> Iterator[Running]:
    """Serves `tiny` until the block ends."""
    requested = {**{one.name: one.default for one in ADAPTER.settings()}, **SMALL, **settings}
    lifetime = ADAPTER.start("tiny", requested)
    seeding = Seeding(arithmetic=lifetime.arithmetic.name, policy=policy, draw=lambda: 77)
    service = open_service(lifetime, requested, seeding)
    listener = listen("127.0.0.1", 0)
    port, ready = listener.getsockname()[1], threading.Event()
    server = make_server(create_app(service, max_body_bytes), 5.0, ready.set)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        assert ready.wait(DEADLINE_S)
        yield Running(port, service, server)
    finally:
        server.should_exit = True
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "the server did not stop"


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def json(self):
        return json.loads(self.raw)

    @property
    def error(self):
        body = self.json
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        return body["error"]


def ask(port, path, body=None, method=None, headers=None) -> Answer:
    """One request, one whole answer. A body that is no string or bytes is sent as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        data = body if body is None or isinstance(body, bytes | str) else json.dumps(body)
        headers = {"content-type": "application/json", **(headers or {})}
        connection.request(method or ("GET" if body is None else "POST"), path, data, headers)
        response = connection.getresponse()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


def complete(port, prompt="hello", **fields):
    """POST /v1/completions, greedy unless said otherwise; the answer must be a success."""
    answer = ask(port, "/v1/completions", {"model": "tiny", "prompt": prompt, "temperature": 0, **fields})
    assert answer.status == 200, answer.raw
    return answer.json


def chat(port, text="hello", **fields):
    """POST /v1/chat/completions with one message."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 8}
    answer = ask(port, "/v1/chat/completions", {**body, **fields})
    assert answer.status == 200, answer.raw
    return answer.json


@contextlib.contextmanager
def streaming(port, path, body):
    """Yields an iterator of events; leaving the block closes the socket."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        connection.request("POST", path, json.dumps({**body, "stream": True}), {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        assert response.getheader("content-type").startswith("text/event-stream")
        yield events(response)
    finally:
        connection.close()


def events(response):
    """Events as JSON; stops at [DONE] and insists on it."""
    for line in response:
        if line.startswith(b"data: "):
            data = line[6:].strip()
            if data == b"[DONE]":
                assert response.read() in (b"", b"\n")
                return
            yield json.loads(data)
    raise AssertionError("the stream ended without [DONE]")


def metrics(port) -> dict[str, float]:
    """The metrics page by name."""
    answer = ask(port, "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = [line for line in answer.raw.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def wait_for(what, check):
    """Waits until `check()` is true; fails at the deadline."""
    end = time.monotonic() + DEADLINE_S
    while not check():
        assert time.monotonic() < end, f"never saw: {what}"
        time.sleep(0.01)


def bits(number) -> bytes:
    """The float32 of a JSON number; it must be one exactly."""
    packed = struct.pack("<f", number)
    assert struct.unpack("<f", packed)[0] == number
    return packed


@contextlib.contextmanager
def process(*arguments, model="tiny"):
    """`samebits serve` in a process of its own, with the port it says it has."""
    command = [sys.executable, "-m", "harness.cli", "serve", "--model", model, "--port", "0", "--set", "threads=1"]
    child = subprocess.Popen(
        [*command, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    try:
        line = child.stdout.readline()
        assert line.startswith(f"serving {model} "), line + child.stderr.read()
        yield child, int(line.split(" at http://127.0.0.1:")[1].split(",")[0])
    finally:
        if child.poll() is None:
            child.kill()
        child.wait(DEADLINE_S)
        child.stdout.close()
        child.stderr.close()


def connect(port) -> socket.socket:
    """A bare connection."""
    return socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)


def joined(lists) -> list:
    """Lists as one."""
    return [item for one in lists for item in one]
