"""What the operator steers by: the blocks `slo`, `retune` and `autoscaling`. A change is live and touches no pod."""

from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from guidevane_api.limits import MAX_TOKENS, ApiModel, Percent
from guidevane_api.schema import SET, Later, Milliseconds, Rule, Seconds, list_map, model_rules


class GuardAction(StrEnum):
    """What the guard of a pod may do at a protection line."""

    OFF = "Off"
    DRY_RUN = "DryRun"
    ON = "On"


class SLOSpec(ApiModel):
    """What a good answer is. Percentiles are over all pods and the window of retune.windowSeconds."""

    ttft_p95_milliseconds: Milliseconds = 1500
    """Time to first token, 95th percentile, in milliseconds."""
    itl_p95_milliseconds: Milliseconds = 120
    """Time between two tokens of a stream, 95th percentile, in milliseconds."""
    itl_p99_milliseconds: Milliseconds | None = None
    """Time between two tokens, 99th percentile, in milliseconds; sees prefill stalls that p95 misses. Default: not
    looked at."""
    queue_wait_p95_milliseconds: Milliseconds = 500
    """Wait before the first step, 95th percentile, in milliseconds."""
    kv_cache_utilization_max_percent: Percent = 88
    """Protection line: share of KV-cache blocks in use, in percent, above which the tuner does not raise concurrency
    and the guard gives way."""
    admission_reject_rate_max_percent: Percent = 1
    """Share of requests refused because of load, in percent; above it the guard takes steps back."""
    guard: GuardAction = GuardAction.DRY_RUN
    """What each pod's guard does when a line above is breached: Off, DryRun (it only tells) or On (it gives way within
    seconds, and the tuner waits meanwhile)."""
    objective_percent: Annotated[Percent, Later("SLO objectives")] = 95
    """Share of good windows, in percent, over objectiveWindow."""
    objective_window: Annotated[
        str, Field(max_length=8, pattern="^[1-9][0-9]{0,4}[smhd]$"), Later("SLO objectives")
    ] = "1h"
    """Time over which objectivePercent counts, as in 30m, 1h or 7d."""


class RetuneMode(StrEnum):
    """What the tuner may do."""

    OFF = "Off"
    OBSERVE = "Observe"
    AUTO = "Auto"


class Knob(StrEnum):
    """A live limit that the tuner can move; the value is the limit's name in spec.limits."""

    PREFILL_CHUNK_SIZE = "prefillChunkSize"
    MAX_NUM_SEQS = "maxNumSeqs"
    KV_CACHE_UTILIZATION_LIMIT_PERCENT = "kvCacheUtilizationLimitPercent"
    MAX_NUM_BATCHED_TOKENS = "maxNumBatchedTokens"


READY_KNOBS = (Knob.PREFILL_CHUNK_SIZE.value, Knob.MAX_NUM_SEQS.value)
"""Knobs that the tuner of this release has rules for."""


class KnobBounds(ApiModel):
    """How far the tuner may move one knob."""

    model_config = ConfigDict(
        json_schema_extra=model_rules(
            Rule("self.min <= self.max", "spec.retune.bounds: min must not exceed max", ".min")
        )
    )

    knob: Annotated[Knob, Later("rules for more knobs", ready=READY_KNOBS)]
    """Name of the limit."""
    min: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    """Smallest value, in the limit's own unit."""
    max: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    """Largest value, in the limit's own unit; at most the envelope's."""


class SettleSeconds(ApiModel):
    """How long the tuner watches after a move before the next one."""

    raise_: Annotated[int, Field(alias="raise", ge=2, le=86_400)] = 90
    """Seconds after a limit was raised; at least windowSeconds + scrapeIntervalSeconds."""
    cut: Annotated[int, Field(ge=2, le=86_400)] = 45
    """Seconds after a limit was lowered."""


class MaxStepPercent(ApiModel):
    """Largest change in one move, in percent of the present value."""

    raise_: Annotated[Percent, Field(alias="raise")] = 10
    """Step up, in percent."""
    cut: Percent = 15
    """Step down, in percent."""
    chunk_cut: Percent = 50
    """Step down of prefillChunkSize, in percent."""
    chunk_raise: Percent = 50
    """Step up of prefillChunkSize, in percent."""


