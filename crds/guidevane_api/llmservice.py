"""The LLMService: group guidevane.dev, version v1alpha1. The whole spec, its cross-block rules, and its status."""

from functools import cache
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_camel

from guidevane_api.limits import ENVELOPE_FIELDS, ApiModel, PartialLimits
from guidevane_api.schema import LIVE, ROLLOUT, JsonObject, Later, Rule, find_later, inlined, model_rules
from guidevane_api.spec_control import AutoscalingSpec, RetuneSpec, SLOSpec
from guidevane_api.spec_pod import (
    CacheSpec,
    DisruptionSpec,
    DrainSpec,
    ProbesSpec,
    ResourcesSpec,
    RolloutSpec,
    SchedulingSpec,
    SecuritySpec,
)
from guidevane_api.spec_serving import EngineSpec, EnvelopeSpec, ModelSpec
from guidevane_api.spec_traffic import GatewaySpec, MonitoringSpec, TenancySpec
from guidevane_api.status import LLMServiceStatus

GROUP = "guidevane.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "LLMService"
PLURAL = "llmservices"

NAME_LABEL = f"{GROUP}/name"
"""The only label in a Deployment's selector: it names the service."""
REVISION_LABEL = f"{GROUP}/revision"
"""Hash of what a pod was made from."""
PAUSED_ANNOTATION = f"{GROUP}/paused"
""""true": the operator looks and reports, and writes neither children nor limits."""
RESTART_ANNOTATION = f"{GROUP}/restart-requested-at"
"""RFC 3339; a new value is one orderly roll of the pods."""


def _envelope_rules() -> list[Rule]:
    """spec.limits.x <= spec.envelope.x for every field that both have."""
    unset = {"maxModelLen": "self.envelope.maxModelLen == 0 || "}  # 0: the model's own bound, unknown here
    return [
        Rule(
            f"{unset.get(wire, '')}self.?limits.{wire}.orValue(1) <= self.envelope.{wire}",
            f"spec.limits.{wire} must not exceed spec.envelope.{wire}; lower it or raise the envelope",
            f".limits.{wire}",
        )
        for wire in map(to_camel, ENVELOPE_FIELDS)
    ]


# What a limit that is left out resolves to; the same words as SchedulerLimits.resolve.
_BATCHED = "[self.?limits.maxNumBatchedTokens.orValue(4096), self.envelope.maxNumBatchedTokens].min()"
_MODEL_LEN = "[self.?limits.maxModelLen.orValue(8192), self.envelope.maxModelLen].filter(n, n > 0).min()"


def _inner_rules() -> list[Rule]:
    """Limits that another limit bounds."""
    bounded = {
        "prefillChunkSize": ("maxNumBatchedTokens", _BATCHED),
        "prefillTokenBudget": ("maxNumBatchedTokens", _BATCHED),
        "decodeTokenBudget": ("maxNumBatchedTokens", _BATCHED),
        "maxPromptTokens": ("maxModelLen", _MODEL_LEN),
        "maxOutputTokens": ("maxModelLen", _MODEL_LEN),
    }
    return [
        Rule(
            f"self.?limits.{field}.orValue(1) <= {expression}",
            f"spec.limits.{field} must not exceed spec.limits.{bound} (or its default)",
            f".limits.{field}",
        )
        for field, (bound, expression) in bounded.items()
    ]


def _unchanged(path: str) -> str:
    """CEL for "this optional field is what it was"; `?` would hide its size, and so its cost, from the API server."""
    here, before = f"self.{path}", f"oldSelf.{path}"
    return f"has({here}) == has({before}) && (!has({here}) || {here} == {before})"


SPEC_RULES = (
    *_envelope_rules(),
    *_inner_rules(),
    Rule(
        "self.?limits.prefillChunkSize.orValue(0) % self.envelope.blockSize == 0",
        "spec.limits.prefillChunkSize must be a multiple of spec.envelope.blockSize",
        ".limits.prefillChunkSize",
    ),
    Rule(
        "!has(self.retune.bounds) || self.retune.bounds.all(b, b.max <="
        " (b.knob == 'maxNumSeqs' ? self.envelope.maxNumSeqs"
        " : b.knob == 'kvCacheUtilizationLimitPercent' ? 100 : self.envelope.maxNumBatchedTokens))",
        "spec.retune.bounds: max must not exceed spec.envelope.maxNumSeqs for maxNumSeqs,"
        " spec.envelope.maxNumBatchedTokens for prefillChunkSize and maxNumBatchedTokens, 100 for a percentage",
        ".retune.bounds",
    ),
    Rule(
        "self.retune.windowSeconds >= 4 * self.monitoring.scrapeIntervalSeconds",
        "spec.retune.windowSeconds must be at least 4 times spec.monitoring.scrapeIntervalSeconds",
        ".retune.windowSeconds",
    ),
    Rule(
        "self.retune.settleSeconds.raise >= self.retune.windowSeconds + self.monitoring.scrapeIntervalSeconds",
        "spec.retune.settleSeconds.raise must be at least spec.retune.windowSeconds"
        " + spec.monitoring.scrapeIntervalSeconds",
        ".retune.settleSeconds.raise",
    ),
    Rule(
        "self.rollout.strategy != 'DrainFirst' || self.rollout.?allowDowntime.orValue(false) || self.replicas != 1"
        " || self.?autoscaling.maxReplicas.orValue(1) > 1",
        "spec.rollout.strategy DrainFirst with one replica needs spec.rollout.allowDowntime",
        ".rollout.strategy",
    ),
    Rule(
        f"({_unchanged('limits')}) || ({_unchanged('envelope')} && {_unchanged('engine.image')})",
        "spec.limits (live) must not change together with spec.envelope or spec.engine.image (a rollout);"
        " make two updates",
        ".limits",
    ),
)
"""CEL rules that look at more than one block."""


