"""The whole status of a service from its facts. Pure: the same facts give the same status."""

from datetime import datetime

from guidevane_api.conditions import ConditionType
from guidevane_api.limits import PartialLimits
from guidevane_api.llmservice import NAME_LABEL
from guidevane_api.status import (
    Condition,
    FailuresStatus,
    GuardStatus,
    LimitsStatus,
    LLMServiceStatus,
    MetricsStatus,
    RolloutStatus,
    SLOStatus,
    StatusLimitsSource,
)
from guidevane_operator.limits_plan import DesiredLimits
from guidevane_operator.signals import Signal, known_value
from guidevane_operator.status import control, readiness
from guidevane_operator.status.facts import StatusFacts
from guidevane_operator.status.readiness import Finding

__all__ = ["StatusFacts", "build_status"]


def build_status(facts: StatusFacts) -> LLMServiceStatus:
    """Everything but the tuner's block, which the tuner writes with its decision."""
    ready = readiness.ready(facts)
    return LLMServiceStatus(
        observed_generation=facts.generation,
        replicas=len(facts.alive),
        ready_replicas=len(facts.ready),
        updated_replicas=len(facts.updated),
        updated_ready_replicas=facts.updated_ready,
        selector=f"{NAME_LABEL}={facts.key.name}",
        ready_summary=f"{facts.updated_ready}/{facts.wanted_replicas}",
        reason=ready.reason.value,
        endpoint=_endpoint(facts),
        slo=_slo(facts),
        metrics=MetricsStatus(
            fresh_pods=facts.signals.fresh_pods,
            expected_pods=len(facts.ready),
            state=facts.metrics_state,
        ),
        limits=_limits(facts),
        retune=facts.previous.retune,
        guard=_guard(facts),
        rollout=_rollout(facts),
        failures=_failures(facts),
        conditions=_conditions(facts, ready),
    )


def _conditions(facts: StatusFacts, ready: Finding) -> tuple[Condition, ...]:
    """All conditions, every time, in a fixed order."""
    findings = {
        ConditionType.SPEC_ACCEPTED: control.spec_accepted(facts),
        ConditionType.READY: ready,
        ConditionType.AVAILABLE: readiness.available(facts),
        ConditionType.PROGRESSING: readiness.progressing(facts),
        ConditionType.METRICS_FRESH: control.metrics_fresh(facts),
        ConditionType.SLO_MET: control.slo_met(facts),
        ConditionType.LIMITS_IN_SYNC: control.limits_in_sync(facts),
        ConditionType.RETUNE_ACTIVE: control.retune_active(facts),
        ConditionType.TENANT_KEYS_FOUND: control.tenant_keys_found(facts),
    }
    return tuple(_condition(facts, kind, finding) for kind, finding in findings.items())


def _condition(facts: StatusFacts, kind: ConditionType, finding: Finding) -> Condition:
    """One condition; its time moves only when its status does."""
    before = facts.previous.condition(kind)
    unchanged = before is not None and before.status is finding.status and before.last_transition_time
    return Condition(
        type=kind.value,
        status=finding.status,
        reason=finding.reason.value,
        message=finding.message[:1024],
        observed_generation=facts.generation,
        last_transition_time=before.last_transition_time if before and unchanged else rfc3339(facts.now),
    )


def _endpoint(facts: StatusFacts) -> str | None:
    if facts.spec is None:
        return facts.previous.endpoint
    return f"http://{facts.key.name}.{facts.key.namespace}.svc:{facts.spec.engine.port}/v1"


def _failures(facts: StatusFacts) -> FailuresStatus | None:
    failure = facts.failure
    if failure is None:
        return None
    return FailuresStatus(
        consecutive=failure.consecutive, next_retry_time=rfc3339(failure.retry_at), message=failure.message[:1024]
    )


def _rollout(facts: StatusFacts) -> RolloutStatus:
    """The revision asked for, the last one that was there in full, and how far it is from one to the other."""
    before = facts.previous.rollout
    stable, step = before.stable_revision if before else None, None
    if facts.wanted_replicas and readiness.is_complete(facts):
        stable = facts.revision
    elif stable and facts.wanted_replicas and {facts.revision} != {stable, *(pod.revision for pod in facts.alive)}:
        step = f"{facts.updated_ready}/{facts.wanted_replicas}"
    return RolloutStatus(revision=facts.revision or None, stable_revision=stable or None, step=step)


def _slo(facts: StatusFacts) -> SLOStatus:
    """The known signals, rounded: status is no time series."""
    signals = facts.signals
    kv = known_value(signals.kv_percent)
    return SLOStatus(
        ttft_p95_milliseconds=_rounded(signals.ttft_p95_ms),
        itl_p95_milliseconds=_rounded(signals.itl_p95_ms),
        itl_p99_milliseconds=_rounded(signals.itl_p99_ms),
        queue_wait_p95_milliseconds=_rounded(signals.queue_wait_p95_ms),
        attainment_percent=facts.attainment_percent,
        kv_cache_percent=None if kv is None else 5 * round(kv / 5),
    )


def _guard(facts: StatusFacts) -> GuardStatus | None:
    """The guards' level, None unless known."""
    level = known_value(facts.signals.guard_level)
    return None if level is None else GuardStatus(level=int(level), lines=facts.signals.guard_lines)


def _rounded(signal: Signal) -> int | None:
    """Two significant digits, None unless known."""
    value = known_value(signal)
    return None if value is None else int(float(f"{value:.2g}"))


def _limits(facts: StatusFacts) -> LimitsStatus | None:
    """The limits block: what was persisted, and how many pods obey."""
    if facts.desired is None:
        return facts.previous.limits
    return limits_status(facts.desired, facts.generation, len(facts.in_sync))


def limits_status(desired: DesiredLimits, generation: int, in_sync_pods: int) -> LimitsStatus:
    """The limits block of status."""
    return LimitsStatus(
        desired=PartialLimits(**desired.limits.model_dump()),
        epoch=desired.epoch,
        in_sync_pods=in_sync_pods,
        source=StatusLimitsSource(desired.source.value),
        spec_generation=generation,
        spec_hash=desired.spec_hash,
    )


def rfc3339(at: datetime) -> str:
    """A time as the API writes it, whole seconds, UTC."""
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")
