"""Status of an LLMService: small and slow, written by the operator only. Rapid numbers are in Prometheus."""

from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from guidevane_api.conditions import ConditionStatus, ConditionType
from guidevane_api.limits import ApiModel, PartialLimits
from guidevane_api.schema import TERSE, list_map

Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
"""RFC 3339, UTC, as in 2026-01-31T12:00:00Z."""
MAX_HISTORY = 5
"""Entries of a decision history."""


class StatusModel(ApiModel):
    """Base of status: a field that a newer operator wrote is ignored, every field may be missing.

    Nothing is bounded here: a status write that is refused for a long message would blind the user.
    """

    model_config = ConfigDict(extra="ignore")


class Condition(StatusModel):
    """One fact about the service, in the form of metav1.Condition."""

    type: str
    """What it is about: one of the words under Conditions in the API reference."""
    status: ConditionStatus
    """True, False or Unknown."""
    reason: str = ""
    """Why, in one word."""
    message: str = ""
    """Why, in a sentence for people."""
    observed_generation: int | None = None
    """Generation of the spec that was looked at."""
    last_transition_time: Time | None = None
    """When status changed last."""


class ModelStatus(StatusModel):
    """The model as it was resolved."""

    resolved_revision: str | None = None
    """Commit or digest that is served."""
    loaded_adapters: tuple[str, ...] | None = None
    """LoRA adapters that every pod has loaded."""


class SLOStatus(StatusModel):
    """The signals when status was written last, over all pods and one window. A field is absent while unknown."""

    ttft_p95_milliseconds: int | None = None
    """Time to first token, 95th percentile."""
    itl_p95_milliseconds: int | None = None
    """Time between tokens, 95th percentile."""
    itl_p99_milliseconds: int | None = None
    """Time between tokens, 99th percentile."""
    queue_wait_p95_milliseconds: int | None = None
    """Wait before the first step, 95th percentile."""
    attainment_percent: int | None = None
    """Share of looks in the last hour, since the operator started at most, with every known signal inside its line.
    Looks without enough traffic do not count."""
    kv_cache_percent: int | None = None
    """Share of KV-cache blocks in use, the fullest pod."""


class MetricsState(StrEnum):
    """How well the operator sees."""

    KNOWN = "Known"
    PARTIAL = "Partial"
    STALE = "Stale"
    ABSENT = "Absent"


class MetricsStatus(StatusModel):
    """How well the operator sees."""

    fresh_pods: int | None = None
    """Ready pods with a fresh sample."""
    expected_pods: int | None = None
    """Ready pods."""
    state: MetricsState | None = None
    """Nothing is moved on anything but Known."""


class StatusLimitsSource(StrEnum):
    """Who set the limits that are in force."""

    SPEC = "Spec"
    RETUNE = "Retune"
    REVERT = "Revert"
    LEASE = "Lease"


class LimitsStatus(StatusModel):
    """The live limits that the pods are held to."""

    desired: Annotated[PartialLimits | None, TERSE] = None
    """The limits, all fields filled in: as in spec.limits."""
    epoch: int | None = None
    """Fencing number; written here before it is sent to a pod, and only ever grows."""
    in_sync_pods: int | None = None
    """Ready pods that report these limits under this epoch."""
    source: StatusLimitsSource | None = None
    """Who set them. Revert and Lease are not written yet."""
    spec_generation: int | None = None
    """Generation whose spec.limits were taken over last; a newer one takes precedence over the tuner."""
    spec_hash: str | None = None
    """Hash of those spec.limits: a change of anything else in the spec leaves the tuner's work standing."""


class RetuneState(StrEnum):
    """What the tuner is at."""

    IDLE = "Idle"
    """Auto, and nothing to do."""
    SETTLING = "Settling"
    """A move was made; its effect is awaited."""
    OBSERVING = "Observing"
    """Mode Observe."""
    BLIND = "Blind"
    """A signal is missing: nothing is moved."""
    INFEASIBLE = "Infeasible"
    """The SLO is missed, and no knob is left that may move."""
    GUARDED = "Guarded"
    """The pods' guards give way: nothing is moved meanwhile."""
    DISABLED = "Disabled"
    """Mode Off, suspended, or the spec is refused."""
    JUDGING = "Judging"
    """A settled move is compared with what was before."""
    COOLDOWN = "Cooldown"
    """A move was undone; waiting before the next."""
    FROZEN = "Frozen"
    """Went back and forth too often; stands still for a time."""


class Verdict(StrEnum):
    """What came of a move."""

    PENDING = "Pending"
    BETTER = "Better"
    NEUTRAL = "Neutral"
    WORSE = "Worse"
    CONFOUNDED = "Confounded"


