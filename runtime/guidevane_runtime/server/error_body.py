"""Errors as clients see them: OpenAI's shape, and the ids to ask about."""

import logging
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from guidevane_runtime.errors import ClientError, GuidevaneError, Overloaded, WaitedTooLong
from guidevane_runtime.server.tracing import IDS

logger = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""OpenAI's vocabulary by status; every other 4xx is an invalid_request_error."""

_CODES = {
    400: "invalid_request",
    401: "not_authenticated",
    404: "not_found",
    405: "method_not_allowed",
    409: "conflict",
    413: "body_too_large",
    415: "unsupported_media_type",
    429: "too_many_requests",
    500: "internal_error",
    503: "engine_unavailable",
    504: "queue_timeout",
}
"""For an error that names none itself."""

MAX_MESSAGE_CHARS = 800
"""A client's own bytes come back in some messages; the body stays under 4 KiB."""


def error_body(request: web.Request, error: GuidevaneError) -> dict[str, Any]:
    """The `{"error": ...}` of a body or of an event in a stream."""
    ids = request[IDS]
    return {
        "error": {
            "message": error.message[:MAX_MESSAGE_CHARS],
            "type": _TYPES.get(error.status, "invalid_request_error"),
            "param": error.param,
            "code": code_of(error),
            "request_id": ids.request_id,
            "trace_id": ids.trace_id,
        }
    }


def error_response(request: web.Request, error: GuidevaneError) -> web.Response:
    """The whole answer to a request that failed before its first byte."""
    return web.Response(
        status=error.status,
        headers=_headers(error),
        body=msgspec.json.encode(error_body(request, error)),
        content_type="application/json",
    )


def log_failure(request: web.Request, error: GuidevaneError) -> None:
    """One line per request that we failed. Refusals are for debugging: under overload they come by thousands."""
    ids = request[IDS]
    is_ours = error.status >= 500 and not isinstance(error, Overloaded | WaitedTooLong)
    level = logging.WARNING if is_ours else logging.DEBUG
    extra = {"code": code_of(error), "status": error.status, "request_id": ids.request_id, "trace_id": ids.trace_id}
    logger.log(level, "request failed", extra=extra)


def quotes_no_client(record: logging.LogRecord) -> bool:
    """Filter of the HTTP library's log: what is no HTTP was answered with 400, and may be part of a prompt."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def code_of(error: GuidevaneError) -> str:
    """The stable reason that programs read."""
    return error.code or _CODES.get(error.status, "error")


def _headers(error: GuidevaneError) -> dict[str, str]:
    """What a client's library obeys without reading the body."""
    if error.retry_after_s is not None:
        return {"Retry-After": str(error.retry_after_s)}
    if error.status == 504:
        # SDKs retry a 504 by themselves, which adds load just when there is too much of it.
        return {"x-should-retry": "false"}
    if error.status == 401:
        return {"WWW-Authenticate": "Bearer"}
    return {"Allow": error.allow} if isinstance(error, HttpError) and error.allow else {}


class HttpError(ClientError):
    """What the HTTP library itself refuses: no such route or method, a body too large."""

    def __init__(self, cause: web.HTTPException, message: str) -> None:
        super().__init__(message)
        self.status = cause.status
        self.allow = cause.headers.get("Allow")
