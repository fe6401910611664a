"""An endpoint as the harness runs it: one lifetime, works one after another. It does not judge.

Rules: a managed server lives and ends with this lifetime; what the endpoint offers is found out by trying, once, and
stated among what is observed, so that no verdict claims more; the key is read from the environment here and goes
nowhere but into requests.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from engines.http.client import Client
from engines.http.exchange import IDENTITY_HEADER, open_exchange
from engines.http.identity import Identity, read_identity
from engines.http.managed import ManagedServer
from engines.http.options import NOT_FORCED, Options
from engines.http.probe import WORDS, Found, probe, probe_request
from engines.http.prompts import build_prompt
from engines.http.run import Ran, Route, run_paths, run_work
from engines.http.scoring import SAID
from engines.http.timed import HttpSession
from engines.http.traces import write_traces
from harness import limits
from harness.engine import Field, Footprint, Progress, Scalar, TimedSession, Tokenizer, Work
from harness.errors import EngineError, Unsupported
from harness.request import Request
from harness.schedule import Schedule
from harness.traces import Traces

T = TypeVar("T")
_COMPANY = "who ran beside whom is read from interleaved streams, not from the server's own steps"


@dataclass(slots=True, kw_only=True)
class Endpoint:
    """A server that answers; implements `harness.engine.Engine`."""

    options: Options
    model: str
    tokenizer: Tokenizer
    url: str
    key: str | None
    server: ManagedServer | None
    identity: Identity
    found: Found
    systems: set[str] = field(default_factory=set)  # system fingerprints that answers carried
    sent: int = 0
    redirected: int = 0
    failed: int = 0
    inexact: int = 0

    def resolved(self) -> Mapping[str, Scalar]:
        """Which interface, in which form."""
        return {"api": self.options.api, "flavour": self.options.flavour.name, "replica": self.options.replica,
                "managed": self.server is not None, "scored_prompt": self.options.scored_prompt,
                "scoring": "decode" if self.options.scorer is None else "prefill"}  # fmt: skip

    def observed(self) -> Mapping[str, Scalar]:
        """What is known of the server that answers, what was sent, and what may be claimed at most."""
        notes = {limits.RULE: self.found.rule, limits.RULE_REASON: self.found.rule_reason, limits.COMPANY: _COMPANY}
        if self.found.seeds != "obeyed":
            notes[limits.SAMPLING] = self.found.seeds_reason
        if len(self.systems) > 1:
            notes[limits.MIXED] = (
                f"answers carried {len(self.systems)} system fingerprints: {', '.join(sorted(self.systems))}"
            )
        if self.options.scorer is not None:
            notes[limits.PICKS] = SAID
        if self.inexact:
            notes[limits.ROUNDED] = f"{self.inexact} logprobs were written with fewer digits than a float32 has"
        return {
            **notes,
            "replica": self.instance,
            "seeds": self.found.seeds,
            "requests_sent": self.sent,
            "requests_failed": self.failed,
            "redirects_followed": self.redirected,
            "tokens_told_by": self.found.offer.naming,
        }

    @property
    def instance(self) -> str:
        """What tells this server process from another: our own name for it, else its start, else its address."""
        if self.server is not None:
            return f"started here as {self.server.instance}"
        return self.url if self.identity.began is None else f"{self.url} begun at {self.identity.began:.2f}"

    def fingerprint(self) -> tuple[Field, ...]:
        """What the server says of itself."""
        systems, digest = ", ".join(sorted(self.found.fingerprints)) or "none", self.found.identity
        header = Field(name="server.identity_digest", value=digest, field_class="identity",
                       source=f"header {IDENTITY_HEADER}")  # fmt: skip
        return (
            *self.identity.fields,
            *((header,) if digest else ()),
            Field(name="server.system_fingerprint", value=systems, field_class="lineage", source="answers to probes"),
        )

    def generate(self, work: Work, progress: Progress) -> Traces:
        """Runs one work. Raises EngineError, Unsupported."""
        self._refuse(work)
        if self.server is not None:
            self.server.check()
        dialect = self.options.dialect
        prompts = {
            one.id: build_prompt(one, dialect, self.options.prompts, self.model, self.tokenizer)
            for one in work.requests
        }
        options, sent = self.options, len(work.requests)
        route = self._route()

        async def run(client: Client) -> Ran:
            try:
                if options.scorer is None:
                    return await run_work(client, route, work, prompts, progress)
                return await run_paths(client, route, work, prompts, progress, options.scorer, options.scored_prompt)
            finally:
                self.redirected += client.redirects

        self.sent += sent if options.scorer is None or work.replay == "golden" else 2 * sent
        try:
            ran: Ran = _with_client(self.url, self.key, options, run)
        except EngineError:
            self.failed += 1
            raise
        self.systems.update(name for one in ran.exchanges for name in one.fingerprints)
        traces = write_traces(ran, self.found.offer)
        self.inexact += dict(traces.counters)["inexact_numbers"]
        return traces

    def _route(self) -> Route:
        return Route(
            flavour=self.options.flavour, dialect=self.options.dialect, model=self.identity.model,
            offer=self.found.offer, identity=self.found.identity,
        )  # fmt: skip

    def open_timed(self, requests: Sequence[Request]) -> TimedSession:
        """Serves by the clock. Raises EngineError, Unsupported."""
        nobody = Schedule(name="by the clock", arrivals=())
        work = Work(requests=tuple(requests), schedule=nobody, replay="natural", golden={}, logits_digests=False)
        self._refuse(work)
        if self.options.scorer is not None:
            raise Unsupported("scoring=prefill reads paths that are known; nothing is served by the clock")
        if self.server is not None:
            self.server.check()
        dialect = self.options.dialect
        route = self._route()
        prepared = {
            one.id: open_exchange(
                dialect, one, build_prompt(one, dialect, self.options.prompts, self.model, self.tokenizer),
                route.model, companion=False, leave_after=None,
            )
            for one in requests
        }  # fmt: skip
        self.sent += len(requests)
        return HttpSession(
            lambda: Client(self.url, self.key, self.options.bounds, reuse=self.options.flavour.reuse), route, prepared,
            self.found.offer,
        )  # fmt: skip

    def footprint(self) -> Footprint:
        """An endpoint does not say what it takes."""
        return Footprint(peak_memory_bytes=None, peak_device_bytes=None, kv_capacity_tokens=None)

    def stop(self) -> None:
        """Ends a managed server."""
        if self.server is not None:
            self.server.stop()

    def _refuse(self, work: Work) -> None:
        if work.replay == "golden" and self.options.scorer is None:
            raise Unsupported(NOT_FORCED)
        if work.logits_digests:
            raise Unsupported("an endpoint gives no logits to digest")
        seeded = [one.id for one in work.requests if one.sampling.seed is not None and one.sampling.temperature > 0]
        if seeded and self.found.seeds == "refused":
            raise Unsupported(
                f"request {seeded[0]!r} has a seed. The sampling layer is unsolved: {self.found.seeds_reason}"
            )


def open_endpoint(model: str, options: Options, tokenizer: Tokenizer) -> Endpoint:
    """Starts or attaches, reads what the server says of itself, and probes it. Raises EngineError, Unsupported."""
    key = _key(options.api_key_env)
    server = ManagedServer(options, model) if options.managed else None
    try:
        url = server.url if server is not None else options.url
        prompt = build_prompt(
            probe_request(tokenizer.encode(WORDS), None), options.dialect, options.prompts, model, tokenizer
        )

        async def ask(client: Client) -> tuple[Identity, Found]:
            identity = await read_identity(client, options.flavour, options.served_model)
            return identity, await probe(client, options.dialect, identity.model, prompt)

        identity, found = _with_client(url, key, options, ask)
        return Endpoint(
            options=options, model=model, tokenizer=tokenizer, url=url, key=key, server=server, identity=identity,
            found=found, systems=set(found.fingerprints),
        )  # fmt: skip
    except BaseException:
        if server is not None:
            server.stop()
        raise


def _with_client(url: str, key: str | None, options: Options, action: Callable[[Client], Awaitable[T]]) -> T:
    async def run() -> T:
        async with Client(url, key, options.bounds, reuse=options.flavour.reuse) as client:
            return await action(client)

    return asyncio.run(run())


def _key(variable: str) -> str | None:
    """The key in the named variable. Raises EngineError where it is not set or empty."""
    if not variable:
        return None
    key = os.environ.get(variable, "")
    if not key:
        raise EngineError(f"api_key_env: the variable {variable} is not set or empty")
    return key
