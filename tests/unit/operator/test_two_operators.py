"""Two operators at once: of one service, the limits of whoever persisted last hold, and epochs do not race."""

from types import SimpleNamespace
from typing import Any

import pytest

from guidevane_api.admin import LimitsPatch, LimitsSource
from guidevane_api.limits import Envelope, PartialLimits, SchedulerLimits
from guidevane_operator.admin_client import Fenced, PushResult
from guidevane_operator.kube import PODS, Manifest, Resource, ServiceKey
from guidevane_operator.limits_plan import DesiredLimits, next_desired
from guidevane_operator.push import LimitsPusher
from guidevane_operator.reconcile import Reconciler
from guidevane_operator.record import Directory, ServiceRecord
from guidevane_operator.status.build import limits_status
from guidevane_operator.status.write import to_json
from tests.unit.operator.test_push import KEY, Clock, FakeAdmin, obeyed, pod

OURS = next_desired(PartialLimits(max_num_seqs=4), Envelope(), None)


class Cluster:
    """What the API server holds, a pod that obeys the other operator, and this one, which knows nothing of it yet."""

    def __init__(self, persisted: DesiredLimits, epoch_of_pod: int) -> None:
        self.persisted, self.epoch_of_pod = persisted, epoch_of_pod
        self.num_persisted = 0
        self.clock, self.directory, fake = Clock(), Directory(), FakeAdmin()
        self.fake = fake
        fake.answers["10.0.0.1"] = self.answer
        admin: Any = fake
        kube: Any = self
        silent: Any = SimpleNamespace()
        pusher = LimitsPusher(admin, self.clock, lambda _: None)
        self.operator = Reconciler(self.directory, kube, pusher, silent, kube, silent, "image")
        self.record: ServiceRecord = self.directory.put(self.body())
        self.record.desired, self.record.token = OURS, "t"
        self.record.pods = {"chat-0": pod()}

    def body(self) -> Manifest:
        meta = {"namespace": "demo", "name": "chat", "uid": "u1", "generation": 1, "resourceVersion": "7"}
        status = {"limits": to_json(limits_status(self.persisted, 1, 0))}
        return {"metadata": meta, "spec": {"model": {"uri": "file:///models/tiny"}}, "status": status}

    def answer(self, patch: LimitsPatch) -> PushResult:
        if patch.epoch < self.epoch_of_pod:
            return Fenced(self.epoch_of_pod)
        self.epoch_of_pod = patch.epoch
        return obeyed(patch)

    async def try_get(self, resource: Resource, key: ServiceKey) -> Manifest | None:
        return self.body() if resource.plural == "llmservices" else None

    async def list_labelled(self, resource: Resource, namespace: str, label: str, value: str) -> list[Manifest]:
        assert resource is PODS
        ready = {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
        return [{"metadata": {"name": "chat-0", "uid": "u-chat-0"}, "status": ready}]

    async def persist_limits(self, record: ServiceRecord, desired: DesiredLimits) -> bool:
        self.num_persisted += 1
        self.persisted = record.desired = desired
        return True

    async def write(self, record: ServiceRecord) -> None:
        """Status is not what this is about."""


def theirs(epoch: int) -> DesiredLimits:
    return DesiredLimits(SchedulerLimits(max_num_seqs=2), epoch, LimitsSource.RETUNE, OURS.spec_hash)


async def test_an_epoch_that_the_other_operator_persisted_and_pushed_is_taken_over() -> None:
    cluster = Cluster(theirs(2), epoch_of_pod=2)
    await cluster.operator.renew(KEY)
    assert cluster.record.desired == theirs(2)
    assert cluster.num_persisted == 0, "each would outrun the other at every renewal"
    assert cluster.epoch_of_pod == 2
    assert cluster.record.pods_in_sync() == ["chat-0"]


@pytest.mark.parametrize("persisted", [OURS, theirs(2)])
async def test_a_pod_that_is_ahead_of_status_is_outrun(persisted: DesiredLimits) -> None:
    cluster = Cluster(persisted, epoch_of_pod=5)
    await cluster.operator.renew(KEY)
    assert cluster.persisted == persisted.above(5)
    assert cluster.num_persisted == 1
    assert cluster.record.pods_in_sync() == ["chat-0"]
