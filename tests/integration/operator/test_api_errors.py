"""An API server that refuses, is overloaded, or loses its answer in the middle; operators that die and that differ."""

import asyncio
import dataclasses
from typing import Any

import pytest

KINDS = ("serviceaccounts", "configmaps", "secrets", "services", "deployments", "poddisruptionbudgets")


async def is_complete(cluster: Any, max_num_seqs: int) -> None:
    """All children are there, pods obey, status says so and nothing failed."""
    engine = cluster.engines["chat-0"]
    await cluster.until(lambda: cluster.condition("LimitsInSync").get("status") == "True")
    await cluster.until(lambda: engine.limits.max_num_seqs == max_num_seqs)
    await cluster.until(lambda: "failures" not in cluster.status())
    assert cluster.status()["limits"]["epoch"] == engine.epoch
    names = [("v1/configmaps", "chat-limits"), ("v1/secrets", "chat-admin"), ("v1/secrets", "chat-tenants")]
    names += [("v1/services", "chat"), ("v1/serviceaccounts", "chat"), ("apps/v1/deployments", "chat")]
    assert [name for resource, name in names if cluster.api.find(resource, name) is None] == []


@pytest.mark.parametrize("status", [409, 429, 500, 503])
async def test_children_come_although_each_is_first_answered_with_an_error(cluster: Any, status: int) -> None:
    cluster.api.child_faults = {kind: [status] for kind in KINDS}
    await cluster.start_operator()
    await cluster.add_service()
    await cluster.until(cluster.deployment)
    await cluster.add_pod("chat-0")

    await is_complete(cluster, 8)
    assert not any(cluster.api.child_faults[kind] for kind in KINDS if kind != "poddisruptionbudgets")
    assert "ChildRefused" not in cluster.events()


async def test_a_child_that_fails_for_ever_keeps_neither_limits_nor_status_back(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service()
    await cluster.until(cluster.deployment)
    engine = await cluster.add_pod("chat-0")
    await cluster.until(lambda: engine.accepted)

    cluster.api.child_faults = {"configmaps": [500] * 1000}  # as with an admission webhook that is away
    await cluster.add_service(limits={"maxNumSeqs": 2})

    await cluster.until(lambda: engine.limits.max_num_seqs == 2)
    failures = await cluster.until(lambda: cluster.status().get("failures"))
    assert "configmaps/chat-limits" in failures["message"]
    assert cluster.condition("LimitsInSync")["status"] == "True"
    cluster.api.child_faults = {}
    await cluster.until(lambda: '"maxNumSeqs": 2' in limits_file(cluster))


def limits_file(cluster: Any) -> str:
    return str(cluster.api.find("v1/configmaps", "chat-limits")["data"]["limits.json"])


@pytest.mark.parametrize("writes", range(1, 11))
async def test_an_operator_that_dies_after_any_write_is_taken_over_from(cluster: Any, writes: int) -> None:
    """The write is done and its answer lost; the next operator finds what is there. Epochs only grow."""
    await cluster.start_operator()
    cluster.api.dies_after = writes
    await cluster.add_service(limits={"maxNumSeqs": 3})
    await cluster.until(lambda: cluster.api.away or cluster.deployment())
    engine = await cluster.add_pod("chat-0")
    if not cluster.api.away:
        await cluster.add_service(limits={"maxNumSeqs": 4})
        await asyncio.sleep(0.5)
    before = cluster.status().get("limits", {}).get("epoch", 0)
    await cluster.stop_operator()
    cluster.api.dies_after, cluster.api.away = None, False
    await cluster.add_service(limits={"maxNumSeqs": 5})

    await cluster.start_operator()

    await cluster.until(cluster.deployment)
    await is_complete(cluster, 5)
    epochs = [patch.epoch for patch in engine.accepted]
    assert epochs == sorted(epochs)
    assert engine.epoch >= before


async def test_two_operators_of_different_releases_do_not_write_without_end(cluster: Any) -> None:
    other = cluster.settings.model_copy(update={"runtime_image": "guidevane.dev/runtime:9.9.9"})
    twin = dataclasses.replace(cluster, settings=other)
    await cluster.start_operator()
    await twin.start_operator()
    try:
        await cluster.add_service()
        await cluster.until(cluster.deployment)
        message = "Deployment chat was set right"
        await cluster.until(lambda: message in cluster.status().get("failures", {}).get("message", ""))
        assert cluster.api.writes["PATCH deployments/"] < 20
    finally:
        await twin.stop_operator()
