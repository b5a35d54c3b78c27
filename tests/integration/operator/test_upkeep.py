"""Children that somebody deletes or edits: back at once, by their watches, without one write more than that takes."""

import asyncio
import copy
from typing import Any

import pytest

LLM = "guidevane.dev/v1alpha1/llmservices"
WATCHED = [
    ("v1/configmaps", "chat-limits"),
    ("v1/services", "chat"),
    ("v1/serviceaccounts", "chat"),
    ("apps/v1/deployments", "chat"),
    ("policy/v1/poddisruptionbudgets", "chat"),
]
SECRETS = [("v1/secrets", "chat-admin"), ("v1/secrets", "chat-tenants")]


async def start(cluster: Any) -> None:
    """A service of two replicas in full, and nothing left to write. The fixture's resync is a day away."""
    await cluster.start_operator()
    await cluster.add_service(replicas=2)
    await cluster.until(lambda: cluster.status().get("observedGeneration") == 1)
    await quiet(cluster)


async def quiet(cluster: Any, for_s: float = 0.6) -> None:
    """Wait until nobody writes any more."""
    while True:
        before = dict(cluster.api.writes)
        await asyncio.sleep(for_s)
        if dict(cluster.api.writes) == before:
            return


def patches(cluster: Any) -> int:
    """Writes of children: status and events are not what this is about."""
    about = ("POST events", "PATCH llmservices")
    return sum(count for write, count in cluster.api.writes.items() if not write.startswith(about))


@pytest.mark.parametrize(("resource", "name"), [*WATCHED, *SECRETS], ids=lambda value: value.rsplit("/", 1)[-1])
async def test_a_deleted_child_is_back_at_once_with_one_write(cluster: Any, resource: str, name: str) -> None:
    await start(cluster)
    before, written = cluster.api.find(resource, name), patches(cluster)

    await cluster.api.delete_object(resource, name)

    after = await cluster.until(lambda: cluster.api.find(resource, name))
    assert after["metadata"]["ownerReferences"] == before["metadata"]["ownerReferences"]
    assert [after.get(part) for part in ("data", "spec")] == [before.get(part) for part in ("data", "spec")]
    await quiet(cluster)
    assert patches(cluster) == written + 1


@pytest.mark.parametrize(
    ("resource", "name", "edit"),
    [
        ("v1/configmaps", "chat-limits", {"data": {"limits.json": "{}"}}),
        ("v1/services", "chat", {"spec": {"selector": {"guidevane.dev/name": "other"}}}),
        ("v1/serviceaccounts", "chat", {"automountServiceAccountToken": True}),
        ("apps/v1/deployments", "chat", {"spec": {"progressDeadlineSeconds": 1}}),
        ("policy/v1/poddisruptionbudgets", "chat", {"spec": {"maxUnavailable": 2}}),
        ("v1/secrets", "chat-tenants", {"data": {"tenants.json": "e30K"}}),
        ("v1/configmaps", "chat-limits", {"metadata": {"labels": {}}}),
    ],
    ids=["configmap", "service", "serviceaccount", "deployment", "pdb", "secret", "label"],
)
async def test_an_edited_child_goes_back_to_what_is_declared(
    cluster: Any, resource: str, name: str, edit: dict[str, Any]
) -> None:
    await start(cluster)
    before, written = cluster.api.find(resource, name), patches(cluster)

    edited = copy.deepcopy(before)
    for part, fields in edit.items():
        edited[part] = edited.get(part, {}) | fields if isinstance(fields, dict) else fields
    await cluster.api.put(resource, edited)

    def as_declared() -> bool:
        now = cluster.api.find(resource, name)
        return all(now.get(part) == before.get(part) for part in ("data", "spec", "automountServiceAccountToken"))

    await cluster.until(lambda: as_declared() and cluster.api.find(resource, name)["metadata"]["labels"])
    await quiet(cluster)
    assert patches(cluster) == written + 1


async def test_what_others_add_to_a_child_stays_and_is_no_reason_to_write_for_ever(cluster: Any) -> None:
    await start(cluster)
    child, written = cluster.api.find("v1/configmaps", "chat-limits"), patches(cluster)
    child["data"]["theirs"] = "1"
    child["metadata"]["annotations"] = {"example.org/note": "1"}
    await cluster.api.put("v1/configmaps", child)

    await quiet(cluster)

    assert cluster.api.find("v1/configmaps", "chat-limits")["data"]["theirs"] == "1"
    assert patches(cluster) <= written + 1


