"""One request and its answer: sent once, read to its end, checked. It does not know schedules.

Rules: what goes wrong names the request; an answer carries the evidence the endpoint was seen to offer, or it is an
error; nothing comes after [DONE]; a request that is to leave is left by closing its connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import cast

from engines.http.answer import Answer, Naming, Offer
from engines.http.client import Client, EndpointError, Json
from engines.http.dialect import Dialect, Prompt
from engines.http.sse import DONE
from harness.errors import EngineError
from harness.request import Request

IDENTITY_HEADER = "x-samebits-fingerprint"  # `samebits serve`: the digest over its identity fields


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One request under way. Times are `time.perf_counter()`; `leave_after` tokens it is given up, None: never."""

    request: Request
    prompt: Prompt
    dialect: Dialect
    body: Json
    companion: bool = False
    leave_after: int | None = None
    sent_at: float = 0.0
    ended_at: float = 0.0
    answers: tuple[Answer, ...] = ()
    fingerprints: set[str] = field(default_factory=set)  # what answers said of the system that made them
    identity: str = ""  # the digest in the answer's header, where a server sends one
    done: bool = False
    left: bool = False

    @property
    def generated(self) -> int:
        """Tokens of the slowest choice so far."""
        return min((len(answer.tokens) for answer in self.answers), default=0)

    def take_head(self, headers: Mapping[str, str], sent_at: float) -> None:
        """Keeps what an answer's headers say of who made it, and when the whole request had been written."""
        self.identity = headers.get(IDENTITY_HEADER, "")
        self.sent_at = sent_at


def open_exchange(
    dialect: Dialect, request: Request, prompt: Prompt, model: str, *, companion: bool, leave_after: int | None
) -> Exchange:
    """Makes the body. Raises Unsupported for what the interface has no word for."""
    return Exchange(
        request=request, prompt=prompt, dialect=dialect, body=dialect.body(request, prompt, model),
        companion=companion, leave_after=leave_after,
    )  # fmt: skip


async def run_exchange(client: Client, exchange: Exchange, offer: Offer | None, moved: Callable[[], None]) -> None:
    """Sends and reads; `moved` is called after every event. `offer` None: whatever comes is taken.

    Raises EngineError, naming the request.
    """
    sampling, dialect = exchange.request.sampling, exchange.dialect
    exchange.answers = tuple(Answer(candidates=sampling.logprobs) for _ in range(sampling.n))
    exchange.sent_at = time.perf_counter()  # until it is known when it was written
    try:
        if dialect.streams:
            await _stream(client, exchange, moved)
        else:
            event = await client.post(dialect.path, exchange.body, exchange.take_head)
            _read(client, exchange, event, time.perf_counter())
        exchange.ended_at = time.perf_counter()
        if not exchange.left:
            _close(exchange, offer)
    except EndpointError as error:
        raise _named(exchange, error) from error
    except ValueError as error:
        raise _named(exchange, EndpointError(f"POST {dialect.path}: {client.scrub(str(error))}")) from error
    exchange.done = True  # not where it failed: nobody who waits for this request is to be sent then
    moved()


async def _stream(client: Client, exchange: Exchange, moved: Callable[[], None]) -> None:
    done, dialect = False, exchange.dialect
    what = f"POST {dialect.path}"
    async with aclosing(client.events(dialect.path, exchange.body, exchange.take_head)) as events:
        async for at, data in events:
            if done:
                raise ValueError("something came after [DONE]")
            if data == DONE:
                done = True
                continue
            _read(client, exchange, client.read_json(data, what), at)
            if exchange.leave_after is not None and exchange.generated >= exchange.leave_after:
                exchange.left = any(answer.finish is None for answer in exchange.answers)
                if exchange.left:
                    return
            moved()
    if dialect.needs_done and not done:
        raise ValueError(f"the stream ended after {exchange.generated} tokens without [DONE]: it was cut off")


def _read(client: Client, exchange: Exchange, event: Mapping[str, object], at: float) -> None:
    error = event.get("error")
    if error:
        message = error.get("message") if isinstance(error, dict) else error
        raise EndpointError(f"POST {exchange.dialect.path}: the server reports an error: {client.scrub(str(message))}")
    system = event.get("system_fingerprint")
    if isinstance(system, str):
        exchange.fingerprints.add(system)
    exchange.dialect.read(dict(event), exchange.answers, at)


def _close(exchange: Exchange, offer: Offer | None) -> None:
    for answer in exchange.answers:
        answer.close()
        if offer is not None and _less(answer.offer, offer):
            raise ValueError(f"evidence is missing: this answer has {_said(answer.offer)}, others had {_said(offer)}")
    ids, counted = exchange.prompt.ids, exchange.answers[0].prompt_tokens
    if ids is not None and counted is not None and counted != len(ids):
        raise ValueError(f"the server counts {counted} prompt tokens, {len(ids)} were sent")


def refuse_other_identity(exchanges: Iterable[Exchange], identity: str) -> None:
    """Raises EngineError where an answer came from a server of another identity than the probes'."""
    for one in exchanges:
        if one.done and one.identity != identity:
            raise EngineError(
                f"request {one.request.id!r}: the server's identity changed while it was asked: {IDENTITY_HEADER} was "
                f"{identity or 'not sent'}, now it is {one.identity or 'not sent'}"
            )


_NAMINGS: Sequence[Naming] = ("text", "names", "ids")


def _less(found: Offer, promised: Offer) -> bool:
    """Whether an answer holds less than the endpoint was seen to offer; candidates may not have been asked for."""
    return _NAMINGS.index(found.naming) < _NAMINGS.index(promised.naming) or (promised.logprobs and not found.logprobs)


def _said(offer: Offer) -> str:
    told = {"ids": "token ids", "names": "tokens by their text", "text": "text alone"}[offer.naming]
    return f"{told}, {'logprobs' if offer.logprobs else 'no logprobs'}"


def _named(exchange: Exchange, error: EndpointError) -> EngineError:
    seconds = time.perf_counter() - exchange.sent_at
    return cast(
        "EngineError", EndpointError(f"request {exchange.request.id!r} after {seconds:.2f} s: {error}", error.status)
    )
