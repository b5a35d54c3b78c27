"""How a pod runs: the blocks from `resources` to `security` of an LLMService.

No PodSpec is embedded: each field is one that a serving pod needs, so the CRD stays small.
"""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from guidevane_api.limits import ApiModel
from guidevane_api.schema import (
    OPAQUE,
    Later,
    ObjectName,
    OptionalName,
    OptionalQuantity,
    Quantity,
    Rule,
    Seconds,
    ShortText,
    Word,
    list_map,
    model_rules,
)


class GPUSpec(ApiModel):
    """GPUs of one pod."""

    model_config = ConfigDict(
        json_schema_extra=model_rules(
            Rule(
                "self.resourceName == oldSelf.resourceName",
                "spec.resources.gpu.resourceName can't be changed; create a new LLMService for another kind of GPU",
                ".resourceName",
            )
        )
    )

    resource_name: Annotated[str, Field(min_length=1, max_length=253)] = "nvidia.com/gpu"
    """Resource of the device plugin; MIG slices as in nvidia.com/mig-1g.10gb. Can't be changed."""
    per_replica: Annotated[int, Field(ge=0, le=64)] = 1
    """GPUs of one pod; 0: the pod runs on CPU. The runtime computes on one of them: more are no faster yet."""


class ResourceClaim(ApiModel):
    """One claim of Dynamic Resource Allocation."""

    name: ObjectName
    """Name of the claim in the pod."""
    resource_claim_template_name: ObjectName
    """ResourceClaimTemplate in the same namespace."""


class ComputeQuantities(ApiModel):
    """CPU and memory of the runtime container."""

    cpu: Quantity | None = None
    """Cores, as in 4 or 500m. The runtime's threads follow the CPU limit."""
    memory: Quantity | None = None
    """Memory, as in 16Gi."""


class ResourcesSpec(ApiModel):
    """What one pod gets."""

    model_config = ConfigDict(
        json_schema_extra=model_rules(
            Rule(
                "!has(self.gpu) || self.gpu.perReplica == 0 || !has(self.claims) || size(self.claims) == 0",
                "spec.resources takes gpu or claims, not both",
                ".claims",
            )
        )
    )

    gpu: GPUSpec | None = None
    """GPUs of one pod. Default: none, the pod runs on CPU."""
    claims: Annotated[
        tuple[ResourceClaim, ...], Field(max_length=8), list_map("name"), Later("resource claims (DRA)")
    ] = ()
    """Claims of Dynamic Resource Allocation, instead of gpu."""
    requests: ComputeQuantities = ComputeQuantities()
    """What the scheduler sets aside for the pod. Default: what limits say."""
    limits: ComputeQuantities = ComputeQuantities()
    """What the pod can't exceed. On GPU leave cpu out: a throttled scheduler thread shows up as ITL spikes."""
    shared_memory: OptionalQuantity = ""
    """Size of /dev/shm, held in memory, as in 2Gi. Default: that of the container runtime (64Mi)."""


class Toleration(ApiModel):
    """A taint that the pods tolerate, as in a PodSpec."""

    key: ShortText | None = None
    """Taint key. Default: every key, with operator Exists."""
    operator: Annotated[str, Field(max_length=16, pattern="^(Exists|Equal)$")] | None = None
    """Exists or Equal."""
    value: Word | None = None
    """Taint value, with Equal."""
    effect: Annotated[str, Field(max_length=32, pattern="^(NoSchedule|PreferNoSchedule|NoExecute)$")] | None = None
    """NoSchedule, PreferNoSchedule or NoExecute. Default: every effect."""
    toleration_seconds: Annotated[int, Field(ge=0, le=86_400)] | None = None
    """Seconds that a NoExecute taint is tolerated. Default: for ever."""


class WhenUnsatisfiable(StrEnum):
    """What the scheduler does if the spread can't be kept."""

    SCHEDULE_ANYWAY = "ScheduleAnyway"
    DO_NOT_SCHEDULE = "DoNotSchedule"


class TopologySpread(ApiModel):
    """How the pods spread over nodes or zones."""

    max_skew: Annotated[int, Field(ge=1, le=100)] = 1
    """Difference between the fullest and the emptiest domain, at most."""
    topology_key: Annotated[str, Field(min_length=1, max_length=253)] = "kubernetes.io/hostname"
    """Node label that names the domain."""
    when_unsatisfiable: WhenUnsatisfiable = WhenUnsatisfiable.SCHEDULE_ANYWAY
    """DoNotSchedule can block a rollout that has no spare node."""


