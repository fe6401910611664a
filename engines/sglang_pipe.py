"""SGLang's offline engine where `engines.http` expects a server: the same requests, answers and checks, without HTTP.

It does not know works or traces. Rules: a chunk of `async_generate` is an event of `/generate`, word for word; a stream
that is left is aborted by its request id; nothing is sent twice.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from typing import Any, cast

from engines.http.client import EndpointError, Heads
from engines.http.shape import Json
from engines.http.sse import DONE

_REFUSALS = (RuntimeError, TypeError, ValueError)
_UNKNOWN_OFFLINE = ("return_text_in_logprobs",)  # of the HTTP body alone


class Pipe:
    """Stands where `engines.http.client.Client` does."""

    def __init__(self, engine: Any, *, seeded: bool) -> None:  # noqa: ANN401 - sglang.Engine
        """`seeded` False: no seed is sent, whatever a request says."""
        self._engine, self._seeded, self._sent = engine, seeded, 0

    def scrub(self, text: str) -> str:
        """There is no key to hide."""
        return text

    def read_json(self, data: bytes, what: str) -> Json:
        """An event's object. Raises EndpointError."""
        value = json.loads(data)
        if not isinstance(value, dict):
            raise EndpointError(f"{what}: expected an object, found {type(value).__name__}")
        return value

    async def post(self, _path: str, body: Json, _heads: Heads) -> Json:
        """The whole answer to a request that is not streamed. Raises EndpointError in SGLang's words."""
        try:
            answer = await self._engine.async_generate(**self._words(body), rid=self._name())
        except _REFUSALS as error:
            raise EndpointError(f"SGLang: {type(error).__name__}: {error}") from error
        return self.read_json(json.dumps(answer).encode(), "async_generate")

    def _words(self, body: Json) -> Json:
        words = {key: value for key, value in body.items() if key not in _UNKNOWN_OFFLINE}
        if not self._seeded:
            given = cast("Json", words["sampling_params"])
            words["sampling_params"] = {key: value for key, value in given.items() if key != "sampling_seed"}
        return words

    def _name(self) -> str:
        self._sent += 1
        return f"samebits-{self._sent}"

    async def events(self, _path: str, body: Json, _heads: Heads) -> AsyncGenerator[tuple[float, bytes], None]:
        """(time, chunk) of one request, then [DONE]. Raises EndpointError in SGLang's words."""
        words, rid, over = self._words(body), self._name(), False
        try:
            try:
                async for chunk in await self._engine.async_generate(**words, rid=rid):
                    over = chunk.get("meta_info", {}).get("finish_reason") is not None
                    yield time.perf_counter(), json.dumps(chunk).encode()
            except _REFUSALS as error:
                over = True
                raise EndpointError(f"SGLang: {type(error).__name__}: {error}") from error
            yield time.perf_counter(), DONE
        finally:
            if not over:
                self._engine.tokenizer_manager.abort_request(rid=rid)
