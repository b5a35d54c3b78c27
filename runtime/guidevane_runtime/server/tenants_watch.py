"""Once a second: look at the tenants file, and hand the engine what has changed. Decides nothing itself."""

import asyncio

from guidevane_runtime.server.services import Services

POLL_INTERVAL_S = 1.0


async def watch_tenants(services: Services, poll_interval_s: float = POLL_INTERVAL_S) -> None:
    """Runs until cancelled."""
    while True:
        await asyncio.sleep(poll_interval_s)
        look(services)


def look(services: Services) -> None:
    """Keys and caps hold for whoever comes next, shares from the next step on; what is inside stays."""
    if services.tenants.reload():
        services.engine.set_tenants(services.tenants.command)
    services.metrics.tenants_file_read(is_good=services.tenants.is_file_good)
