"""Puts routes, middlewares and services together. Nothing is started here."""

from aiohttp import web

from guidevane_runtime.server.api import admin, health, openai, requests, tenants, text
from guidevane_runtime.server.middleware import add_ids, close_while_draining, error_middleware
from guidevane_runtime.server.services import SERVICES, Services

MAX_BODY_BYTES = 32 << 20
"""A prompt of four million tokens as JSON; aiohttp's own 1 MiB is too small for long contexts."""


def create_app(services: Services) -> web.Application:
    """The serving port: OpenAI's routes, text, health and metrics."""
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[error_middleware(services.metrics)])
    app[SERVICES] = services
    app.on_response_prepare.extend((add_ids, close_while_draining))
    for routes in (openai.routes, text.routes, health.routes):
        app.add_routes(routes)
    return app


def create_admin_app(services: Services, token: admin.AdminToken) -> web.Application:
    """The admin port."""
    app = web.Application(middlewares=[error_middleware(), admin.token_middleware(token)])
    app[SERVICES] = services
    app.on_response_prepare.append(add_ids)
    for routes in (admin.routes, requests.routes, tenants.routes):
        app.add_routes(routes)
    return app
