"""What the operator holds in memory about each service, and the index of all of them.

Nothing in here has to survive a restart: what must is in status, the rest is read again.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime

from pydantic import ValidationError

from guidevane_api.admin import LimitsPatch
from guidevane_api.llmservice import PAUSED_ANNOTATION, LLMServiceSpec
from guidevane_api.spec_control import RetuneSpec
from guidevane_api.status import LLMServiceStatus
from guidevane_operator.admin_client import PushResult
from guidevane_operator.facts import DeploymentFacts, Incarnation, PodFacts
from guidevane_operator.guard_news import GuardNews
from guidevane_operator.kube import Manifest, ServiceKey
from guidevane_operator.ledger import ChildLedger, version_of
from guidevane_operator.limits_plan import DesiredLimits
from guidevane_operator.pod_metrics import PodRing
from guidevane_operator.retune.snapshot import LastMove, Rule
from guidevane_operator.signals import SignalHistory
from guidevane_operator.slo_history import SLOHistory
from guidevane_operator.tenants import TenantsPlan

DEFAULT_LEASE_S = RetuneSpec().lease_seconds
"""Lease of limits that stand under a spec that cannot be read, seconds."""


@dataclass(frozen=True)
class Ack:
    """What a pod said to the limits of one epoch."""

    incarnation: Incarnation
    epoch: int
    in_sync: bool
    result: PushResult
    boot_id: str = ""
    silences: int = 0
    """Times in a row that the admin port did not answer."""
    failures: int = 0
    """Times in a row that the same process did not obey the same epoch."""
    retry_at_s: float = 0.0
    """Not asked again before, monotonic seconds, unless something changes."""


@dataclass(frozen=True)
class Flight:
    """A call to a pod's admin port that is under way: at most one for each pod."""

    task: asyncio.Task[PushResult]
    incarnation: Incarnation
    patch: LimitsPatch
    was_silent: bool
    """The call before was not answered, so nothing waits for this one."""


@dataclass
class TunerMemory:
    """The tuner between two looks."""

    last_move: LastMove | None = None
    settle_until: datetime | None = None
    """Wall clock, for display only."""
    previous_rule: Rule | None = None