async def test_status_and_annotations_that_controllers_write_cost_no_write(cluster: Any) -> None:
    await start(cluster)
    written = patches(cluster)
    for resource, name in WATCHED:
        child = cluster.api.find(resource, name)
        child["metadata"]["annotations"] = {"deployment.kubernetes.io/revision": "1"}
        child["status"] = {"observedGeneration": 1, "currentHealthy": 1}
        await cluster.api.put(resource, child)

    await quiet(cluster)

    assert patches(cluster) == written


async def test_children_are_kept_while_a_newer_spec_is_refused(cluster: Any) -> None:
    await start(cluster)
    before = cluster.deployment()["spec"]
    await cluster.add_service(replicas=5, model={"uri": "file:///models/other", "revision": "not in effect"})
    await cluster.until(lambda: cluster.condition("SpecAccepted").get("status") == "False")

    await cluster.api.delete_object("v1/configmaps", "chat-limits")
    await cluster.api.delete_object("apps/v1/deployments", "chat")

    await cluster.until(lambda: cluster.api.find("v1/configmaps", "chat-limits"))
    assert await cluster.until(lambda: (cluster.deployment() or {}).get("spec") == before)


async def test_a_resync_reads_everything_and_writes_nothing(cluster: Any) -> None:
    cluster.settings = cluster.settings.model_copy(update={"resync_seconds": 0.3})
    await start(cluster)
    record = next(cluster.running.directory.get(key) for key in cluster.running.directory)
    written = dict(cluster.api.writes)

    for _ in range(3):
        await cluster.until(lambda: record.needs_refresh)
        await cluster.until(lambda: not record.needs_refresh)

    assert dict(cluster.api.writes) == written


async def test_children_of_a_service_whose_end_is_not_seen_yet_stay_deleted(cluster: Any) -> None:
    await start(cluster)
    record = next(cluster.running.directory.get(key) for key in cluster.running.directory)
    key = next(key for key in cluster.api.objects if key[2] == "chat" and "llmservices" in str(key[0]))
    cluster.api.objects[key].delete()  # no watch hears of it
    written = patches(cluster)

    for resource, name in WATCHED:
        await cluster.api.delete_object(resource, name)

    await cluster.until(lambda: record.is_gone)
    await quiet(cluster)
    assert patches(cluster) == written
    assert cluster.deployment() is None


async def test_somebody_elses_object_in_place_of_a_deleted_child_is_left_alone(cluster: Any) -> None:
    await start(cluster)
    theirs = {"metadata": {"name": "chat", "labels": {"guidevane.dev/name": "chat"}}, "spec": {"clusterIP": "None"}}
    await cluster.api.delete_object("v1/services", "chat")
    await cluster.api.put("v1/services", theirs | {"metadata": theirs["metadata"] | {"uid": "theirs"}})

    await cluster.until(lambda: cluster.condition("Progressing").get("reason") == "ChildRefused")
    assert cluster.api.find("v1/services", "chat")["spec"] == {"clusterIP": "None"}

    await cluster.api.delete_object("v1/services", "chat")
    await cluster.until(lambda: (cluster.api.find("v1/services", "chat") or {}).get("spec", {}).get("ports"))


async def test_two_that_want_different_things_do_not_write_without_end(cluster: Any) -> None:
    await start(cluster)
    asked = 0

    async def contest(until: int) -> None:
        nonlocal asked
        while asked < until:
            child = cluster.api.find("v1/configmaps", "chat-limits")
            if child["data"]["limits.json"] != "theirs":
                child["data"]["limits.json"] = "theirs"
                child["metadata"]["managedFields"] = [{"manager": "argocd", "operation": "Update", "time": "2026"}]
                await cluster.api.put("v1/configmaps", child)
                asked += 1
            await asyncio.sleep(0.01)

    written = patches(cluster)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(4):
            await contest(until=20)

    corrections = cluster.api.writes["PATCH configmaps/"]
    assert corrections <= 7
    assert patches(cluster) - written < 15
    failures = await cluster.until(lambda: cluster.status().get("failures"))
    assert "ConfigMap chat-limits was set right" in failures["message"]
    assert "argocd" in failures["message"]
