"""Setting children right: when it counts as a quarrel, and that no news is lost while calls are under way."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from guidevane_operator.children.__main__ import context_of
from guidevane_operator.errors import KubeError
from guidevane_operator.events import EventRecorder
from guidevane_operator.kube import Manifest, Resource, ServiceKey
from guidevane_operator.ledger import FREE_CORRECTIONS, ChildKey
from guidevane_operator.record import ServiceRecord
from guidevane_operator.upkeep import ChildKeeper

KEY = ServiceKey("demo", "chat")
META = {"namespace": "demo", "name": "chat", "uid": "u1"}
LIMITS = ChildKey("ConfigMap", "chat-limits")
ACCOUNT = ChildKey("ServiceAccount", "chat")


class FakeKube:
    """Children in memory; keeps fields that are not ours, as server-side apply does."""

    def __init__(self) -> None:
        self.children: dict[ChildKey, Manifest] = {}
        self.version = 100
        self.num_applied = 0
        self.faults: list[KubeError] = []
        """Answers to the next applies, oldest first."""
        self.meanwhile: dict[str, Callable[[], object]] = {}
        """What happens, once, between what a call about the ConfigMap does and its answer: "read" or "apply"."""

    async def try_get(self, resource: Resource, key: ServiceKey) -> Manifest | None:
        kinds = {"configmaps": "ConfigMap", "serviceaccounts": "ServiceAccount"}
        return self._answer("read", ChildKey(kinds.get(resource.plural, ""), key.name))

    async def apply(self, manifest: Manifest) -> Manifest:
        self.num_applied += 1
        if self.faults:
            raise self.faults.pop(0)
        key = ChildKey(manifest["kind"], manifest["metadata"]["name"])
        before = self.children.get(key) or {}
        after = {
            **before,
            **copy.deepcopy(manifest),
            "metadata": {**before.get("metadata", {}), **manifest["metadata"]},
        }
        if "data" in manifest:
            after["data"] = {**before.get("data", {}), **manifest["data"]}
        if after != before:
            self.write(key, after)
        answer = self._answer("apply", key)
        assert answer is not None
        return answer

    async def create_event(self, event: Manifest) -> Manifest:
        return event

    def write(self, key: ChildKey, body: Manifest) -> Manifest:
        self.version += 1
        meta = body["metadata"] | {"resourceVersion": str(self.version)}
        self.children[key] = body | {"metadata": meta}
        return self.children[key]

    def _answer(self, call: str, key: ChildKey) -> Manifest | None:
        answer = copy.deepcopy(self.children.get(key))
        if key == LIMITS and call in self.meanwhile:
            self.meanwhile.pop(call)()
        return answer


class Service:
    """One service whose children are kept, and the watch that tells of them."""

    def __init__(self) -> None:
        kube: Any = FakeKube()
        self.kube: FakeKube = kube
        self.passes: list[ServiceKey] = []
        """Passes that were asked for."""
        self.record = ServiceRecord(KEY, {"metadata": META})
        self.keeper = ChildKeeper(kube, EventRecorder(kube, lambda: 1000.0), lambda: 1000.0, self.passes.append)

    async def keep(self, **blocks: Any) -> None:
        spec = {"model": {"uri": "file:///models/tiny"}} | blocks
        await self.keeper.keep(self.record, context_of({"metadata": META, "spec": spec}))

    def edit(self, **data: str) -> bool:
        """Somebody else writes the ConfigMap, and the watch tells of it."""
        found = self.kube.children[LIMITS]
        written = self.kube.write(LIMITS, found | {"data": found["data"] | data})
        return self.record.children.see(LIMITS, written)

    @property
    def limits(self) -> dict[str, str]:
        return dict(self.kube.children[LIMITS]["data"])


@pytest.fixture
async def service() -> Service:
    found = Service()
    await found.keep()
    return found


async def test_fields_that_are_not_ours_are_no_quarrel_however_often_somebody_writes_them(service: Service) -> None:
    for number in range(3 * FREE_CORRECTIONS):
        service.edit(theirs=str(number))
        await service.keep()
    assert service.record.contested == ""
    assert service.edit(**{"limits.json": "{}"})
    await service.keep()
    assert service.limits["limits.json"] != "{}"


async def test_a_correction_that_the_api_server_did_not_take_is_no_quarrel(service: Service) -> None:
    service.edit(**{"limits.json": "{}"})
    for _ in range(2 * FREE_CORRECTIONS):
        service.kube.faults = [KubeError(503, "ServiceUnavailable", "a webhook is away")]
        with pytest.raises(KubeError):
            await service.keep()
    await service.keep()
    assert service.record.contested == ""
    assert service.limits["limits.json"] != "{}"


async def test_an_edit_that_takes_back_a_write_of_ours_before_its_answer_is_seen(service: Service) -> None:
    before = service.limits
    service.kube.meanwhile["apply"] = lambda: service.edit(**before)
    await service.keep(limits={"maxNumSeqs": 3})
    assert service.limits == before
    assert service.passes == [KEY], "the edit asked for none: by what was known then, it changed nothing"
    await service.keep(limits={"maxNumSeqs": 3})
    assert service.limits != before


async def test_an_edit_that_is_seen_while_a_child_is_read_counts_more_than_what_was_read(service: Service) -> None:
    before = service.limits
    service.record.children.doubt()
    service.kube.meanwhile["read"] = lambda: service.edit(**{"limits.json": "{}"})
    await service.keep()
    await service.keep()  # the pass that the edit asked for
    assert service.limits == before


async def test_where_versions_say_nothing_a_correction_is_made_once(service: Service) -> None:
    """Somebody else's API server may have versions that are no numbers."""
    for child in service.record.children.children.values():
        child.version = 0
    found = service.kube.children[LIMITS]
    opaque = {"metadata": found["metadata"] | {"resourceVersion": "x"}}
    service.kube.children[LIMITS] = found | opaque | {"data": {"limits.json": "{}"}}
    service.kube.write = lambda key, body: service.kube.children.setdefault(key, body | opaque)  # type: ignore[method-assign]
    service.record.children.see(LIMITS, service.kube.children.pop(LIMITS))
    await service.keep()
    num_applied = service.kube.num_applied
    await service.keep()
    assert service.kube.num_applied == num_applied
    assert service.passes == []


async def test_a_child_that_is_not_wanted_any_more_is_not_looked_after(service: Service) -> None:
    await service.keep(security={"serviceAccountName": "theirs"})
    body = service.kube.children.pop(ACCOUNT)
    assert not service.record.children.see(ACCOUNT, body, gone=True)
    assert service.record.children.gone() == []
    await service.keep()
    assert ACCOUNT in service.kube.children
