"""A scripted HTTP server on a free loopback port, in a thread of this process: it answers as a test says."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

VOCAB = 512
CANDIDATES = 24
DEADLINE_S = 30


@dataclass
class Call:
    """One request as it came in."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict


@dataclass
class Reply:
    """What to send: parts are bytes, or events to wait for. `cut`: the connection is dropped after the last part."""

    status: int = 200
    kind: str = "text/event-stream"
    parts: list = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    silent: bool = False  # nothing more comes, and the connection stays open


def page(value, status=200, **headers) -> Reply:
    """A JSON page."""
    return Reply(status=status, kind="application/json", parts=[json.dumps(value).encode()], headers=headers)


def sse(*events, done=True) -> list[bytes]:
    """Events as server-sent events; text is sent as it is."""
    parts = [f"data: {one if isinstance(one, str) else json.dumps(one)}\n\n".encode() for one in events]
    return parts + ([b"data: [DONE]\n\n"] if done else [])


class Scripted:
    """The server. `answer` maps a call to a reply; calls are kept."""

    def __init__(self, answer: Callable[[Call], Reply], port: int = 0):
        self.answer, self.calls = answer, []
        self.port, self._ready = port, threading.Event()
        self._loop = asyncio.new_event_loop()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def posts(self):
        return [call for call in self.calls if call.method == "POST"]

    def run(self):
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self):
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)

    async def _connection(self, reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._one(reader, writer):
                pass
        writer.close()

    async def _one(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        data = await reader.readexactly(int(headers.get("content-length", 0)))
        call = Call(method, path, headers, json.loads(data) if data else {})
        self.calls.append(call)
        reply = self.answer(call)
        lines = [f"HTTP/1.1 {reply.status} X", f"content-type: {reply.kind}", "transfer-encoding: chunked"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in reply.headers.items()]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        for part in reply.parts:
            if isinstance(part, bytes):
                writer.write(b"%x\r\n%s\r\n" % (len(part), part))
                await writer.drain()
                await asyncio.sleep(0)
            else:
                await part()
        if reply.silent:
            await self._stop.wait()
        if reply.cut:
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    def stop(self):
        self._loop.call_soon_threadsafe(self._stop.set)


@contextlib.contextmanager
def scripted(answer) -> Iterator[Scripted]:
    """A server until the block ends."""
    server = Scripted(answer)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert server._ready.wait(DEADLINE_S)
        yield server
    finally:
        server.stop()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


@dataclass
class Model:
    """An OpenAI-compatible completions server with a hash for a model.

    `spoil` may change the reply to the i-th completion (probes are the first three), `salt` the draws.
    """

    seeds: str = "obeyed"  # "obeyed" | "random" | "fixed" | "refused"
    ids: bool = True
    logprobs: bool = True
    name: str = "scripted"
    salt: str = ""
    prefill_salt: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    spoil: Callable[[int, Call, Reply], Reply] = lambda number, call, reply: reply
    running: int = 0
    count: int = 0
    gate: Callable | None = None  # awaited before each token

    def __call__(self, call: Call) -> Reply:
        if call.path == "/v1/models":
            return page({"object": "list", "data": [{"id": self.name, "object": "model"}]})
        if call.path == "/health":
            return page({})
        if call.path == "/metrics":
            return Reply(kind="text/plain", parts=[b"vllm:num_requests_running 1.0\n"])
        if call.path != "/v1/completions":
            return page({"error": {"message": f"no {call.path}"}}, 404)
        number, self.count = self.count, self.count + 1
        body = call.body
        if self.seeds == "refused" and "seed" in body:
            return page({"error": {"message": "seed is not supported"}}, 400)
        reply = page(self.score(body)) if "prompt_logprobs" in body else Reply(parts=self.stream(body, number))
        reply.headers |= self.headers
        return self.spoil(number, call, reply)

    def stream(self, body, number=0):
        parts = []
        for chunk in self.chunks(body, number):
            if self.gate is not None:
                parts.append(self.gate)
            parts += sse(chunk, done=False)
        return [*parts, b"data: [DONE]\n\n"]

    def chunks(self, body, number=0):
        """Events of one answer."""
        text = list(body["prompt"])
        drawn = body["temperature"] > 0
        seed = {"obeyed": body.get("seed"), "random": number, "fixed": 42, "refused": 42}[self.seeds] if drawn else None
        events = []
        for position in range(body["max_tokens"]):
            pick = hashlib.sha256(f"{seed}{position}".encode()).digest()[0] % 4 if drawn else 0
            top = self.candidates(text, self.salt)
            text.append(list(top)[pick])
            events.append(self.chunk(text[-1], top, body["logprobs"]))
        events[-1]["choices"][0]["finish_reason"] = "length"
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        return [*events, {"choices": [], "usage": usage}]

    def candidates(self, text, salt):
        """Token to logprob, best first, after a text."""
        digest = hashlib.sha256(f"{salt}{text}".encode()).digest()
        top = random.Random(digest).sample(range(VOCAB), CANDIDATES)  # noqa: S311 - a script, no secret
        return {token: -(i + 1) / 8 - digest[30] / 1024 for i, token in enumerate(top)}

    def score(self, body):
        """The logprobs of a prompt, as vLLM returns them; a token that is no candidate has -9."""
        text, listed = body["prompt"], [None]
        for i in range(1, len(text)):
            top = self.candidates(text[:i], self.salt + self.prefill_salt)
            ranks = {token: rank for rank, token in enumerate(top, 1) if rank <= body["prompt_logprobs"]}
            listed.append({str(token): {"logprob": top.get(token, -9.0), "rank": ranks.get(token, 99)}
                           for token in dict.fromkeys([text[i], *ranks])})  # fmt: skip
        choice = {"index": 0, "text": "x", "finish_reason": "length", "prompt_logprobs": listed}
        return {"choices": [choice], "usage": {"prompt_tokens": len(text), "completion_tokens": 1}}

    def chunk(self, token, top, count):
        best = sorted(top, key=lambda one: -top[one])[:count]
        name = (lambda one: f"token_id:{one}") if self.ids else (lambda one: f"<{one}>")
        choice = {"index": 0, "text": f"<{token}>", "finish_reason": None, "logprobs": None}
        if self.ids:
            choice["token_ids"] = [token]
        if self.logprobs:
            choice["logprobs"] = {
                "tokens": [name(token)], "token_logprobs": [top[token]],
                "top_logprobs": [{name(one): top[one] for one in {*best, token}}],
            }  # fmt: skip
        return {"choices": [choice]}


def main():
    """Serves a model on the port given, in a process of its own; `sick` never becomes healthy, `gone` ends at once."""
    port, how = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    print("scripted server speaking", flush=True)
    if how == "gone":
        sys.exit(7)
    model = Model()
    sick = page({"error": {"message": "loading"}}, 503)
    server = Scripted((lambda call: sick) if how == "sick" else model, port)
    server.run()


if __name__ == "__main__":
    main()