class SchedulingSpec(ApiModel):
    """Where the pods may run."""

    node_selector: Annotated[dict[str, Word], Field(max_length=32)] = Field(default_factory=dict)
    """Labels that a node must have."""
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=32)] = ()
    """Taints that the pods tolerate. For a GPU service the operator adds the GPU's own (NoSchedule)."""
    affinity: Annotated[dict[str, Any] | None, OPAQUE] = None
    """Affinity as in a PodSpec; passed on as it is, checked when the pods are made."""
    topology_spread: TopologySpread = TopologySpread()
    """How the pods spread over nodes or zones."""
    priority_class_name: OptionalName = ""
    """PriorityClass of the pods. Default: the cluster's."""
    runtime_class_name: OptionalName = ""
    """RuntimeClass of the pods. Default: the node's."""


class WeightsCacheType(StrEnum):
    """Where downloaded weights are kept."""

    PVC = "PVC"
    IMAGE = "Image"
    EMPTY_DIR = "EmptyDir"
    HOST_PATH = "HostPath"


class WeightsCache(ApiModel):
    """Where downloaded weights are kept."""

    model_config = ConfigDict(
        json_schema_extra=model_rules(
            Rule(
                "self.type == oldSelf.type",
                "spec.cache.weights.type can't be changed; create a new LLMService for another kind of cache",
                ".type",
            )
        )
    )

    type: WeightsCacheType = WeightsCacheType.PVC
    """PVC, Image (an OCI image volume), EmptyDir or HostPath. Can't be changed."""
    claim_name: OptionalName = ""
    """Claim to use. Default: the operator makes one."""
    size: OptionalQuantity = ""
    """Size of a claim that the operator makes."""
    storage_class_name: OptionalName = ""
    """StorageClass of that claim. Default: the cluster's."""
    access_mode: Annotated[str, Field(max_length=32, pattern="^(ReadOnlyMany|ReadWriteMany|ReadWriteOnce)$")] = (
        "ReadOnlyMany"
    )
    """ReadOnlyMany, ReadWriteMany or ReadWriteOnce."""


class CompileCache(ApiModel):
    """Where compiled kernels are kept."""

    type: Annotated[str, Field(max_length=16, pattern="^(EmptyDir|HostPath)$")] = "EmptyDir"
    """EmptyDir or HostPath."""
    host_path: Annotated[str, Field(max_length=512)] = ""
    """Folder on the node, with HostPath."""


class Reclaim(StrEnum):
    """What happens to a cache when its service is deleted."""

    RETAIN = "Retain"
    DELETE = "Delete"


class CacheSpec(ApiModel):
    """Caches that outlive a pod."""

    weights: WeightsCache = WeightsCache()
    """Where downloaded weights are kept."""
    compile: CompileCache = CompileCache()
    """Where compiled kernels are kept."""
    reclaim: Reclaim = Reclaim.RETAIN
    """Retain or Delete the cache when the service is deleted."""


class RolloutStrategy(StrEnum):
    """How old pods give way to new ones."""

    AUTO = "Auto"
    SURGE = "Surge"
    DRAIN_FIRST = "DrainFirst"
    RECREATE = "Recreate"


class CanarySpec(ApiModel):
    """A new revision is tried on a part of the traffic first."""

    enabled: bool = False
    """Try a new revision first."""
    replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    """Pods of the canary."""
    weight_percent: Annotated[int, Field(ge=1, le=99)] = 10
    """Share of the traffic, in percent."""
    bake_seconds: Seconds = 300
    """Seconds of the trial."""
    min_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 200
    """Requests of the trial, at least."""
    auto_rollback: bool = True
    """Go back by itself if the canary is worse."""


