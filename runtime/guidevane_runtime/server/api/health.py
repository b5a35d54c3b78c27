"""GET /livez, /readyz, /health, /ping, /version and /metrics: what probes, routers and Prometheus ask."""

from importlib.metadata import version

from aiohttp import web
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from guidevane_runtime.server.services import SERVICES

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
    request.app[SERVICES].check_open()
    return web.Response()


@routes.get("/version")
async def show_version(request: web.Request) -> web.Response:
    return web.json_response({"version": version("guidevane")})


@routes.get("/metrics")
async def metrics(request: web.Request) -> web.Response:
    page = generate_latest(request.app[SERVICES].metrics.registry)
    return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})
