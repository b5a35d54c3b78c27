"""Around every handler: ids on every answer, errors as JSON, one count per answer."""

import logging

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from guidevane_runtime.core.door import Refused
from guidevane_runtime.errors import EngineUnavailable, GuidevaneError, ServerError
from guidevane_runtime.server.admission import refusal_error, retry_after_s
from guidevane_runtime.server.error_body import HttpError, error_response, log_failure
from guidevane_runtime.server.metrics import ServerMetrics
from guidevane_runtime.server.peers import watch_peer
from guidevane_runtime.server.services import SERVICES
from guidevane_runtime.server.tracing import IDS, RequestIds

logger = logging.getLogger(__name__)

CLIENT_GONE = 499
"""nginx's status for a client that did not wait for its answer; nobody reads it but /metrics."""


def error_middleware(metrics: ServerMetrics | None = None) -> Middleware:
    """Turns what a handler raises into a JSON answer, and counts answers where metrics are given."""

    @web.middleware
    async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[IDS] = RequestIds.of(request.headers)
        watch_peer(request.transport)
        status = CLIENT_GONE
        try:
            response = await _answered(request, handler)
            status = response.status
            return response
        finally:
            # A handler whose client disconnects is cancelled: it has no response, and is counted all the same.
            if metrics is not None:
                metrics.http_answered(_method_name(request), _route_name(request), status)

    return answer_errors


async def add_ids(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler of on_response_prepare."""
    ids = request.get(IDS)
    if ids is not None:
        response.headers.update(ids.headers())


async def close_while_draining(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler of on_response_prepare: a client that comes again is to come to another process."""
    if request.app[SERVICES].gate.is_draining:
        response.headers[hdrs.CONNECTION] = "close"
        response.force_close()


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await _mapped(request, handler)
    except GuidevaneError as error:
        log_failure(request, error)
        return error_response(request, error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return error_response(request, HttpError(error, _http_message(request, error)))
    except ConnectionError:
        return _hung_up(request)
    except Exception:
        ids = request[IDS]
        logger.exception("handler failed", extra={"request_id": ids.request_id, "trace_id": ids.trace_id})
        return error_response(request, ServerError("an unexpected error; quote the request id when you report it"))


async def _mapped(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refused as refused:
        raise refusal_error(refused) from refused
    except EngineUnavailable as error:
        error.retry_after_s = retry_after_s(request.app[SERVICES].gate.load_wait_s)
        raise


def _hung_up(request: web.Request) -> web.Response:
    """Nobody reads the answer: cut the connection, and count it."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=CLIENT_GONE)


def _http_message(request: web.Request, error: web.HTTPException) -> str:
    if error.status == 404:
        return f"no route {request.method} {request.path[:200]}"
    if error.status == 405:
        return f"{request.method[:20]} is not allowed on {request.path[:200]}"
    return error.text or error.reason


def _method_name(request: web.Request) -> str:
    """HTTP lets a client make up methods; a label's values stay few."""
    return request.method if request.method in hdrs.METH_ALL else "other"


def _route_name(request: web.Request) -> str:
    """The route's pattern, never the path a client made up: a label's values stay few."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "none"
