"""Conditions about what the operator steers by: the spec, its signals, the SLO, limits, the tuner, tenants' keys."""

from guidevane_api.conditions import Reason
from guidevane_api.spec_control import RetuneMode
from guidevane_api.status import MetricsState
from guidevane_operator.admin_client import Fenced, Refused, Unreachable
from guidevane_operator.retune.setup import targets_of
from guidevane_operator.signals import Invalid, Signals, known_value
from guidevane_operator.status.facts import StatusFacts
from guidevane_operator.status.readiness import FALSE, PAUSED, TRUE, UNKNOWN, Finding


def spec_accepted(facts: StatusFacts) -> Finding:
    """Every field of the spec is understood and in effect."""
    if facts.refused:
        return Finding(FALSE, facts.refused_reason or Reason.INVALID_SPEC, facts.refused)
    return Finding(TRUE, Reason.ACCEPTED)


def metrics_fresh(facts: StatusFacts) -> Finding:
    """Every ready pod gave a fresh sample."""
    signals = facts.signals
    if not facts.ready:
        return Finding(UNKNOWN, Reason.NO_READY_PODS, "no pod is ready, so there is nothing to read")
    invalid = next((value for value in vars(signals).values() if isinstance(value, Invalid)), None)
    if facts.metrics_state is MetricsState.KNOWN:
        if invalid is not None:
            return Finding(FALSE, Reason.NAN_SAMPLE, invalid.what)
        return Finding(TRUE, Reason.FRESH)
    reason = {
        MetricsState.PARTIAL: Reason.PODS_MISSING,
        MetricsState.STALE: Reason.METRICS_STALE,
    }.get(facts.metrics_state, Reason.METRIC_ABSENT)
    if signals.unreachable:
        reason = Reason.SCRAPE_FAILED
    return Finding(FALSE, reason, signals.why)


def slo_ratios(facts: StatusFacts, signals: Signals) -> dict[Reason, float]:
    """Measured over target for each known latency."""
    if facts.spec is None:
        return {}
    targets, min_samples = targets_of(facts.spec), facts.spec.retune.min_samples_per_window
    pairs = (
        (Reason.TTFT_HIGH, signals.ttft_p95_ms, targets.ttft_p95_ms),
        (Reason.ITL_HIGH, signals.itl_p95_ms, targets.itl_p95_ms),
        (Reason.ITL_HIGH, signals.itl_p99_ms, targets.itl_p99_ms),
        (Reason.QUEUE_WAIT_HIGH, signals.queue_wait_p95_ms, targets.queue_wait_p95_ms),
    )
    found: dict[Reason, float] = {}
    for reason, signal, target in pairs:
        value = known_value(signal, min_samples)
        if value is not None and target:
            found[reason] = max(found.get(reason, 0.0), value / target)
    return found


def slo_met(facts: StatusFacts) -> Finding:
    """Every signal of the SLO is inside its line."""
    if facts.metrics_state is not MetricsState.KNOWN or facts.signals.state is not MetricsState.KNOWN:
        return Finding(UNKNOWN, Reason.METRICS_UNKNOWN, "signals are missing, so there is nothing to judge")
    ratios = slo_ratios(facts, facts.signals)
    if not ratios:
        served = known_value(facts.signals.finished)
        reason = Reason.TOO_FEW_SAMPLES if served else Reason.NO_TRAFFIC
        return Finding(UNKNOWN, reason, "too few requests in the window to judge")
    worst = max(ratios, key=lambda reason: ratios[reason])
    if facts.slo_missed:
        return Finding(FALSE, worst, f"at {round(100 * ratios[worst], -1):.0f} % of its line")
    return Finding(TRUE, Reason.WITHIN_SLO)


def limits_in_sync(facts: StatusFacts) -> Finding:
    """Every ready pod obeys the desired limits under their epoch."""
    lagging = [pod.name for pod in facts.ready if pod.name not in facts.in_sync]
    if not facts.ready or facts.desired is None:
        return Finding(UNKNOWN, Reason.NO_READY_PODS, "no pod is ready to be asked")
    if not lagging:
        return Finding(TRUE, Reason.IN_SYNC)
    if facts.paused:
        return Finding(UNKNOWN, Reason.PAUSED, PAUSED)
    for name in lagging:
        answer = facts.answers.get(name)
        if isinstance(answer, Refused):
            why = "; ".join(answer.fields.values()) or answer.message
            return Finding(FALSE, Reason.PATCH_FAILED, f"pod {name} refused the limits: {why}")
        if isinstance(answer, Unreachable):
            return Finding(FALSE, Reason.ADMIN_UNREACHABLE, f"admin port of pod {name}: {answer.message}")
        if isinstance(answer, Fenced):
            return Finding(FALSE, Reason.PATCH_FAILED, f"pod {name} has seen epoch {answer.epoch}, above ours")
    return Finding(FALSE, Reason.APPLYING, f"{len(lagging)} of {len(facts.ready)} pods do not obey yet")


def retune_active(facts: StatusFacts) -> Finding:
    """The tuner may act and sees its signals."""
    if facts.refused:
        return Finding(FALSE, facts.refused_reason or Reason.INVALID_SPEC, "the spec is refused, so nothing is moved")
    mode = facts.spec.retune.mode if facts.spec else RetuneMode.OFF
    if mode is RetuneMode.OFF:
        return Finding(FALSE, Reason.DISABLED, "spec.retune.mode is Off")
    if facts.paused:
        return Finding(FALSE, Reason.PAUSED, PAUSED)
    if mode is RetuneMode.OBSERVE:
        return Finding(FALSE, Reason.OBSERVE, "spec.retune.mode is Observe: status.retune says what it would do")
    if facts.metrics_state is not MetricsState.KNOWN:
        return Finding(FALSE, Reason.BLIND, "signals are missing, so nothing is moved")
    return Finding(TRUE, Reason.TUNING)


def tenant_keys_found(facts: StatusFacts) -> Finding:
    """Every tenant has a key of its own."""
    if facts.tenants is None:
        return Finding(UNKNOWN, Reason.KEYS_NOT_READ, "no Secret with a tenant's key was read yet")
    locked = facts.tenants.locked
    if not locked:
        return Finding(TRUE, Reason.KEYS_FOUND)
    return Finding(FALSE, next(iter(locked.values())).reason, f"{facts.tenants.sentence}. Until then it is refused.")