class DeadbandPercent(ApiModel):
    """Share of an SLO, in percent, between which nothing is moved."""

    model_config = ConfigDict(
        json_schema_extra=model_rules(
            Rule("self.low <= self.high", "spec.retune.deadbandPercent: low must not exceed high", ".low")
        )
    )

    low: Annotated[int, Field(ge=1, le=200)] = 80
    """Below this share of the SLO there is room to give to another signal."""
    high: Annotated[int, Field(ge=1, le=200)] = 100
    """Above this share of the SLO the tuner acts."""


class VerdictSpec(ApiModel):
    """How a move is judged after it settled."""

    worse_percent: Percent = 10
    """A move that made things worse by more than this, in percent, is undone."""
    load_tolerance_percent: Percent = 25
    """No verdict if the load changed by more than this, in percent."""
    forbid_seconds: Seconds = 900
    """Seconds for which an undone direction of a knob is forbidden."""
    max_backoff_factor: Annotated[int, Field(ge=1, le=64)] = 4
    """Largest factor on the settle time after undone moves."""


class FreezeSpec(ApiModel):
    """When the tuner stops because it goes back and forth."""

    flips: Annotated[int, Field(ge=1, le=100)] = 3
    """Changes of direction on one knob within windowSeconds."""
    window_seconds: Seconds = 900
    """Seconds in which flips are counted."""
    duration_seconds: Seconds = 1800
    """Seconds of the freeze."""


class RetuneSpec(ApiModel):
    """The tuner: moves one live limit at a time to hold the SLO."""

    mode: RetuneMode = RetuneMode.OBSERVE
    """Off: nothing. Observe: status says what the tuner would do. Auto: it does it."""
    interval_seconds: Annotated[int, Field(ge=2, le=3600)] = 30
    """Seconds between two looks, at least 2."""
    window_seconds: Annotated[int, Field(ge=10, le=3600)] = 60
    """Seconds over which rates and percentiles are taken; at least 4 times monitoring.scrapeIntervalSeconds
    and at least 10."""
    min_samples_per_window: Annotated[int, Field(ge=1, le=1_000_000)] = 30
    """Observations in a window behind a percentile, at least: first tokens for TTFT, admissions for queue wait, gaps
    between tokens for ITL. With fewer that percentile is unknown."""
    settle_seconds: SettleSeconds = SettleSeconds()
    """Seconds of watching after a move."""
    max_step_percent: MaxStepPercent = MaxStepPercent()
    """Largest change in one move."""
    deadband_percent: DeadbandPercent = DeadbandPercent()
    """Share of an SLO between which nothing is moved."""
    verdict: Annotated[VerdictSpec, Later("verdicts")] = VerdictSpec()
    """How a move is judged, and undone."""
    freeze: Annotated[FreezeSpec, Later("verdicts")] = FreezeSpec()
    """When the tuner stops because it goes back and forth."""
    lease_seconds: Annotated[int, Field(ge=30, le=86_400)] = 600
    """A pod goes back to its start-up limits if the operator is silent for so long, in seconds."""
    bounds: Annotated[tuple[KnobBounds, ...], Field(max_length=16), list_map("knob")] = ()
    """How far each knob may move. Default for a knob that is not listed: from a quarter of the limit in the spec up
    to the envelope."""
    knobs: Annotated[tuple[Knob, ...], Field(max_length=16), SET, Later("rules for more knobs", ready=READY_KNOBS)] = (
        Knob.PREFILL_CHUNK_SIZE,
        Knob.MAX_NUM_SEQS,
    )
    """Knobs that the tuner may move; one that is absent is never touched."""


class AutoscalingMode(StrEnum):
    """Who sets spec.replicas."""

    OFF = "Off"
    INTERNAL = "Internal"
    EXTERNAL = "External"


