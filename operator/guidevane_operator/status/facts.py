"""Everything that status is built from, as one frozen value."""

from dataclasses import dataclass, field
from datetime import datetime

from guidevane_api.conditions import Reason
from guidevane_api.llmservice import LLMServiceSpec
from guidevane_api.status import LLMServiceStatus, MetricsState
from guidevane_operator.admin_client import PushResult
from guidevane_operator.facts import DeploymentFacts, PodFacts
from guidevane_operator.kube import ServiceKey
from guidevane_operator.limits_plan import DesiredLimits
from guidevane_operator.loops import Failure
from guidevane_operator.signals import Signals
from guidevane_operator.tenants import TenantsPlan


@dataclass(frozen=True)
class StatusFacts:
    """One service at one moment."""

    key: ServiceKey
    generation: int
    now: datetime
    previous: LLMServiceStatus
    """What the API server holds: for transition times and for what others of us wrote."""
    spec: LLMServiceSpec | None = None
    """The accepted spec; None if there never was one."""
    refused: str = ""
    refused_reason: Reason | None = None
    deleting: bool = False
    paused: bool = False
    wanted_replicas: int = 0
    revision: str = ""
    pods: tuple[PodFacts, ...] = ()
    deployment: DeploymentFacts | None = None
    child_error: str = ""
    desired: DesiredLimits | None = None
    in_sync: frozenset[str] = frozenset()
    """Names of ready pods that obey."""
    answers: dict[str, PushResult] = field(default_factory=dict)
    """Last answer of each pod, by name."""
    metrics_state: MetricsState = MetricsState.ABSENT
    """Damped: one lost scrape does not flip it."""
    signals: Signals = field(default_factory=Signals)
    tenants: TenantsPlan | None = None
    """None until the keys of tenants were read."""
    slo_missed: bool = False
    """Damped: one bad look is no breach, one good look no recovery."""
    attainment_percent: int | None = None
    """Share of good looks in the last hour."""
    unready_s: float = 0.0
    """For how long too few pods have been ready."""
    failure: Failure | None = None
    """Passes that failed in a row."""

    @property
    def alive(self) -> tuple[PodFacts, ...]:
        """Pods that are not on their way out."""
        return tuple(pod for pod in self.pods if not pod.terminating)

    @property
    def ready(self) -> tuple[PodFacts, ...]:
        """Pods that serve, of any revision."""
        return tuple(pod for pod in self.alive if pod.ready)

    @property
    def updated(self) -> tuple[PodFacts, ...]:
        """Pods of the present revision."""
        return tuple(pod for pod in self.alive if pod.revision == self.revision)

    @property
    def updated_ready(self) -> int:
        """Ready pods of the present revision: old ones must not make a broken revision look ready."""
        return sum(pod.ready for pod in self.updated)
