"""Brings the desired limits to the pods, and finds out which of them obey."""

import asyncio
from dataclasses import dataclass, field

from guidevane_api.admin import LimitsPatch
from guidevane_api.limits import Envelope, PartialLimits, SchedulerLimits
from guidevane_api.spec_serving import EngineSpec
from guidevane_operator.admin_client import Accepted, AdminClient, Fenced, PushResult, Refused, Unreachable
from guidevane_operator.facts import PodFacts
from guidevane_operator.limits_plan import obeys, outgoing
from guidevane_operator.record import Ack, ServiceRecord

DEFAULT_ADMIN_PORT = EngineSpec().admin_port
"""Admin port of a pod that names none, under a spec that cannot be read."""


@dataclass
class PushOutcome:
    """What came of one round over the pods."""

    fenced_at: int | None = None
    """Highest epoch that a pod holds against ours."""
    corrected: list[str] = field(default_factory=list)
    """Pods that obey again after their engine started anew."""


async def push_limits(record: ServiceRecord, admin: AdminClient, renew: bool = False) -> PushOutcome:
    """PATCH every ready pod that does not obey yet; with `renew`, every ready pod, which renews its lease.

    All pods are asked at once: one that hangs costs the others nothing.
    """
    outcome = PushOutcome()
    desired = record.desired
    if desired is None or not record.token:
        return outcome
    ready = record.ready_pods()
    record.acks = {name: ack for name, ack in record.acks.items() if name in record.pods}
    in_sync = set(record.pods_in_sync())
    due = [pod for pod in ready if renew or pod.name not in in_sync]
    patch = LimitsPatch(
        epoch=desired.epoch,
        limits=_asked(record, desired.limits),
        lease_seconds=record.lease_seconds,
        source=desired.source,
    )
    port, token = record.spec.engine.admin_port if record.spec else DEFAULT_ADMIN_PORT, record.token
    results = await asyncio.gather(*(admin.patch(pod.ip, pod.admin_port or port, token, patch) for pod in due))
    for pod, result in zip(due, results, strict=True):
        before = record.acks.get(pod.name)
        ack = _ack(pod, patch.limits, desired.epoch, result, before)
        if isinstance(result, Refused) and result.status in (401, 403):
            record.token = ""  # somebody changed the Secret: read it again
        record.acks[pod.name] = ack
        if isinstance(result, Fenced):
            outcome.fenced_at = max(outcome.fenced_at or 0, result.epoch or 0)
        if _was_lost(before, ack):
            outcome.corrected.append(pod.name)
    return outcome


def _asked(record: ServiceRecord, limits: SchedulerLimits) -> PartialLimits:
    """What is sent. Without an accepted spec, lengths are left as the pod has them: nobody says whose they are."""
    if record.spec is None:
        return outgoing(limits, PartialLimits(), Envelope(max_model_len=0))
    return outgoing(limits, record.spec.limits, record.spec.envelope)


def _ack(pod: PodFacts, asked: PartialLimits, epoch: int, result: PushResult, before: Ack | None) -> Ack:
    """The pod's answer as a fact."""
    if isinstance(result, Accepted):
        view = result.view
        return Ack(pod.incarnation, epoch, view.epoch == epoch and obeys(view.target, asked), result, view.boot_id)
    silences = (before.silences if before else 0) + 1 if isinstance(result, Unreachable) else 0
    return Ack(pod.incarnation, epoch, False, result, silences=silences)


def _was_lost(before: Ack | None, now: Ack) -> bool:
    """The pod obeyed this epoch, came back as another process, and obeys again."""
    return before is not None and before.in_sync and now.in_sync and before.boot_id != now.boot_id
