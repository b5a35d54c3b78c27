"""Conditions about pods: Ready, Available, Progressing. Each check is small and named, the first that speaks wins."""

from collections.abc import Callable
from typing import NamedTuple

from guidevane_api.conditions import ConditionStatus, ConditionType, Reason
from guidevane_operator.facts import EXIT_CANNOT_LOAD, PodFacts
from guidevane_operator.status.facts import StatusFacts

TRUE, FALSE, UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN

CRASHES = 2
"""Restarts from which a container that is down counts as crash looping."""

READY_DAMPING_S = 30.0
"""Ready stays True for so long while some pods serve and the rest, of the same revision, is away for a moment."""

PAUSED = "annotation guidevane.dev/paused is true: nothing is written"

IMAGE_FAULTS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
"""Kubelet's words for an image that it cannot get."""


class Finding(NamedTuple):
    """What a check says about a condition."""

    status: ConditionStatus
    reason: Reason
    message: str = ""


Check = Callable[[StatusFacts], Finding | None]


def ready(facts: StatusFacts) -> Finding:
    """Enough pods of the present revision are ready; if not, the most telling reason first."""
    found = _first(READY_CHECKS, facts) or Finding(FALSE, Reason.PENDING, "no pod exists yet")
    if found.status is FALSE and _is_blip(facts):
        return Finding(TRUE, Reason.READY, f"{_progress(facts)}; the others have not been away for long")
    return found


def _is_blip(facts: StatusFacts) -> bool:
    """Ready before under this very spec and revision, not for long, and some pods still serve."""
    before, rollout = facts.previous.condition(ConditionType.READY), facts.previous.rollout
    return (
        before is not None
        and before.status is TRUE
        and before.observed_generation == facts.generation
        and rollout is not None
        and rollout.revision == facts.revision
        and facts.updated_ready > 0
        and facts.unready_s < READY_DAMPING_S
        and not facts.deleting
    )


def available(facts: StatusFacts) -> Finding:
    """At least one pod serves."""
    if facts.ready:
        return Finding(TRUE, Reason.SERVING, f"{len(facts.ready)} pods serve")
    return Finding(FALSE, Reason.NO_READY_PODS, "no pod is ready")


def progressing(facts: StatusFacts) -> Finding:
    """A change is under way and within its deadline."""
    if facts.deployment is not None and facts.deployment.progress_deadline_exceeded:
        sentence = "pods did not become ready within spec.rollout.progressDeadlineSeconds"
        return Finding(FALSE, Reason.DEADLINE_EXCEEDED, sentence)
    if facts.child_error:
        return Finding(FALSE, Reason.CHILD_REFUSED, facts.child_error)
    if facts.paused:
        return Finding(FALSE, Reason.PAUSED, PAUSED)
    if facts.refused or facts.deleting or is_complete(facts):
        return Finding(FALSE, Reason.COMPLETE, "no change is under way")
    return Finding(TRUE, Reason.PROGRESSING, f"{facts.updated_ready} of {facts.wanted_replicas} pods are ready")


def model_failure(facts: StatusFacts) -> str | None:
    """The runtime's sentence about a model that it cannot load, if a present pod said one."""
    for pod in facts.updated:
        ended = pod.termination
        if not pod.ready and ended is not None and ended.exit_code == EXIT_CANNOT_LOAD:
            uri = facts.spec.model.uri if facts.spec else ""
            return ended.message or f"the runtime cannot load {uri}"
    return None


def is_complete(facts: StatusFacts) -> bool:
    """All wanted pods are there, and no other."""
    return facts.updated_ready >= facts.wanted_replicas and len(facts.alive) == facts.wanted_replicas


def has_enough(facts: StatusFacts) -> bool:
    """As many pods of the present revision are ready as are wanted, and one at least."""
    return facts.updated_ready >= max(1, facts.wanted_replicas)