class RetuneMove(StatusModel):
    """One move of one knob, made or proposed."""

    time: Time | None = None
    """When it was decided."""
    knob: str
    """Name of the limit."""
    from_: Annotated[int, Field(alias="from")]
    """Value before."""
    to: int
    """Value after."""
    rule: str
    """Rule of the tuner that asked for it."""
    evidence: str = ""
    """The signals that the rule went by, in words."""
    applied: bool = False
    """False: mode Observe, nothing was sent to the pods."""
    verdict: Verdict | None = None
    """What came of it: Pending. Better, Neutral, Worse and Confounded are not written yet."""


class RetuneStatus(StatusModel):
    """What the tuner does, or would do."""

    state: RetuneState | None = None
    """Judging, Cooldown and Frozen are not written yet."""
    message: str | None = None
    """Why it stands where it does, in a sentence."""
    settle_until: Time | None = None
    """No move before this time."""
    forbidden: tuple[str, ...] | None = None
    """Directions that are forbidden for a while, as in maxNumSeqs:raise. Not written yet."""
    proposal: Annotated[RetuneMove | None, TERSE] = None
    """Mode Observe: what the tuner would do now, as in history. Absent: nothing."""
    history: Annotated[tuple[RetuneMove, ...] | None, Field(max_length=MAX_HISTORY)] = None
    """The last five moves, newest first."""


class GuardStatus(StatusModel):
    """How far the pods' guards give way."""

    level: int | None = None
    """Steps that are taken on the pod with the most; 0 is normal."""
    lines: tuple[str, ...] | None = None
    """Fields of spec.slo that a pod is over."""


class AutoscalingStatus(StatusModel):
    """What the autoscaler does, or would do."""

    current: int | None = None
    """Replicas now."""
    recommended: int | None = None
    """Replicas that the autoscaler would set."""
    limited_by: str | None = None
    """What keeps it from them: None, MaxReplicas, MinReplicas, Rate, Stabilization, PendingPods, GPUCapacity,
    MetricsUnknown, RolloutInProgress or RetuneInProgress."""


class RolloutStatus(StatusModel):
    """The revision of the pods."""

    revision: str | None = None
    """Hash of what the pods are made from; label guidevane.dev/revision."""
    stable_revision: str | None = None
    """The last revision whose pods were all ready."""
    effective_strategy: str | None = None
    """Strategy of the rollout under way. Not written yet."""
    step: str | None = None
    """How far a rollout is, as in 2/3: new pods that are ready over wanted ones. Absent: none is under way."""
    reason: str | None = None
    """Why this strategy, or why it stands still. Not written yet."""


class FailuresStatus(StatusModel):
    """Failures of the operator with this service."""

    consecutive: int | None = None
    """Passes in a row that failed."""
    next_retry_time: Time | None = None
    """When the next pass is due."""
    message: str | None = None
    """The last failure, in a sentence."""


class LLMServiceStatus(StatusModel):
    """What the operator saw and did. Written on change only."""

    observed_generation: int | None = None
    """Generation of the spec that this status speaks of."""
    replicas: int | None = None
    """Pods that exist."""
    ready_replicas: int | None = None
    """Pods that are ready."""
    updated_replicas: int | None = None
    """Pods of the present revision."""
    updated_ready_replicas: int | None = None
    """Pods of the present revision that are ready; Ready is computed from these."""
    selector: str | None = None
    """Label selector of the pods, for the scale subresource."""
    ready_summary: str | None = None
    """Ready pods over wanted pods, as in 2/3."""
    reason: str | None = None
    """Reason of the Ready condition."""
    endpoint: str | None = None
    """Base URL of the OpenAI API inside the cluster."""
    model: ModelStatus | None = None
    """The model as it was resolved. Not written yet."""
    slo: SLOStatus | None = None
    """The signals when status was written last."""
    metrics: MetricsStatus | None = None
    """How well the operator sees."""
    limits: LimitsStatus | None = None
    """The live limits that the pods are held to."""
    retune: RetuneStatus | None = None
    """What the tuner does, or would do."""
    guard: GuardStatus | None = None
    """How far the pods' guards give way; in a dry run they would. Absent: not known."""
    autoscaling: AutoscalingStatus | None = None
    """What the autoscaler does, or would do. Not written yet."""
    rollout: RolloutStatus | None = None
    """The revision of the pods."""
    failures: FailuresStatus | None = None
    """Failures of the operator with this service."""
    conditions: Annotated[tuple[Condition, ...] | None, list_map("type")] = None
    """What is true of the service."""

    def condition(self, kind: ConditionType) -> Condition | None:
        """The condition of this type, if it was written."""
        return next((found for found in self.conditions or () if found.type == kind), None)
