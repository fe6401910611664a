"""The routes. Each reads a body, makes an order, and answers; nothing is computed here.

Rules: tokenising and reading the fingerprint happen off the event loop; an order whose client has gone is taken out of
the engine; every error has OpenAI's shape.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as BaseHTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from engines.serve.answers import Head, streamed_answer, whole_answer
from engines.serve.counts import CONTENT_TYPE, prometheus_text
from engines.serve.errors import ApiError, error_body, from_validation
from engines.serve.exchange import Exchange
from engines.serve.limit import BodyLimit
from engines.serve.orders import Order, order_chat, order_completion
from engines.serve.pieces import Piece
from engines.serve.protocol import Body, ChatBody, CompletionBody
from engines.serve.service import STOP_TIMEOUT_S, Service
from harness import __version__

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

HEADER = "x-samebits-fingerprint"
CLIENT_GONE = 499  # nginx's number; nobody reads it
_BODIES: dict[str, type[Body]] = {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody}


class EventStream(StreamingResponse):
    """Server-sent events of one exchange, which is released however the response ends."""

    def __init__(self, head: Head, exchange: Exchange) -> None:
        """Nothing is sent yet."""
        headers = {HEADER: head.fingerprint, "cache-control": "no-cache"}
        super().__init__(streamed_answer(head, exchange), headers=headers, media_type="text/event-stream")
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends until the end, or until the client is gone."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._exchange.release()


def create_app(service: Service, max_body_bytes: int) -> FastAPI:
    """The application. Its lifespan starts and ends the engine's thread."""
    app = FastAPI(title="samebits serve", version=__version__, docs_url=None, redoc_url=None, lifespan=_lifespan)
    app.state.service = service
    app.add_middleware(BodyLimit, most=max_body_bytes)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _bad_body)
    app.add_exception_handler(BaseHTTPException, _http_error)
    app.add_exception_handler(Exception, _server_error)
    for path, route in (("/v1/completions", _completions), ("/v1/chat/completions", _chat)):
        app.post(path, response_model=None)(route)
    for path, page in (
        ("/v1/models", _models), ("/v1/models/{name}", _model), ("/health", _health), ("/version", _version),
        ("/metrics", _metrics), ("/samebits/fingerprint", _fingerprint),
    ):  # fmt: skip
        app.get(path, response_model=None)(page)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    bridge = _service(app).bridge
    bridge.start()
    yield
    await asyncio.to_thread(bridge.stop, STOP_TIMEOUT_S)


def _service(app: FastAPI) -> Service:
    service = app.state.service
    if not isinstance(service, Service):
        raise TypeError(f"expected a Service in the application's state, got {service!r}")
    return service


async def _completions(body: CompletionBody, request: Request) -> Response:
    service = _service(request.app)
    return await _answer(await asyncio.to_thread(order_completion, body, service.kitchen), service, request)


async def _chat(body: ChatBody, request: Request) -> Response:
    service = _service(request.app)
    return await _answer(await asyncio.to_thread(order_chat, body, service.kitchen), service, request)


async def _answer(order: Order, service: Service, request: Request) -> Response:
    exchange, head = service.begin(order), service.head()
    if order.stream:
        return EventStream(head, exchange)
    try:
        pieces = await _unless_gone(exchange, request)
    finally:
        exchange.release()
    if pieces is None:
        return Response(status_code=CLIENT_GONE)
    return JSONResponse(whole_answer(head, exchange, pieces), headers={HEADER: head.fingerprint})


async def _unless_gone(exchange: Exchange, request: Request) -> list[Piece] | None:
    """The finished choices, or None as soon as the client has closed the connection."""
    whole = asyncio.create_task(exchange.whole())
    gone = asyncio.create_task(_wait_until_gone(request))
    try:
        await asyncio.wait({whole, gone}, return_when=asyncio.FIRST_COMPLETED)
        return whole.result() if whole.done() else None
    finally:
        for task in (whole, gone):
            task.cancel()


async def _wait_until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_model_card(_service(request.app))]})


async def _model(name: str, request: Request) -> Response:
    service = _service(request.app)
    if name != service.kitchen.model_name:
        raise ApiError(404, f"model: {name!r} is not served here; {service.kitchen.model_name!r} is", "model",
                       "model_not_found")  # fmt: skip
    return JSONResponse(_model_card(service))


def _model_card(service: Service) -> dict[str, object]:
    return {
        "id": service.kitchen.model_name,
        "object": "model",
        "created": service.started,
        "owned_by": "samebits",
        "max_model_len": service.kitchen.room.most,
    }


async def _health(request: Request) -> Response:
    service = _service(request.app)
    if service.bridge.broken is not None:
        raise ApiError(503, service.bridge.broken, None, "engine_error")
    return JSONResponse({"status": "draining" if service.draining else "ok"})


async def _version(request: Request) -> Response:  # noqa: ARG001 - every page takes the request
    return JSONResponse({"version": __version__})


async def _metrics(request: Request) -> Response:
    service = _service(request.app)
    return PlainTextResponse(prometheus_text(service.bridge.counts, service.digest), media_type=CONTENT_TYPE)


async def _fingerprint(request: Request) -> Response:
    record = await asyncio.to_thread(_service(request.app).fingerprint)
    return JSONResponse(record.to_json())


async def _api_error(_request: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    return JSONResponse(error_body(error), error.status)


async def _bad_body(request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    known = _BODIES[request.url.path].model_fields if request.url.path in _BODIES else {}
    return await _api_error(request, from_validation(error.errors(), list(known)))


async def _http_error(request: Request, error: Exception) -> Response:
    """What the framework itself refuses: unknown paths and methods, bodies that are too large or unreadable."""
    if not isinstance(error, HTTPException | BaseHTTPException):
        raise error
    codes = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = await _api_error(request, ApiError(error.status_code, message, None, codes.get(error.status_code)))
    response.headers.update(error.headers or {})
    return response


async def _server_error(request: Request, error: Exception) -> Response:
    message = f"{request.method} {request.url.path}: {type(error).__name__}; the server's log has the rest"
    return await _api_error(request, ApiError(500, message, None, "internal_error"))
