"""GET /admin/requests and /admin/requests/{id}: what is live, and which limit holds each back. No prompt, no text."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from guidevane_runtime.core.messages import Explanation
from guidevane_runtime.errors import EngineUnavailable, NotFound
from guidevane_runtime.server.services import SERVICES, Services

MAX_LISTED = 100
"""Requests in one answer, the oldest: those are what somebody looks for, and the engine answers between two steps."""
EXPLAIN_TIMEOUT_S = 30.0
"""Longest wait for the engine's next iteration: above its longest step."""

routes = web.RouteTableDef()


@routes.get("/admin/requests")
async def list_requests(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    return _body(services, await _explain(services, services.live.oldest(MAX_LISTED)), len(services.live))


@routes.get("/admin/requests/{id}")
async def show_request(request: web.Request) -> web.Response:
    """By the client's X-Request-Id, under which there may be several, or by the engine's own id."""
    services, name = request.app[SERVICES], request.match_info["id"]
    explained = await _explain(services, services.live.named(name, MAX_LISTED))
    if not explained:
        raise NotFound(
            f"request {name[:128]!r} is not with the engine: it has ended, was refused, or was never sent; "
            "GET /admin/requests lists those that are",
            code="request_not_found",
        )
    return _body(services, explained, len(explained))


async def _explain(services: Services, request_ids: Sequence[str]) -> tuple[Explanation, ...]:
    if not request_ids:
        return ()
    try:
        async with asyncio.timeout(EXPLAIN_TIMEOUT_S):
            return await services.engine.explain(request_ids)
    except TimeoutError as error:
        raise EngineUnavailable(f"the engine gave no answer within {EXPLAIN_TIMEOUT_S:.0f} s") from error


def _body(services: Services, explained: Sequence[Explanation], total: int) -> web.Response:
    body = {"requests": [_entry(services, one) for one in explained], "total": total}
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def _entry(services: Services, one: Explanation) -> dict[str, Any]:
    origin = services.live.origin(one.request_id)
    return {
        "id": one.request_id,
        "requestId": origin.client_id if origin else "",
        "tenant": origin.standing.tenant if origin else "",
        "class": origin.standing.request_class if origin else None,
        "state": one.state,
        "position": one.position,
        "ageSeconds": round(one.age_s, 3),
        "numPromptTokens": one.num_prompt_tokens,
        "numOutputTokens": one.num_output_tokens,
        "numComputedTokens": one.num_computed_tokens,
        "numPreemptions": one.num_preemptions,
        "heldBackBy": {
            "limit": str(one.hold),
            "value": one.value,
            "bound": one.bound,
            "request": one.held_at,
            "message": one.why,
        },
    }
