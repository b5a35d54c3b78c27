"""The admin port's door, and GET and PATCH /admin/limits, behind a bearer token. Never on the serving port."""

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Callable

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from pydantic import ValidationError

from guidevane_api.admin import LimitsPatch
from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.messages import SetLimits
from guidevane_runtime.errors import EngineUnavailable, StartError, Unauthorized
from guidevane_runtime.server.bodies import ensure_plain
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
        ensure_plain(request)
        patch = _parse(await request.read())
        limits = services.limits
        old, before = limits.target, limits.command
        command = limits.change(patch)
    except RefusedLimits as error:
        body = error_body(request, error)
        body["error"]["errors"] = error.errors
        return web.json_response(body, status=error.status)
    if command is not before:
        announce(services, command, old, f"epoch {patch.epoch} from {patch.source}")
    await obey(services, command)
    return _view(services)


def announce(services: Services, command: SetLimits, old: SchedulerLimits, why: str) -> None:
    """Say what changed. Before anything is awaited: who asked may be gone before the engine obeys."""
    services.metrics.limits_target(services.limits.target)
    services.metrics.limits_changed(command.source, services.limits.epoch)
    logger.info("limits changed", extra={**_changes(old, services.limits.target), "reason": why})


async def obey(services: Services, command: SetLimits) -> None:
    """Hand limits to the engine and wait until a step obeyed them. May be called again for the same ones."""
    try:
        async with asyncio.timeout(CONFIRM_TIMEOUT_S):
            await services.engine.set_limits(command)
    except TimeoutError as error:
        raise EngineUnavailable(f"the engine took no limits within {CONFIRM_TIMEOUT_S:.0f} s") from error


async def watch_lease(services: Services, poll_interval_s: float = 1.0) -> None:
    """Go back to the start-up limits when a lease runs out. Runs until cancelled."""
    while True:
        await asyncio.sleep(poll_interval_s)
        old = services.limits.target
        command = services.limits.expire()
        if command is not None:
            announce(services, command, old, "the lease was not renewed")
            await _obey_or_log(services, command)


class AdminToken:
    """The bearer token of the admin port, read anew for each request: a rotated Secret needs no restart."""

    def __init__(self, read: Callable[[], str | None], first: str) -> None:
        self._read = read
        self._last_good = first

    def matches(self, given: str) -> bool:
        """Compared in constant time. A file that is being replaced, or is gone, leaves the last token in force."""
        with contextlib.suppress(StartError):
            self._last_good = self._read() or self._last_good
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._last_good.encode())


def token_middleware(token: AdminToken) -> Middleware:
    """Lets in who shows the token."""

    @web.middleware
    async def check_token(request: web.Request, handler: Handler) -> web.StreamResponse:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token.matches(given.strip()):
            raise Unauthorized("the admin port needs its bearer token: Authorization: Bearer <token>")
        return await handler(request)

    return check_token


async def _obey_or_log(services: Services, command: SetLimits) -> None:
    try:
        await obey(services, command)
    except EngineUnavailable as error:
        # The client hands the limits to the next engine, so nothing is lost.
        logger.warning("limits wait for the engine", extra={"reason": error.message})


def _parse(raw: bytes) -> LimitsPatch:
    try:
        return LimitsPatch.model_validate_json(raw, strict=True)
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
