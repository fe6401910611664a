"""One HTTP client for every endpoint: bounded, never retried, never led elsewhere, and silent about its key.

It does not know what requests mean. Rules: a request is answered once, and whatever goes wrong with it is an
EndpointError that says what was seen; a redirect is followed a few times within one scheme, host and port, where it
keeps the method, and refused otherwise, so that a key never reaches another place; neither proxies nor credentials
are taken from the environment, for no record would carry them; bytes are bounded per answer, silence and whole
requests in time; the key is taken out of everything that is said.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, Self, cast
from urllib.parse import SplitResult, urljoin, urlsplit

import httpx

from engines.http.collector import allow_full_collections, hold_full_collections
from engines.http.network import ARRIVED, SENT, StampedTransport
from engines.http.sse import EventParser
from harness.errors import EngineError

Json = dict[str, object]
Heads = Callable[[Mapping[str, str], float], None]  # given headers, and when the request's last byte was written
MOST_REDIRECTS = 3
MOST_QUOTED = 300  # characters of a server's own words
MOST_ERROR_BYTES = 4096
_REDIRECT, _ERROR = 300, 400
_TOO_MANY = 429
_REPEATED = (307, 308)  # redirects that keep method and body (RFC 9110, section 15.4)
_FETCHED = (301, 302, 303, *_REPEATED)
_PORTS = {"http": 80, "https": 443}


class EndpointError(EngineError):
    """A request that came to nothing: refused, cut off, late, too large or unreadable. `status` is HTTP's, if any."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What one request may take: seconds without a byte, seconds in all, bytes of its answer."""

    silence_s: float
    request_s: float
    most_bytes: int


