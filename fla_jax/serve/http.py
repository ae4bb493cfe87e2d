"""Errors as answers, and a count of answers."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .metrics import Metrics
from .protocol import APIError


class Counted:
    """Counts answers by path and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the class."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._metrics.answers.labels(path, message["status"]).inc()
            await send(message)

        await self._app(scope, receive, counted)


async def _api_error(http: HTTPRequest, error: Exception) -> Response:
    assert isinstance(error, APIError)
    headers = {"Retry-After": "1"} if error.status == 429 else None
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


async def _http_error(http: HTTPRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{http.method} {http.url.path}: {error.detail}"
    return JSONResponse(APIError(error.status_code, message).body(), error.status_code, error.headers)


async def _disconnected(http: HTTPRequest, error: Exception) -> Response:
    """Nobody reads the answer, but it is counted."""
    return await _api_error(http, APIError(499, "The client disconnected", code="disconnected"))


async def _unexpected(http: HTTPRequest, error: Exception) -> Response:
    return JSONResponse(APIError(500, "Internal error; see the server's log").body(), status_code=500)


HANDLERS = {
    APIError: _api_error,
    HTTPException: _http_error,
    ClientDisconnect: _disconnected,
    Exception: _unexpected,
}
