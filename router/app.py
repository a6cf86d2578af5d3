"""The ASGI application: routes, the shape of errors, and the request id in every answer."""

from __future__ import annotations

import functools
import logging
import re
import secrets

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.bodies import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router.control import Control
from router.errors import ApiError
from router.front import Front
from router.json_text import JsonAnswer
from router.status import VERSION, Status

_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")

log = logging.getLogger("baton.http")


def build_app(front: Front, status: Status, control: Control) -> ASGIApp:
    app = FastAPI(title="Baton", version=VERSION, docs_url=None, redoc_url=None)
    for path, endpoint, body in (
        ("/v1/completions", front.completions, CompletionBody),
        ("/v1/chat/completions", front.chat, ChatBody),
        ("/tokenize", front.tokenize, TokenizeBody),
        ("/detokenize", front.detokenize, DetokenizeBody),
    ):
        app.add_api_route(path, endpoint, methods=["POST"], response_model=None, openapi_extra=_described(body))
    for path, getter in (
        ("/v1/models", status.models),
        ("/v1/models/{name:path}", status.model),
        ("/health", status.health),
        ("/live", status.live),
        ("/ready", status.ready),
        ("/server_info", status.server_info),
        ("/version", status.version),
        ("/metrics", status.metrics_page),
        ("/audit", control.audit),
    ):
        app.add_api_route(path, getter, methods=["GET"], response_model=None)
    app.add_api_route("/flush_cache", control.flush_cache, methods=["POST"], response_model=None)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_fault)
    return RequestIds(app)


@functools.cache
def _described(body: type[Body]) -> dict[str, object]:
    """Bodies are read by our own code, so the framework must be told what they are."""
    schema = body.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JsonAnswer(error.body(), status_code=error.status, headers=error.headers())


async def _on_http_error(request: Request, error: Exception) -> Response:
    """No such path, or another method."""
    assert isinstance(error, HTTPException)
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    told = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}", code=code)
    return JsonAnswer(told.body(), status_code=error.status_code, headers=dict(error.headers or {}))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """Nobody reads this."""
    return Response(status_code=400)


async def _on_fault(request: Request, error: Exception) -> Response:
    """Ours. The server logs the traceback."""
    return JsonAnswer(ApiError(500, "internal error", code="internal").body(), status_code=500)


class RequestIds:
    """Every answer has an x-request-id: the client's own, if it is printable and short."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, _with_id(send, _given_id(scope)) if scope["type"] == "http" else send)


def _given_id(scope: Scope) -> str:
    given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), "")
    return given if _GOOD_ID.fullmatch(given) else secrets.token_hex(12)


def _with_id(send: Send, request_id: str) -> Send:
    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["x-request-id"] = request_id
        await send(message)

    return send_with_id
