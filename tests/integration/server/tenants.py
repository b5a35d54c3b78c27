"""What the tests of tenants share: who they are, their file, and what holds the runtime busy."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

LIMITS = {
    "maxModelLen": 16384,
    "maxNumSeqs": 2,
    "maxQueuedRequests": 1000,
    "waitingTimeoutMilliseconds": 60000,
}
LONG = {"prompt": "a", "max_tokens": 16000, "ignore_eos": True}
"""Outlives every wait of these tests, and is aborted."""
SHORT = {"prompt": "a", "max_tokens": 1}
SMALL = [f"small{number}" for number in range(9)]


def tenant(name: str, **terms: Any) -> dict[str, Any]:
    """Its key says whose it is."""
    return {"name": name, "keySha256": [hashlib.sha256(f"key-of-{name}".encode()).hexdigest()], **terms}


TENANTS = [
    tenant("a"),
    tenant("b"),
    tenant("capped", maxInFlight=5),
    tenant("brief", maxQueuedTokens=100),
    tenant("hog"),
    *(tenant(name) for name in SMALL),
]


def key_of(name: str, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer key-of-{name}", **more}


class TenantsFile:
    """As Kubernetes mounts it: the name stays, what it points to is swapped."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tenants.json"
        self._num_versions = 0

    def write(self, tenants: list[dict[str, Any]] | None = None, text: str | None = None) -> None:
        self._num_versions += 1
        version = self.path.with_name(f"version{self._num_versions}")
        version.write_text(json.dumps({"tenants": tenants}) if text is None else text)
        link = self.path.with_name("next")
        link.symlink_to(version)
        link.rename(self.path)


def in_flight(name: str) -> str:
    return f"guidevane_tenant_requests_in_flight{{tenant={name}}}"


@asynccontextmanager
async def holding(client: Any, name: str, count: int) -> AsyncIterator[None]:
    """That many long requests of a tenant between the door and their end; aborted at the exit."""
    tasks = [asyncio.create_task(client.post("/v1/completions", LONG, headers=key_of(name))) for _ in range(count)]
    try:
        await client.wait_for_metric(in_flight(name), count)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.wait_until_idle()
