"""What the cluster says about a service's pods and Deployment, cut down to what decisions and status need."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from guidevane_api.llmservice import REVISION_LABEL
from guidevane_operator.kube import FIELD_MANAGER

CONTAINER = "runtime"

EXIT_CANNOT_LOAD = 3
"""Exit status of a runtime whose model cannot be loaded: a restart does not help."""


@dataclass(frozen=True)
class Termination:
    """How the runtime container ended last."""

    exit_code: int
    reason: str
    """Kubelet's word: Error, OOMKilled, Completed."""
    message: str
    """What the process wrote into its termination message, one sentence."""


class Incarnation(NamedTuple):
    """One life of a runtime process, as far as Kubernetes tells them apart."""

    uid: str
    ip: str
    restarts: int


@dataclass(frozen=True)
class PodFacts:
    """One pod of a service."""

    name: str
    uid: str
    ip: str
    revision: str
    ready: bool
    terminating: bool
    restarts: int
    started: bool
    waiting_reason: str = ""
    """Kubelet's word while the container waits: CrashLoopBackOff, ImagePullBackOff, ContainerCreating."""
    waiting_message: str = ""
    termination: Termination | None = None
    unschedulable: str = ""
    """The scheduler's sentence while the pod finds no node."""
    admin_port: int = 0
    """Its own: a pod of an older revision may have another than the spec says. 0 if the pod names none."""

    @property
    def can_be_patched(self) -> bool:
        """The admin port should answer: the pod is ready and stays."""
        return bool(self.ip) and self.ready and not self.terminating

    @property
    def incarnation(self) -> Incarnation:
        """Changes whenever the runtime process is another one, or is elsewhere."""
        return Incarnation(self.uid, self.ip, self.restarts)


@dataclass(frozen=True)
class DeploymentFacts:
    """The Deployment of a service."""

    uid: str
    generation: int
    observed_generation: int
    replicas: int
    updated_replicas: int
    progress_deadline_exceeded: bool
    replica_failure: str
    """Message of the ReplicaFailure condition, for instance a quota or an admission refusal."""
    scaled_by: str = ""
    """Field manager, other than ours, that owns spec.replicas."""


def read_pod(body: Mapping[str, Any]) -> PodFacts:
    """Facts of a pod object."""
    meta, status = body["metadata"], body.get("status") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    container: dict[str, Any] = next(
        (c for c in status.get("containerStatuses") or () if c.get("name") == CONTAINER), {}
    )
    waiting = (container.get("state") or {}).get("waiting") or {}
    scheduled = conditions.get("PodScheduled") or {}
    unschedulable = scheduled.get("reason") == "Unschedulable"
    return PodFacts(
        name=meta["name"],
        uid=meta.get("uid", ""),
        ip=status.get("podIP") or "",
        revision=(meta.get("labels") or {}).get(REVISION_LABEL, ""),
        ready=(conditions.get("Ready") or {}).get("status") == "True",
        terminating=bool(meta.get("deletionTimestamp")) or status.get("phase") in ("Failed", "Succeeded"),
        restarts=int(container.get("restartCount") or 0),
        started=bool((container.get("state") or {}).get("running")),
        waiting_reason=waiting.get("reason") or "",
        waiting_message=waiting.get("message") or "",
        termination=_termination(container),
        unschedulable=(scheduled.get("message") or "no node fits") if unschedulable else "",
        admin_port=_admin_port(body.get("spec") or {}),
    )


def _admin_port(spec: Mapping[str, Any]) -> int:
    """The port that the runtime container calls admin."""
    ports = [
        int(port["containerPort"])
        for container in spec.get("containers") or ()
        if container.get("name") == CONTAINER
        for port in container.get("ports") or ()
        if port.get("name") == "admin"
    ]
    return ports[0] if ports else 0


def _termination(container: Mapping[str, Any]) -> Termination | None:
    """The newest end of the container: the present state before the last one."""
    for state in (container.get("state") or {}, container.get("lastState") or {}):
        ended = state.get("terminated")
        if ended:
            return Termination(
                int(ended.get("exitCode") or 0), ended.get("reason") or "", (ended.get("message") or "").strip()
            )
    return None


def read_deployment(body: Mapping[str, Any]) -> DeploymentFacts:
    """Facts of a Deployment object."""
    meta, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    progressing, failure = conditions.get("Progressing") or {}, conditions.get("ReplicaFailure") or {}
    return DeploymentFacts(
        uid=meta.get("uid", ""),
        generation=int(meta.get("generation") or 0),
        observed_generation=int(status.get("observedGeneration") or 0),
        replicas=int(spec.get("replicas") or 0),
        updated_replicas=int(status.get("updatedReplicas") or 0),
        progress_deadline_exceeded=progressing.get("reason") == "ProgressDeadlineExceeded",
        replica_failure=(failure.get("message") or "") if failure.get("status") == "True" else "",
        scaled_by=next((m for m in map(_owner_of_replicas, meta.get("managedFields") or ()) if m), ""),
    )


def _owner_of_replicas(entry: Mapping[str, Any]) -> str:
    """The manager in an entry of managedFields, if it owns spec.replicas and is not us."""
    owns = "f:replicas" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
    manager = str(entry.get("manager") or "")
    return manager if owns and manager != FIELD_MANAGER else ""
