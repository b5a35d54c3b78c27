"""Kubernetes events of a service: on transitions only, folded and capped, and never in the way of real work."""

import logging
import socket
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from guidevane_api.conditions import EventReason
from guidevane_operator.errors import KubeError
from guidevane_operator.kube import LLM_SERVICES, KubeClient, Manifest

logger = logging.getLogger(__name__)

REPEAT_S = 60.0
"""The same reason and subject again within this time is folded into the first."""
HOUR_S = 3600.0
MAX_PER_HOUR = 20
"""Events of one service in an hour, at most."""
MAX_NOTE = 1024
"""Longest note that the API server takes, characters."""


WARNINGS = frozenset(
    {
        EventReason.GUARD_GAVE_WAY,
        EventReason.TENANT_LOCKED_OUT,
        EventReason.METRICS_LOST,
        EventReason.SLO_BREACHED,
        EventReason.CONFLICTING_AUTOSCALER,
        EventReason.ADMIN_UNREACHABLE,
        EventReason.MODEL_NOT_FOUND,
        EventReason.SPEC_REFUSED,
        EventReason.CHILD_REFUSED,
    }
)
"""Reasons that a person should look at."""


@dataclass
class _Posted:
    """What one service was told lately."""

    times: deque[float] = field(default_factory=deque)
    latest: dict[tuple[EventReason, str], float] = field(default_factory=dict)


class EventRecorder:
    """Posts events of services under events.k8s.io/v1."""

    def __init__(self, kube: KubeClient, clock: Callable[[], float]) -> None:
        self._kube, self._clock = kube, clock
        self._posted: dict[str, _Posted] = {}
        """By UID of the service; what is older than an hour is forgotten."""

    async def post(self, service: Manifest, reason: EventReason, note: str, subject: str = "") -> None:
        """Tell about one transition of `service`. A refused event is logged and forgotten: events are a courtesy."""
        meta = service["metadata"]
        if not self._admit(str(meta.get("uid", "")), reason, subject):
            return
        try:
            await self._kube.create_event(build_event(service, reason, note, datetime.now(UTC)))
        except KubeError as error:
            logger.warning("event not posted", extra={"service": meta["name"], "reason": reason, "error": str(error)})

    def _admit(self, uid: str, reason: EventReason, subject: str) -> bool:
        """Whether this one is neither a repetition nor over the hourly cap."""
        now = self._clock()
        self._posted = {of: told for of, told in self._posted.items() if now - told.times[-1] <= HOUR_S}
        posted = self._posted.setdefault(uid, _Posted())
        while posted.times and now - posted.times[0] > HOUR_S:
            posted.times.popleft()
        posted.latest = {what: at for what, at in posted.latest.items() if now - at < REPEAT_S}
        if (reason, subject) in posted.latest or len(posted.times) >= MAX_PER_HOUR:
            return False
        posted.times.append(now)
        posted.latest[reason, subject] = now
        return True


def build_event(service: Manifest, reason: EventReason, note: str, at: datetime) -> dict[str, Any]:
    """The event as the API takes it."""
    meta = service["metadata"]
    return {
        "metadata": {"name": f"{meta['name'][:200]}.{uuid.uuid4().hex[:16]}", "namespace": meta["namespace"]},
        "eventTime": at.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": "guidevane.dev/operator",
        "reportingInstance": socket.gethostname()[:128],
        "action": "Reconcile",
        "reason": reason.value,
        "type": "Warning" if reason in WARNINGS else "Normal",
        "note": note if len(note) <= MAX_NOTE else note[: MAX_NOTE - 1] + "…",
        "regarding": {
            "apiVersion": LLM_SERVICES.api_version,
            "kind": "LLMService",
            "namespace": meta["namespace"],
            "name": meta["name"],
            "uid": meta.get("uid", ""),
            "resourceVersion": meta.get("resourceVersion", ""),
        },
    }
