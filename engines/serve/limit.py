"""Bounds the size of request bodies. It knows no routes.

Rules: a body that announces itself too large is refused before it is read; one that lies is refused as soon as it has
grown too large.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from engines.serve.errors import ApiError, error_body

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOO_LARGE = 413


class BodyLimit:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        """`most` is in bytes."""
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on with its body counted."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdigit() and int(announced) > self._most:
            error = ApiError(TOO_LARGE, self._message(), None, "body_too_large")
            await JSONResponse(error_body(error), TOO_LARGE)(scope, receive, send)
            return
        await self._app(scope, self._counted(receive), send)

    def _counted(self, receive: Receive) -> Receive:
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._most:
                raise HTTPException(TOO_LARGE, self._message())
            return message

        return counted

    def _message(self) -> str:
        return f"the body is larger than {self._most} bytes; split the request, or raise --max-body-bytes"