class RolloutSpec(ApiModel):
    """How a change to the pods is brought out."""

    model_config = ConfigDict(
        json_schema_extra=model_rules(
            Rule(
                "!has(self.canary) || !self.canary.enabled || self.strategy != 'Recreate'",
                "spec.rollout.canary needs a spec.rollout.strategy other than Recreate",
                ".strategy",
            )
        )
    )

    strategy: Annotated[RolloutStrategy, Later("rollout strategies", ready=("Auto",))] = RolloutStrategy.AUTO
    """Auto on CPU: a new pod is ready before an old one goes. Auto on GPU: an old one goes first, since a new one may
    find no free GPU; with one replica the service is away until the new one is ready."""
    surge_stall_seconds: Annotated[Seconds, Later("rollout strategies")] = 120
    """Seconds without room for a new pod before Auto goes on with DrainFirst."""
    allow_downtime: Annotated[bool, Later("rollout strategies")] = False
    """Allow DrainFirst with one replica."""
    progress_deadline_seconds: Seconds = 1800
    """Seconds for a new revision to become ready; after that the service says so. Live."""
    max_parallel: Annotated[int, Field(ge=1, le=100), Later("rollout strategies")] = 1
    """Pods replaced at once."""
    canary: Annotated[CanarySpec, Later("canary rollouts")] = CanarySpec()
    """A new revision is tried on a part of the traffic first."""
    revision_history_limit: Annotated[int, Field(ge=0, le=20)] = 3
    """Old revisions that are kept. Live."""


class DrainSpec(ApiModel):
    """How a pod ends: no new requests, then the running ones finish.

    The pod's grace period is preStop + shutdown + margin, at most maxSeconds.
    """

    pre_stop_seconds: Annotated[int, Field(ge=0, le=600)] = 15
    """Seconds for load balancers to notice before requests are refused."""
    shutdown_seconds: Annotated[int, Field(ge=1, le=3600)] = 45
    """Seconds for running requests to finish after that."""
    margin_seconds: Annotated[int, Field(ge=0, le=600)] = 15
    """Seconds to spare before the node kills the pod."""
    max_seconds: Annotated[int, Field(ge=1, le=7200)] = 600
    """Seconds of all three together, at most."""


class PDBMode(StrEnum):
    """Whether the service has a PodDisruptionBudget."""

    AUTO = "Auto"
    OFF = "Off"


class DisruptionSpec(ApiModel):
    """What may interrupt the service on purpose."""

    pdb: PDBMode = PDBMode.AUTO
    """Auto: a PodDisruptionBudget with maxUnavailable 1 from two replicas on; none for one replica, which would block
    node drains for ever. Off: never."""
    protect_startup: Annotated[bool, Later("start-up protection")] = True
    """Keep the cluster autoscaler away from a pod that loads its model."""


class StartupProbe(ApiModel):
    """How long a model may load."""

    period_seconds: Annotated[int, Field(ge=1, le=300)] = 5
    """Seconds between two looks."""
    failure_threshold: Annotated[int, Field(ge=1, le=10_000)] = 240
    """Looks until the container is restarted; 240 looks of 5 seconds are 20 minutes."""


class ReadinessProbe(ApiModel):
    """When a pod gets requests: the model is loaded, and the pod is not draining."""

    period_seconds: Annotated[int, Field(ge=1, le=300)] = 5
    """Seconds between two looks."""
    failure_threshold: Annotated[int, Field(ge=1, le=100)] = 2
    """Looks until the pod gets no requests."""


class LivenessProbe(ApiModel):
    """When a container is restarted."""

    period_seconds: Annotated[int, Field(ge=1, le=300)] = 10
    """Seconds between two looks."""
    failure_threshold: Annotated[int, Field(ge=1, le=100)] = 6
    """Looks until the container is restarted."""
    stuck_seconds: Annotated[Seconds, Later("stuck-engine probes")] = 120
    """Seconds in which a running request must have got a token."""


class ProbesSpec(ApiModel):
    """Probes of the runtime container."""

    startup: StartupProbe = StartupProbe()
    """How long a model may load."""
    readiness: ReadinessProbe = ReadinessProbe()
    """When a pod gets requests."""
    liveness: LivenessProbe = LivenessProbe()
    """When a container is restarted."""


class PodSecurity(StrEnum):
    """Pod Security level that the pods keep to."""

    RESTRICTED = "Restricted"
    BASELINE = "Baseline"


class SecuritySpec(ApiModel):
    """What the pods may do."""

    pod_security: PodSecurity = PodSecurity.RESTRICTED
    """Pod Security level that the pods keep to: Restricted, or Baseline for an image that must run as root."""
    service_account_name: OptionalName = ""
    """ServiceAccount of the pods. Default: the operator makes one with the service's name and no rights."""
    automount_token: bool = False
    """Mount the ServiceAccount's token into the pods."""
