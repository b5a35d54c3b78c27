"""GET /livez, /readyz, /health, /ping, /version and /metrics: what probes, routers and Prometheus ask."""

from importlib.metadata import version

from aiohttp import web
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from guidevane_runtime.errors import EngineUnavailable
from guidevane_runtime.server.error_body import error_response
from guidevane_runtime.server.services import SERVICES, Services

routes = web.RouteTableDef()


@routes.get("/livez")
async def livez(request: web.Request) -> web.Response:
    """Whether this process works. A dead engine is restarted by it, so it is no reason to kill the pod."""
    return web.Response()


@routes.get("/readyz")
@routes.get("/health")
@routes.get("/ping")
async def readyz(request: web.Request) -> web.Response:
    """Whether a request sent now would be served."""
    services = request.app[SERVICES]
    if not services.is_serving:
        # Answered, not raised: a probe every few seconds is no news for the log.
        return error_response(request, EngineUnavailable(_why_not(services), code="not_ready"))
    return web.Response()


@routes.get("/version")
async def show_version(request: web.Request) -> web.Response:
    return web.json_response({"version": version("guidevane")})


@routes.get("/metrics")
async def metrics(request: web.Request) -> web.Response:
    page = generate_latest(request.app[SERVICES].metrics.registry)
    return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


def _why_not(services: Services) -> str:
    if services.gate.is_draining:
        return "the server is shutting down"
    if services.is_hung:
        return f"the engine has been silent for more than {services.hang_after_s:.0f} s"
    return f"the engine is {services.engine.state}"
