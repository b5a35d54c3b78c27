"""The one writer of status: builds it from a record, writes the difference, on change only."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from guidevane_api.conditions import ConditionStatus, ConditionType, EventReason, Reason
from guidevane_api.status import LLMServiceStatus, RetuneStatus, RolloutStatus
from guidevane_operator.errors import ConflictError
from guidevane_operator.events import EventRecorder
from guidevane_operator.kube import KubeClient, ServiceKey
from guidevane_operator.limits_plan import DesiredLimits
from guidevane_operator.loops import Failure
from guidevane_operator.record import ServiceRecord
from guidevane_operator.status.build import build_status, limits_status
from guidevane_operator.status.facts import StatusFacts
from guidevane_operator.status.readiness import READY_DAMPING_S, has_enough, model_failure
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
    failure_of: Callable[[ServiceKey], Failure | None]
    """Failed passes in a row, None if the last one did not fail."""
    ask_for_pass: Callable[[ServiceKey], None]
    """Queues a pass, after somebody else wrote first."""
    default_prometheus_url: str = ""

    async def write(self, record: ServiceRecord, retune: RetuneStatus | None = None) -> None:
        """Bring the API server's status up to date, if it is worth a write."""
        if record.is_gone:
            return
        self._note_readiness(record)
        facts = self.facts(record)
        status = build_status(facts)
        if retune is not None:
            status = status.model_copy(update={"retune": retune})
        old, new = dict(record.body.get("status") or {}), to_json(status)
        patch = merge_patch(old, new)
        if not patch or not (is_urgent(old, new) or self._is_due(record)):
            return
        news = [*_reason_news(facts, status), *_rollout_news(facts, status), *_slo_news(record, status)]
        record.take_body(await self.kube.patch_status(record.key, patch, record.uid))
        record.last_status_at = self.clock()
        for reason, note in news:
            await self.recorder.post(record.body, reason, note)

    async def persist_limits(
        self, record: ServiceRecord, desired: DesiredLimits, retune: RetuneStatus | None = None
    ) -> bool:
        """Write new desired limits and their epoch, before any pod hears of them.

        Fenced by the resource version: of two operators alive at once, one gets False and has to decide again on
        what the other wrote.
        """
        status: dict[str, Any] = {"limits": to_json(limits_status(desired, record.observed_generation, 0))}
        if retune is not None:
            status["retune"] = merge_patch(dict((record.body.get("status") or {}).get("retune") or {}), to_json(retune))
        version = record.body["metadata"].get("resourceVersion", "")
        try:
            record.take_body(await self.kube.patch_status(record.key, status, record.uid, version))
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
            generation=record.observed_generation,
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
            tenants=record.tenants,
            slo_missed=record.slo.missed,
            attainment_percent=record.slo.attainment_percent,
            unready_s=0.0 if record.unready_since_s is None else self.clock() - record.unready_since_s,
            failure=self.failure_of(record.key),
        )

    def prometheus_url(self, record: ServiceRecord) -> str:
        """Where the service's signals come from; empty if nowhere."""
        own = record.spec.monitoring.prometheus_url if record.spec else ""
        return own or self.default_prometheus_url

    def _is_due(self, record: ServiceRecord) -> bool:
        last = record.last_status_at
        return last is None or self.clock() - last >= self.min_interval_s

    def _note_readiness(self, record: ServiceRecord) -> None:
        """Keep since when too few pods are ready, and look again when that is no blip any more."""
        if has_enough(self.facts(record)):
            record.unready_since_s = None
        elif record.unready_since_s is None:
            record.unready_since_s = self.clock()
            asyncio.get_running_loop().call_later(READY_DAMPING_S, self.ask_for_pass, record.key)


News = list[tuple[EventReason, str]]
"""Events for transitions that only status shows; sent once status is written."""


def _reason_news(facts: StatusFacts, status: LLMServiceStatus) -> News:
    """Why the service is not ready, where a person has to do something."""
    if status.reason == facts.previous.reason:
        return []
    if status.reason == Reason.MODEL_NOT_FOUND:
        return [(EventReason.MODEL_NOT_FOUND, model_failure(facts) or "")]
    refusal = facts.deployment.replica_failure if facts.deployment else ""
    if status.reason == Reason.CHILD_REFUSED and refusal and not facts.child_error:
        return [(EventReason.CHILD_REFUSED, refusal)]
    return []


def _rollout_news(facts: StatusFacts, status: LLMServiceStatus) -> News:
    """The start and the end of a rollout."""
    before, now = facts.previous.rollout or RolloutStatus(), status.rollout or RolloutStatus()
    if now.step and before.revision != now.revision:
        note = f"from revision {before.revision} to {now.revision}, {facts.wanted_replicas} pods"
        return [(EventReason.ROLLOUT_STARTED, note)]
    if before.step and not now.step and facts.wanted_replicas:
        return [(EventReason.ROLLOUT_COMPLETED, f"all {facts.wanted_replicas} pods are of revision {now.revision}")]
    return []


def _slo_news(record: ServiceRecord, status: LLMServiceStatus) -> News:
    """The SLO is missed, or met again."""
    before, now = record.status.condition(ConditionType.SLO_MET), status.condition(ConditionType.SLO_MET)
    was_missed = before is not None and before.status is ConditionStatus.FALSE
    if now is not None and now.status is ConditionStatus.FALSE:
        record.slo_missed = True
        return [] if was_missed else [(EventReason.SLO_BREACHED, f"{now.reason}: {now.message}")]
    if now is not None and now.status is ConditionStatus.TRUE and (record.slo_missed or was_missed):
        record.slo_missed = False
        return [(EventReason.SLO_RECOVERED, "every known signal is inside its line again")]
    return []