class LLMServiceSpec(ApiModel):
    """What you want served, and how well."""

    model_config = ConfigDict(json_schema_extra=model_rules(*SPEC_RULES))

    suspend: bool = False
    """True: no pods, everything else is kept. Takes effect at once."""
    replicas: Annotated[int, Field(ge=0, le=1000)] = 1
    """Pods. Takes effect at once. Leave it out of GitOps where something else scales the service."""
    model: Annotated[ModelSpec, ROLLOUT]
    """The model that is served."""
    engine: Annotated[EngineSpec, ROLLOUT] = EngineSpec()
    """The runtime container."""
    envelope: Annotated[EnvelopeSpec, ROLLOUT] = EnvelopeSpec()
    """Start-up capacity: what memory and kernels are sized for."""
    limits: Annotated[PartialLimits, LIVE] = PartialLimits()
    """Live gates of the scheduler; running requests go on. A limit that is left out has a conservative default that
    is never above the envelope."""
    slo: Annotated[SLOSpec, LIVE] = SLOSpec()
    """What a good answer is, and the lines that the guard protects."""
    retune: Annotated[RetuneSpec, LIVE] = RetuneSpec()
    """The tuner, which moves spec.limits for you."""
    autoscaling: Annotated[AutoscalingSpec | None, Later("autoscaling")] = None
    """Replicas that follow the SLO."""
    resources: Annotated[ResourcesSpec, ROLLOUT] = ResourcesSpec()
    """GPU, CPU and memory of one pod."""
    scheduling: Annotated[SchedulingSpec, ROLLOUT] = SchedulingSpec()
    """Where the pods may run."""
    cache: Annotated[CacheSpec | None, Later("caches")] = None
    """Caches of weights and kernels that outlive a pod."""
    rollout: RolloutSpec = RolloutSpec()
    """How a change to the pods is brought out."""
    drain: Annotated[DrainSpec, ROLLOUT] = DrainSpec()
    """How a pod ends without breaking a stream."""
    disruption: Annotated[DisruptionSpec, LIVE] = DisruptionSpec()
    """What may interrupt the service on purpose."""
    probes: Annotated[ProbesSpec, ROLLOUT] = ProbesSpec()
    """Probes of the runtime container."""
    security: Annotated[SecuritySpec, ROLLOUT] = SecuritySpec()
    """What the pods may do."""
    monitoring: Annotated[MonitoringSpec, LIVE] = MonitoringSpec()
    """Where the operator reads its signals."""
    gateway: Annotated[GatewaySpec, LIVE] = GatewaySpec()
    """How requests reach the pods."""
    tenancy: Annotated[TenancySpec | None, LIVE] = None
    """Tenants and classes that share the service."""


NAME_RULE = Rule(
    "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$') && size(self.metadata.name) <= 52",
    "metadata.name must start with a letter, hold only a-z, 0-9 and '-', and have at most 52 characters",
    ".metadata.name",
)


class LLMService(ApiModel):
    """An LLM served on GPU or CPU pods behind the OpenAI API, with live scheduler limits and an SLO."""

    model_config = ConfigDict(json_schema_extra=model_rules(NAME_RULE))

    api_version: str = API_VERSION
    kind: str = KIND
    metadata: dict[str, Any] = Field(default_factory=dict)
    spec: LLMServiceSpec
    """What you want served, and how well."""
    status: LLMServiceStatus | None = None
    """What the operator saw and did."""


def not_in_effect(spec: JsonObject) -> list[tuple[str, str]]:
    """Fields of a spec (as the API server holds it) that are set and have no effect in this release.

    Returns (path, sentence) pairs, as in ("spec.autoscaling.mode", "..."): for the condition SpecAccepted. A field
    that is set to its default asks for nothing and is not listed.
    """
    return find_later(spec_schema(), spec, "spec")


@cache
def spec_schema() -> JsonObject:
    """The spec's schema with `$ref`s resolved and our marks in it."""
    return inlined(LLMServiceSpec.model_json_schema())
