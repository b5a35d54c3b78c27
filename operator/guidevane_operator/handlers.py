"""The kopf side: thin handlers that hand what a watch saw to the operator, and nothing else.

Only `on.event` handlers: kopf then writes nothing itself, neither annotations nor finalizers, so a service is never
stuck on an operator that is gone, and no refused PATCH can end a loop. create, update, resume and delete all arrive
here as events and lead to the same level-triggered pass. Every handler is a coroutine: kopf runs plain functions in
threads, and what they touch belongs to the event loop.
"""

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import kopf

from guidevane_api.llmservice import GROUP, NAME_LABEL, PLURAL, VERSION
from guidevane_operator.app import GuidevaneOperator
from guidevane_operator.kube import RESOURCES

BACKOFFS_S = (1, 1, 2, 3, 5, 8, 13, 21)
"""Pauses between two tries to list or watch, seconds; the last one again and again."""

WATCHED_CHILDREN = {kind: resource.gvr for kind, resource in RESOURCES.items() if kind != "Secret"}
"""Kinds of children -> where to watch them. Not Secrets: a watch would read those of everybody."""


class Backoffs:
    """BACKOFFS_S without an end: when they are used up, as in an outage of a minute, kopf ends the whole operator."""

    def __iter__(self) -> Iterator[float]:
        """A new series for each request."""
        yield from BACKOFFS_S
        while True:
            yield BACKOFFS_S[-1]


def build_registry(start: Callable[[], Awaitable[GuidevaneOperator]]) -> kopf.OperatorRegistry:
    """All handlers. `start` is awaited at start-up and gives the running GuidevaneOperator."""
    registry = kopf.OperatorRegistry()
    running: list[GuidevaneOperator] = []

    @kopf.on.login(registry=registry)
    async def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    @kopf.on.startup(registry=registry, errors=kopf.ErrorsMode.PERMANENT)
    async def started(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure(settings)
        operator = await start()
        await operator.wait_for_kind()
        running.append(operator.start())

    @kopf.on.cleanup(registry=registry)
    async def stopped(**_: Any) -> None:
        while running:
            await running.pop().close()

    @kopf.on.probe(registry=registry, id="loops")
    async def loops(**_: Any) -> str:
        return probe(running)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def service_seen(event: kopf.RawEvent, **_: Any) -> None:
        running[0].see_service(dict(event["object"]), gone=event["type"] == "DELETED")

    @kopf.on.event("", "v1", "pods", labels={NAME_LABEL: kopf.PRESENT}, registry=registry)
    async def pod_seen(event: kopf.RawEvent, labels: kopf.Labels, **_: Any) -> None:
        running[0].see_pod(dict(event["object"]), labels[NAME_LABEL], gone=event["type"] == "DELETED")

    for kind, where in WATCHED_CHILDREN.items():
        watch_child(registry, running, kind, where)

    return registry


def watch_child(
    registry: kopf.OperatorRegistry, running: list[GuidevaneOperator], kind: str, where: tuple[str, str, str]
) -> None:
    """One handler for one kind of children."""

    @kopf.on.event(*where, labels={NAME_LABEL: kopf.PRESENT}, registry=registry, id=f"{kind.lower()}_seen")
    async def child_seen(event: kopf.RawEvent, labels: kopf.Labels, **_: Any) -> None:
        running[0].see_child(kind, dict(event["object"]), labels[NAME_LABEL], gone=event["type"] == "DELETED")


def probe(running: list[GuidevaneOperator]) -> str:
    """What /healthz says; raises, which makes it 500, if a loop is dead: then a restart helps."""
    if not running:
        return "waiting for the API server, or for the CRD"
    faults = running[0].faults()
    if faults:
        raise kopf.PermanentError("; ".join(f"{name} {why}" for name, why in sorted(faults.items())))
    return "all loops are alive"


def configure(settings: kopf.OperatorSettings) -> None:
    """Kopf's own settings: short timeouts everywhere, no events of its own, no scanning."""
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.peering.standalone = True
    settings.watching.server_timeout = 600
    settings.watching.client_timeout = 660
    settings.watching.connect_timeout = 10
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 10
    settings.networking.error_backoffs = Backoffs()
    settings.queueing.worker_limit = 20
    # The API server selects: objects of others cost nothing, and one that loses the label is told as gone.
    for where in (("", "v1", "pods"), *WATCHED_CHILDREN.values()):
        settings.watching.label_selectors[where] = NAME_LABEL