class ScaleToZero(ApiModel):
    """Whether an idle service goes down to no pod at all."""

    enabled: bool = False
    """Allow no pods."""
    idle_seconds: Seconds = 1800
    """Seconds without a request before the last pod goes."""
    require_gateway_signal: bool = True
    """Go to zero only where a gateway can wake the service again."""


class ScalingTarget(ApiModel):
    """How full a replica should be."""

    model_config = ConfigDict(
        json_schema_extra=model_rules(
            Rule(
                "self.downUtilizationPercent <= self.utilizationPercent - 10",
                "spec.autoscaling.target.downUtilizationPercent must be at least 10 below utilizationPercent",
                ".downUtilizationPercent",
            )
        )
    )

    utilization_percent: Percent = 75
    """Load over capacity, in percent, that scaling up aims at."""
    down_utilization_percent: Percent = 60
    """Load over capacity, in percent, that must hold with one replica less."""
    slo_ratio_up_percent: Percent = 55
    """Latency over SLO, in percent, above which replicas are added."""
    slo_ratio_down_percent: Percent = 40
    """Latency over SLO, in percent, below which one may go."""
    queue_drain_seconds: Seconds = 120
    """Seconds in which the present queue should be empty."""


class ScaleUpPolicy(ApiModel):
    """How fast replicas are added."""

    stabilization_seconds: Annotated[int, Field(ge=0, le=3600)] = 0
    """Seconds that the wish must hold."""
    max_percent: Annotated[int, Field(ge=1, le=1000)] = 100
    """Growth in one period, in percent."""
    max_pods: Annotated[int, Field(ge=1, le=1000)] = 4
    """Pods added in one period, or maxPercent if that is more."""
    period_seconds: Seconds = 60
    """Seconds of one period."""


class ScaleDownPolicy(ApiModel):
    """How fast replicas are taken away."""

    stabilization_seconds: Annotated[int, Field(ge=0, le=3600)] = 300
    """Seconds that the wish must hold."""
    max_pods: Annotated[int, Field(ge=1, le=1000)] = 1
    """Pods taken away in one period."""
    period_seconds: Seconds = 120
    """Seconds of one period."""


class MissingMetrics(StrEnum):
    """What happens to replicas while signals are missing."""

    HOLD = "Hold"
    HOLD_THEN_FALLBACK = "HoldThenFallback"


class AutoscalingSpec(ApiModel):
    """Replicas that follow the SLO."""

    model_config = ConfigDict(
        json_schema_extra=model_rules(
            Rule(
                "self.minReplicas <= self.maxReplicas",
                "spec.autoscaling.minReplicas must not exceed spec.autoscaling.maxReplicas",
                ".minReplicas",
            ),
            Rule(
                "self.minReplicas > 0 || self.scaleToZero.enabled",
                "spec.autoscaling.minReplicas 0 needs spec.autoscaling.scaleToZero.enabled",
                ".minReplicas",
            ),
        )
    )

    mode: AutoscalingMode = AutoscalingMode.OFF
    """Off: you set replicas. Internal: the operator does. External: an HPA or KEDA does."""
    min_replicas: Annotated[int, Field(ge=0, le=1000)] = 1
    """Replicas at least; 0 needs scaleToZero.enabled."""
    max_replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    """Replicas at most."""
    scale_to_zero: ScaleToZero = ScaleToZero()
    """Whether an idle service goes down to no pod at all."""
    target: ScalingTarget = ScalingTarget()
    """How full a replica should be."""
    scale_up: ScaleUpPolicy = ScaleUpPolicy()
    """How fast replicas are added."""
    scale_down: ScaleDownPolicy = ScaleDownPolicy()
    """How fast replicas are taken away."""
    missing_metrics: MissingMetrics = MissingMetrics.HOLD
    """Hold: replicas stay. HoldThenFallback: they go up to fallbackReplicas."""
    fallback_replicas: Annotated[int, Field(ge=0, le=1000)] = 0
    """Replicas to go up to, never down to, while signals are missing."""
    startup_budget_seconds: Seconds = 600
    """Seconds for which a pod that starts counts as supply."""
