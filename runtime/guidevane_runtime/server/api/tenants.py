"""GET /admin/tenants: who shares the server, on which terms, and what each has inside now. No key, nor its digest."""

from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from guidevane_api.pod_files import TenantEntry
from guidevane_runtime.server.services import SERVICES, Services

routes = web.RouteTableDef()


@routes.get("/admin/tenants")
async def list_tenants(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    policy, keeper = services.tenants.policy, services.tenants
    body = {
        "tenants": [_entry(services, one) for one in _shown(services)],
        "classes": {"interactive": policy.interactive_share, "offline": policy.offline_share},
        "offlinePaused": policy.pauses_offline,
        "fileGood": keeper.is_file_good,
    }
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def _shown(services: Services) -> Sequence[TenantEntry]:
    """Those that are listed, and those that still have something inside."""
    listed = services.tenants.file.tenants
    names = {one.name for one in listed}
    others = sorted({*services.gate.tenants, *services.tenants.names} - names)
    # Not validated: the one tenant of a server without tenants has no name.
    return (*listed, *(TenantEntry.model_construct(name=name) for name in others))


def _entry(services: Services, tenant: TenantEntry) -> dict[str, Any]:
    held, totals = services.gate.use_of(tenant.name), services.metrics.tenants.totals(tenant.name)
    return {
        "name": tenant.name,
        "weight": tenant.weight,
        "maxInFlight": tenant.max_in_flight,
        "maxQueuedTokens": tenant.max_queued_tokens,
        "numKeys": len(tenant.key_sha256),
        "numInFlight": held.num_live,
        "numWaiting": held.num_waiting,
        "numQueuedTokens": held.num_queued_tokens,
        "numPromptTokens": totals.num_prompt_tokens,
        "numGenerationTokens": totals.num_generation_tokens,
    }