def _deleting(facts: StatusFacts) -> Finding | None:
    return Finding(FALSE, Reason.TERMINATING, "the service is being deleted") if facts.deleting else None


def _never_accepted(facts: StatusFacts) -> Finding | None:
    if facts.refused and facts.refused_reason and not facts.alive:
        return Finding(FALSE, facts.refused_reason, facts.refused)
    return None


def _suspended(facts: StatusFacts) -> Finding | None:
    if facts.wanted_replicas:
        return None
    return Finding(FALSE, Reason.SUSPENDED, "no pod is wanted: spec.suspend is true or spec.replicas is 0")


def _all_ready(facts: StatusFacts) -> Finding | None:
    if has_enough(facts):
        return Finding(TRUE, Reason.READY, f"{facts.updated_ready} of {facts.wanted_replicas} pods are ready")
    return None


def _model_not_found(facts: StatusFacts) -> Finding | None:
    sentence = model_failure(facts)
    if sentence is None:
        return None
    return Finding(FALSE, Reason.MODEL_NOT_FOUND, f"{sentence}; correct spec.model.uri or put the model there")


def _child_refused(facts: StatusFacts) -> Finding | None:
    refusal = facts.child_error or (facts.deployment.replica_failure if facts.deployment else "")
    return Finding(FALSE, Reason.CHILD_REFUSED, refusal) if refusal else None


def _image(facts: StatusFacts) -> Finding | None:
    pod = _find(facts, lambda pod: pod.waiting_reason in IMAGE_FAULTS)
    return Finding(FALSE, Reason.IMAGE_PULL_FAILED, f"{pod.waiting_reason}: {pod.waiting_message}") if pod else None


def _crash_loop(facts: StatusFacts) -> Finding | None:
    pod = _find(facts, lambda pod: pod.restarts >= CRASHES and pod.termination is not None)
    if pod is None or pod.termination is None:
        return None
    ended = pod.termination
    tail = f": {ended.message}" if ended.message else ""
    text = f"pod {pod.name} ended {pod.restarts} times, last with {ended.reason or 'Error'} {ended.exit_code}{tail}"
    return Finding(FALSE, Reason.CRASH_LOOP, text)


def _unschedulable(facts: StatusFacts) -> Finding | None:
    pod = _find(facts, lambda pod: bool(pod.unschedulable))
    return Finding(FALSE, Reason.PENDING, f"pod {pod.name} is on no node: {pod.unschedulable}") if pod else None


def _rollout(facts: StatusFacts) -> Finding | None:
    if len(facts.ready) <= facts.updated_ready:
        return None
    return Finding(FALSE, Reason.ROLLOUT_IN_PROGRESS, f"{_progress(facts)}; pods of the old revision serve meanwhile")


def _scaling_up(facts: StatusFacts) -> Finding | None:
    return Finding(FALSE, Reason.SCALING_UP, _progress(facts)) if facts.updated_ready else None


def _loading(facts: StatusFacts) -> Finding | None:
    pod = _find(facts, lambda pod: pod.started)
    return Finding(FALSE, Reason.LOADING, f"pod {pod.name} loads its model") if pod else None


READY_CHECKS: tuple[Check, ...] = (
    _deleting,
    _never_accepted,
    _suspended,
    _all_ready,
    _model_not_found,
    _child_refused,
    _image,
    _crash_loop,
    _unschedulable,
    _rollout,
    _scaling_up,
    _loading,
)


def _first(checks: tuple[Check, ...], facts: StatusFacts) -> Finding | None:
    return next((finding for check in checks if (finding := check(facts))), None)


def _find(facts: StatusFacts, wanted: Callable[[PodFacts], bool]) -> PodFacts | None:
    """The first present pod that is not ready and looks like `wanted`."""
    return next((pod for pod in facts.updated if not pod.ready and wanted(pod)), None)


def _progress(facts: StatusFacts) -> str:
    return f"{facts.updated_ready} of {facts.wanted_replicas} pods are ready"