@dataclass
class ServiceRecord:
    """One service. Changed by watch handlers (body, pods, deployment, children) and under `lock` by everything else."""

    key: ServiceKey
    body: Manifest
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    pods: dict[str, PodFacts] = field(default_factory=dict)
    deployment: DeploymentFacts | None = None
    needs_refresh: bool = True
    """Read everything from the API before the next decision: at the first sight, and at each resync."""

    dealt_with: tuple[object, ...] | None = None
    """What was asked for when the newest pass began."""
    observed_generation: int = 0
    """Generation of the spec that the newest pass took over or refused: a newer one was only seen so far."""
    num_sightings: int = 0
    """Pods and Deployments that watches brought so far: a list that was asked for before is older than they are."""
    is_gone: bool = False
    """Another object, or none, has this name now: nothing is written for this one any more."""

    spec: LLMServiceSpec | None = None
    """The newest spec that was accepted, None before the first."""
    refused: str = ""
    """Why the present spec is not in effect; empty if it is."""
    refused_reason: str = ""
    revision: str = ""
    """Revision of the pods that the accepted spec asks for."""
    children: ChildLedger = field(default_factory=ChildLedger)
    child_error: str = ""
    contested: str = ""
    """Which child somebody else changes again and again; empty if none."""
    token: str = ""
    tenants: TenantsPlan | None = None
    """Who shares the service, as pods are told; None until the keys were read."""
    secrets_are_due: bool = True
    """Read the service's own Secrets and the tenants' keys again in the next pass."""

    desired: DesiredLimits | None = None
    acks: dict[str, Ack] = field(default_factory=dict)
    """By pod name."""
    flights: dict[str, Flight] = field(default_factory=dict)
    """By pod name."""
    announce_limits: bool = False
    """New spec.limits are on their way; say so once they are everywhere."""
    told_silent: frozenset[str] = frozenset()
    """Pods whose silent admin port was told."""

    history: SignalHistory = field(default_factory=SignalHistory)
    rings: dict[str, PodRing] = field(default_factory=dict)
    """Scrapes of the pods, by name, where there is no Prometheus."""
    metrics_lost: bool = False
    """Sight was lost and this was told; the next sight is told too."""
    guard: GuardNews = field(default_factory=GuardNews)
    slo: SLOHistory = field(default_factory=SLOHistory)
    slo_missed: bool = False
    """A missed SLO was told; its return is told too."""
    unready_since_s: float | None = None
    """Since when too few pods are ready, monotonic seconds; None while enough are."""
    tuner: TunerMemory = field(default_factory=TunerMemory)

    last_status_at: float | None = None
    """When status was written last, monotonic seconds."""

    @property
    def uid(self) -> str:
        """UID of the object."""
        return str(self.body["metadata"].get("uid", ""))

    @property
    def generation(self) -> int:
        """Generation of the spec in `body`."""
        return int(self.body["metadata"].get("generation") or 0)

    @property
    def asked(self) -> tuple[object, ...]:
        """What people ask for in the object: its spec, by generation, its annotations, its deletion."""
        meta = self.body["metadata"]
        return meta.get("generation"), meta.get("annotations"), meta.get("deletionTimestamp")

    @property
    def deleting(self) -> bool:
        """The service is on its way out, or gone; its children go with it."""
        return self.is_gone or bool(self.body["metadata"].get("deletionTimestamp"))

    @property
    def paused(self) -> bool:
        """A person asked the operator to keep its hands off."""
        return (self.body["metadata"].get("annotations") or {}).get(PAUSED_ANNOTATION) == "true"

    @property
    def wanted_replicas(self) -> int:
        """Pods that should exist: as many as stand while no spec was accepted."""
        if self.spec is None:
            return self.deployment.replicas if self.deployment else 0
        return 0 if self.spec.suspend else self.spec.replicas

    @property
    def lease_seconds(self) -> int:
        """How long limits hold without a renewal."""
        return self.spec.retune.lease_seconds if self.spec else DEFAULT_LEASE_S

    @property
    def status(self) -> LLMServiceStatus:
        """The status as the API server holds it, without the blocks that another release wrote and this can't read."""
        held = self.body.get("status") or {}
        try:
            return LLMServiceStatus.model_validate(held)
        except ValidationError as error:
            unreadable = {fault["loc"][0] for fault in error.errors()}
            return LLMServiceStatus.model_validate(
                {name: block for name, block in held.items() if name not in unreadable}
            )

    def ready_pods(self) -> list[PodFacts]:
        """Pods whose admin port can be asked, by name."""
        return sorted((pod for pod in self.pods.values() if pod.can_be_patched), key=lambda pod: pod.name)

    def give_up_calls(self) -> None:
        """End the calls to pods that are under way."""
        for flight in self.flights.values():
            flight.task.cancel()
        self.flights.clear()

    def take_body(self, body: Manifest) -> None:
        """Take over a newer object; a watch may deliver an older one after our own write was answered."""
        if version_of(body) >= version_of(self.body):
            self.body = body

    def pods_in_sync(self) -> list[str]:
        """Names of ready pods that obey the desired limits under the desired epoch."""
        desired = self.desired
        return [
            pod.name
            for pod in self.ready_pods()
            if (ack := self.acks.get(pod.name))
            and desired is not None
            and ack.in_sync
            and ack.epoch == desired.epoch
            and ack.incarnation == pod.incarnation
        ]


class Directory:
    """The index of all services."""

    def __init__(self) -> None:
        self._records: dict[ServiceKey, ServiceRecord] = {}

    def __iter__(self) -> Iterator[ServiceKey]:
        """The keys of all services."""
        return iter(list(self._records))

    def of_namespace(self, namespace: str) -> list[ServiceRecord]:
        """The records of one namespace."""
        return [record for key, record in self._records.items() if key.namespace == namespace]

    def get(self, key: ServiceKey) -> ServiceRecord | None:
        """The record, if the service is known."""
        return self._records.get(key)

    def put(self, body: Manifest) -> ServiceRecord:
        """Take in an object, seen for the first time or again."""
        meta = body["metadata"]
        key = ServiceKey(meta["namespace"], meta["name"])
        record = self._records.get(key)
        if record is None or record.uid != meta.get("uid"):
            # What is said of two objects of one name comes in any order: late news of the old one says nothing.
            if record is not None and version_of(body) < version_of(record.body):
                return record
            self.drop(key)
            record = self._records[key] = ServiceRecord(key, body)
        else:
            record.take_body(body)
        return record

    def drop(self, key: ServiceKey, uid: str = "") -> bool:
        """The service is gone; a visit that is under way ends without a write. False: another has its name now."""
        record = self._records.get(key)
        if record is None or uid not in ("", record.uid):
            return False
        del self._records[key]
        record.is_gone = True
        record.give_up_calls()
        return True
