"""The one writer of status: builds it from a record, writes the difference, on change only."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from guidevane_api.conditions import EventReason, Reason
from guidevane_api.status import LLMServiceStatus, RetuneStatus
from guidevane_operator.errors import ConflictError
from guidevane_operator.events import EventRecorder
from guidevane_operator.kube import KubeClient, ServiceKey
from guidevane_operator.limits_plan import DesiredLimits
from guidevane_operator.record import ServiceRecord
from guidevane_operator.status.build import build_status, limits_status
from guidevane_operator.status.facts import StatusFacts
from guidevane_operator.status.readiness import model_failure
from guidevane_operator.status.write import is_urgent, merge_patch, to_json

logger = logging.getLogger(__name__)

Clock = Callable[[], float]


@dataclass
class StatusWriter:
    """Writes status. Callers hold the record's lock."""

    kube: KubeClient
    recorder: EventRecorder
    clock: Clock
    """Monotonic seconds."""
    min_interval_s: float
    """Least time between two writes of numbers only."""
    failures_of: Callable[[ServiceKey], int]
    """Failed passes in a row."""
    ask_for_pass: Callable[[ServiceKey], None]
    """Queues a pass, after somebody else wrote first."""
    default_prometheus_url: str = ""

    async def write(self, record: ServiceRecord, retune: RetuneStatus | None = None) -> None:
        """Bring the API server's status up to date, if it is worth a write."""
        facts = self.facts(record)
        status = build_status(facts)
        if retune is not None:
            status = status.model_copy(update={"retune": retune})
        old, new = dict(record.body.get("status") or {}), to_json(status)
        patch = merge_patch(old, new)
        if not patch or not (is_urgent(old, new) or self._is_due(record)):
            return
        await self._announce(record, facts, status)
        record.take_body(await self.kube.patch_status(record.key, patch))
        record.last_status_at = self.clock()

    async def persist_limits(
        self, record: ServiceRecord, desired: DesiredLimits, retune: RetuneStatus | None = None
    ) -> bool:
        """Write new desired limits and their epoch, before any pod hears of them.

        Fenced by the resource version: of two operators alive at once, one gets False and has to decide again on
        what the other wrote.
        """
        status: dict[str, Any] = {"limits": to_json(limits_status(desired, record.generation, 0))}
        if retune is not None:
            status["retune"] = merge_patch(dict((record.body.get("status") or {}).get("retune") or {}), to_json(retune))
        version = record.body["metadata"].get("resourceVersion", "")
        try:
            record.take_body(await self.kube.patch_status(record.key, status, version))
        except ConflictError:
            logger.info("somebody wrote first, deciding again", extra={"service": record.key.name})
            record.needs_refresh = True
            self.ask_for_pass(record.key)
            return False
        record.desired = desired
        record.last_status_at = self.clock()
        return True

    def facts(self, record: ServiceRecord) -> StatusFacts:
        """The record as one frozen value."""
        return StatusFacts(
            key=record.key,
            generation=record.generation,
            now=datetime.now(UTC),
            previous=record.status,
            spec=record.spec,
            refused=record.refused,
            refused_reason=Reason(record.refused_reason) if record.refused_reason else None,
            deleting=record.deleting,
            paused=record.paused,
            wanted_replicas=record.wanted_replicas,
            revision=record.revision,
            pods=tuple(record.pods.values()),
            deployment=record.deployment,
            child_error=record.child_error,
            desired=record.desired,
            in_sync=frozenset(record.pods_in_sync()),
            answers={name: ack.result for name, ack in record.acks.items()},
            metrics_state=record.history.shown,
            signals=record.history.latest,
            slo_breaches=record.slo_breaches,
            failures=self.failures_of(record.key),
        )

    def prometheus_url(self, record: ServiceRecord) -> str:
        """Where the service's signals come from; empty if nowhere."""
        own = record.spec.monitoring.prometheus_url if record.spec else ""
        return own or self.default_prometheus_url

    def _is_due(self, record: ServiceRecord) -> bool:
        last = record.last_status_at
        return last is None or self.clock() - last >= self.min_interval_s

    async def _announce(self, record: ServiceRecord, facts: StatusFacts, status: LLMServiceStatus) -> None:
        """Events for transitions that only status shows."""
        before = record.status.reason
        if status.reason == before:
            return
        if status.reason == Reason.MODEL_NOT_FOUND:
            await self.recorder.post(record.body, EventReason.MODEL_NOT_FOUND, model_failure(facts) or "")
        if status.reason == Reason.CHILD_REFUSED:
            await self.recorder.post(record.body, EventReason.CHILD_REFUSED, record.child_error or "see status")