class Client:
    """Connections to one server. Use as an asynchronous context manager."""

    def __init__(self, url: str, key: str | None, bounds: Bounds, *, reuse: bool = True) -> None:
        """`url` is the server's root, with or without a path; without `reuse` every request has its own connection.

        Raises EngineError for a URL that cannot be used.
        """
        self.url = check_url(url)
        self._key = key
        self._bounds = bounds
        self.redirects = 0  # followed so far
        headers = {"accept-encoding": "identity", "user-agent": "samebits"} | ({} if reuse else {"connection": "close"})
        self._http = httpx.AsyncClient(
            headers=headers | ({"authorization": f"Bearer {key}"} if key else {}),
            timeout=httpx.Timeout(bounds.silence_s, pool=None),
            transport=StampedTransport(tls=self.url.startswith("https")),
            follow_redirects=False,
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        """Opens no connection yet; until the end, Python's collector stops nothing for long."""
        hold_full_collections()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes every connection."""
        try:
            await self._http.aclose()
        finally:
            allow_full_collections()

    def hide(self, text: str) -> str:
        """The text without the key."""
        return text.replace(self._key, "<key>") if self._key else text

    def scrub(self, text: str) -> str:
        """The text without the key, on one line and cut to what may be quoted."""
        clean = self.hide(" ".join(text.split()))
        return clean if len(clean) <= MOST_QUOTED else clean[:MOST_QUOTED] + "…"

    async def get(self, path: str) -> bytes:
        """The body of a page. Raises EndpointError."""
        return await self._whole("GET", path, None)

    async def get_json(self, path: str) -> Json:
        """The JSON object of a page. Raises EndpointError."""
        return self.read_json(await self.get(path), f"GET {path}")

    async def post(self, path: str, body: Json, heads: Heads = lambda *_: None) -> Json:
        """The JSON object that answers a body. Raises EndpointError."""
        return self.read_json(await self._whole("POST", path, body, heads), f"POST {path}")

    async def events(
        self, path: str, body: Json, heads: Heads = lambda *_: None
    ) -> AsyncGenerator[tuple[float, bytes], None]:
        """(`time.perf_counter()` at which its last byte arrived, data) of each event of a streamed answer.

        Raises EndpointError: the stream ends inside an event, or anything that `get` raises.
        """
        parser, what = EventParser(), f"POST {path}"
        try:
            async with asyncio.timeout(self._bounds.request_s), self._answer("POST", path, body) as response:
                network = response.extensions["network_stream"]
                heads(response.headers, network.get_extra_info(SENT))
                kind = response.headers.get("content-type", "")
                if not kind.startswith("text/event-stream"):
                    self._fail(what, f"expected text/event-stream, found {kind or 'no content-type'!r}")
                async for chunk in self._chunks(response, what):
                    at = network.get_extra_info(ARRIVED)
                    for data in parser.feed(chunk):
                        yield at, data
        except (httpx.HTTPError, TimeoutError) as error:
            self._fail(what, self._told(error))
        if not parser.is_between_events:
            self._fail(what, "the stream ended inside an event: it was cut off")

    def read_json(self, data: bytes, what: str) -> Json:
        """A JSON object, strictly: NaN and Infinity are no JSON. Raises EndpointError."""
        try:
            value = _JSON.decode(data.decode())
        except (ValueError, RecursionError) as error:
            shown = self.scrub(data[:80].decode(errors="replace"))
            self._fail(what, f"malformed JSON ({self.scrub(str(error))}): {shown}")
        if not isinstance(value, dict):
            self._fail(what, f"expected a JSON object, found {type(value).__name__}")
        return cast("Json", value)

    async def _whole(self, method: str, path: str, body: Json | None, heads: Heads = lambda *_: None) -> bytes:
        what, parts = f"{method} {path}", []
        try:
            async with asyncio.timeout(self._bounds.request_s), self._answer(method, path, body) as response:
                heads(response.headers, response.extensions["network_stream"].get_extra_info(SENT))
                async for chunk in self._chunks(response, what):
                    parts.append(chunk)  # noqa: PERF401 - an async comprehension would hide the bound
        except (httpx.HTTPError, TimeoutError) as error:
            self._fail(what, self._told(error))
        return b"".join(parts)

    @asynccontextmanager
    async def _answer(self, method: str, path: str, body: Json | None) -> AsyncIterator[httpx.Response]:
        """The answer, with its body unread: neither an error nor a redirect."""
        what, url, sent = f"{method} {path}", self.url + path, _encoded(body)
        for _ in range(MOST_REDIRECTS + 1):
            async with self._http.stream(method, url, **sent) as response:
                if not _REDIRECT <= response.status_code < _ERROR:
                    await self._check(response, what)
                    yield response
                    return
                url = self._target(method, url, response, what)
        self._fail(what, f"redirected more than {MOST_REDIRECTS} times; set url to where it leads")

    def _target(self, method: str, url: str, response: httpx.Response, what: str) -> str:
        """Where a redirect leads, within the server. Raises EndpointError."""
        status, location = response.status_code, str(response.headers.get("location", ""))
        if not location or status not in _FETCHED:
            self._fail(what, f"HTTP {status} is no answer and names no other place", status)
        target = urlsplit(urljoin(url, location))
        if _origin(target) != _origin(urlsplit(self.url)) or "@" in target.netloc:
            place = f"{target.scheme}://{target.netloc.rpartition('@')[2]}"
            self._fail(what, f"HTTP {status} redirects to {place}; redirects are followed within one scheme, host and "
                             "port alone, set url to where it leads", status)  # fmt: skip
        if method != "GET" and status not in _REPEATED:
            self._fail(what, f"HTTP {status} redirects to another path, where a {method} would become a GET", status)
        self.redirects += 1
        return target._replace(fragment="").geturl()

    async def _chunks(self, response: httpx.Response, what: str) -> AsyncIterator[bytes]:
        encoding = response.headers.get("content-encoding", "identity")
        if encoding != "identity":
            self._fail(what, f"content-encoding {encoding!r} was not asked for")
        received = 0
        async for chunk in response.aiter_raw():
            received += len(chunk)
            if received > self._bounds.most_bytes:
                self._fail(what, f"the answer is larger than {self._bounds.most_bytes} bytes (max_response_bytes)")
            yield chunk

    async def _check(self, response: httpx.Response, what: str) -> None:
        status = response.status_code
        if status < _REDIRECT:
            return
        quoted = b""
        async for chunk in response.aiter_raw():
            quoted += chunk
            if len(quoted) > MOST_ERROR_BYTES:
                break
        wait = response.headers.get("retry-after")
        retry = f", Retry-After {wait}" if status == _TOO_MANY and wait else ""
        self._fail(what, f"HTTP {status}{retry}: {_words(quoted)}; not retried", status)

    def _told(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"not finished within {self._bounds.request_s:g} s (request_timeout_s)"
        if isinstance(error, httpx.TimeoutException):
            return f"no byte for {self._bounds.silence_s:g} s (silence_timeout_s): {type(error).__name__}"
        return f"{type(error).__name__}: {error}; not retried"

    def _fail(self, what: str, why: str, status: int | None = None) -> NoReturn:
        raise EndpointError(f"{what}: {self.scrub(why)}", status)


def check_url(url: str) -> str:
    """The URL without a trailing slash. Raises EngineError for another scheme, credentials, a query or a fragment."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise EngineError(f"url: expected http://HOST[:PORT] or https://HOST, got {_shown(url)!r}")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise EngineError("url: expected no user, password, query or fragment; name the key's variable in api_key_env")
    return url.rstrip("/").removesuffix("/v1")


def _encoded(body: Json | None) -> dict[str, Any]:
    """What httpx is told of a body."""
    if body is None:
        return {}
    data = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    return {"content": data, "headers": {"content-type": "application/json"}}


def _origin(parts: SplitResult) -> tuple[str, str | None, int | None]:
    """Scheme, host and port; httpx has refused what is no URL."""
    return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


_JSON = json.JSONDecoder(parse_constant=_refuse_constant)  # made once: a stream holds one object per token


def _shown(url: str) -> str:
    return url.partition("?")[0].rpartition("@")[2]


def _words(body: bytes) -> str:
    """The message of an error body in OpenAI's shape, or the body as text."""
    text = body.decode(errors="replace")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text or "(no body)"
    for key in ("error", "message", "detail"):
        found = value.get(key) if isinstance(value, dict) else None
        if isinstance(found, dict):
            found = found.get("message")
        if isinstance(found, str):
            return found
    return text
