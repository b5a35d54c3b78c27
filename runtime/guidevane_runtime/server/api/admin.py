"""The admin port's door, and GET and PATCH /admin/limits, behind a bearer token. Never on the serving port."""

import asyncio
import hmac
import logging

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from pydantic import ValidationError

from guidevane_api.admin import LimitsPatch
from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.messages import SetLimits
from guidevane_runtime.errors import EngineUnavailable, Unauthorized
from guidevane_runtime.server.error_body import error_body
from guidevane_runtime.server.limits_keeper import RefusedLimits
from guidevane_runtime.server.services import SERVICES, Services

logger = logging.getLogger(__name__)

CONFIRM_TIMEOUT_S = 30.0
"""Longest wait for the engine's next iteration: above its longest step."""

routes = web.RouteTableDef()


@routes.get("/admin/limits")
async def show_limits(request: web.Request) -> web.Response:
    return _view(request.app[SERVICES])


@routes.patch("/admin/limits")
async def change_limits(request: web.Request) -> web.Response:
    """All fields at one iteration boundary, or none. Answers when the engine obeys them."""
    services = request.app[SERVICES]
    try:
        patch = _parse(await request.read())
        old = services.limits.target
        command = services.limits.change(patch)
    except RefusedLimits as error:
        body = error_body(request, error)
        body["error"]["errors"] = error.errors
        return web.json_response(body, status=error.status)
    if command is not None:
        await obey(services, command, old, f"epoch {patch.epoch} from {patch.source}")
    return _view(services)


async def obey(services: Services, command: SetLimits, old: SchedulerLimits, why: str) -> None:
    """Hand new limits to the engine, wait until a step obeyed them, and say what changed."""
    services.metrics.limits_target(services.limits.target)
    try:
        async with asyncio.timeout(CONFIRM_TIMEOUT_S):
            await services.engine.set_limits(command)
    except TimeoutError as error:
        raise EngineUnavailable(f"the engine took no limits within {CONFIRM_TIMEOUT_S:.0f} s") from error
    services.metrics.limits_changed(command.source, services.limits.epoch)
    logger.info("limits changed", extra={**_changes(old, services.limits.target), "reason": why})


async def watch_lease(services: Services, poll_interval_s: float = 1.0) -> None:
    """Go back to the start-up limits when a lease runs out. Runs until cancelled."""
    while True:
        await asyncio.sleep(poll_interval_s)
        old = services.limits.target
        command = services.limits.expire()
        if command is not None:
            await _obey_or_log(services, command, old)


def token_middleware(token: str) -> Middleware:
    """Lets in who shows the token; compared in constant time."""
    expected = token.encode()

    @web.middleware
    async def check_token(request: web.Request, handler: Handler) -> web.StreamResponse:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("utf-8", "replace"), expected):
            raise Unauthorized("the admin port needs its bearer token: Authorization: Bearer <token>")
        return await handler(request)

    return check_token


async def _obey_or_log(services: Services, command: SetLimits, old: SchedulerLimits) -> None:
    try:
        await obey(services, command, old, "the lease was not renewed")
    except EngineUnavailable as error:
        # The client hands the limits to the next engine, so nothing is lost.
        logger.warning("limits wait for the engine", extra={"reason": error.message})


def _parse(raw: bytes) -> LimitsPatch:
    try:
        return LimitsPatch.model_validate_json(raw)
    except ValidationError as error:
        found = {".".join(map(str, one["loc"])) or "body": one["msg"] for one in error.errors(include_url=False)}
        raise RefusedLimits({field: f"{field}: {message}" for field, message in found.items()}) from error


def _view(services: Services) -> web.Response:
    view = services.limits.view(services.stats)
    body = msgspec.json.encode(view.model_dump(mode="json", by_alias=True))
    return web.Response(body=body, content_type="application/json")


def _changes(old: SchedulerLimits, new: SchedulerLimits) -> dict[str, str]:
    before, after = old.model_dump(by_alias=True), new.model_dump(by_alias=True)
    return {name: f"{before[name]} -> {after[name]}" for name in after if before[name] != after[name]}
