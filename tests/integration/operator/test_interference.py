"""Other hands in the cluster: people, autoscalers, the garbage collector, a second spec before the first is done."""

import base64
from typing import Any

import pytest

LLM = "guidevane.dev/v1alpha1/llmservices"
REFUSED = {"model": {"uri": "file:///models/tiny", "revision": "abc"}}
"""A field without effect: the operator leaves everything as it is."""
CALM = {
    "kv_percent": 40,
    "running_per_pod": 2,
    "waiting": 0,
    "preemptions": 0,
    "finished": 60,
    "ttft_p95_ms": 900,
    "ttft_p95_ms:samples": 60,
    "itl_p95_ms": 60,
    "itl_p95_ms:samples": 3000,
    "queue_wait_p95_ms": 100,
    "queue_wait_p95_ms:samples": 60,
    "guard_level": 0,
}
FAST = {"monitoring": {"scrapeIntervalSeconds": 1}}


async def test_a_new_operator_renews_the_limits_that_stand_under_a_refused_spec(cluster: Any) -> None:
    cluster.speed = 8.0
    await cluster.start_operator()
    await cluster.add_service(limits={"maxNumSeqs": 3, "maxModelLen": 4096})
    await cluster.until(cluster.deployment)
    engine = await cluster.add_pod("chat-0")
    await cluster.until(lambda: cluster.condition("LimitsInSync").get("status") == "True")
    await cluster.add_service(**REFUSED)
    await cluster.until(lambda: cluster.condition("SpecAccepted").get("status") == "False")
    await cluster.stop_operator()
    engine.accepted.clear()

    await cluster.start_operator()

    await cluster.until(lambda: len(engine.accepted) > 3)
    assert (engine.limits.max_num_seqs, engine.limits.max_model_len) == (3, 4096)
    assert engine.accepted[-1].lease_seconds == 600
    await cluster.until(lambda: cluster.condition("LimitsInSync").get("status") == "True")
    assert cluster.status()["readySummary"] == "1/1"
    assert cluster.condition("Ready")["status"] == "True"
    assert cluster.condition("RetuneActive")["reason"] == "FieldNotInEffect"
    await cluster.until(lambda: cluster.status()["retune"]["state"] == "Disabled")
    await cluster.add_service(limits={"maxNumSeqs": 3, "maxModelLen": 4096})
    await cluster.until(lambda: cluster.condition("SpecAccepted").get("status") == "True")
    await cluster.until(lambda: cluster.condition("LimitsInSync").get("status") == "True")


async def test_the_lease_is_renewed_in_time_however_short_it_is(cluster: Any) -> None:
    cluster.settings = cluster.settings.model_copy(update={"drift_seconds": 86_400.0})
    cluster.speed = 30.0
    await cluster.start_operator()
    await cluster.add_service(retune={"leaseSeconds": 30})
    await cluster.until(cluster.deployment)
    engine = await cluster.add_pod("chat-0")

    await cluster.until(lambda: len(engine.accepted) > 3)

    assert {patch.epoch for patch in engine.accepted} == {1}


@pytest.mark.parametrize("labels", [{"quarantine": "yes"}, {"guidevane.dev/name": "other"}], ids=["none", "another"])
async def test_a_pod_that_loses_its_label_is_no_pod_of_the_service_any_more(
    cluster: Any, labels: dict[str, str]
) -> None:
    await cluster.start_operator()
    await cluster.add_service()
    await cluster.until(cluster.deployment)
    await cluster.add_pod("chat-0")
    await cluster.until(lambda: cluster.condition("Ready").get("status") == "True")

    pod = cluster.api.find("v1/pods", "chat-0")
    pod["metadata"]["labels"] = labels
    await cluster.api.put("v1/pods", pod)

    await cluster.until(lambda: cluster.status()["readySummary"] == "0/1")
    assert cluster.condition("Ready")["status"] == "False"


async def test_whoever_scales_the_deployment_is_told_where_to_scale(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service(replicas=2)
    await cluster.until(cluster.deployment)
    await cluster.until(lambda: cluster.status().get("observedGeneration") == 1)

    scaled = cluster.deployment()
    scaled["spec"]["replicas"] = 5
    owned = {"manager": "kube-controller-manager", "fieldsV1": {"f:spec": {"f:replicas": {}}}}
    scaled["metadata"]["managedFields"] = [owned]
    await cluster.api.put("apps/v1/deployments", scaled)

    await cluster.until(lambda: cluster.deployment()["spec"]["replicas"] == 2)
    await cluster.until(lambda: "ConflictingAutoscaler" in cluster.events())
    assert "scaled to 5 by kube-controller-manager and goes back to 2" in cluster.note("ConflictingAutoscaler")


async def test_a_service_made_again_waits_for_the_children_of_the_old_one(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service(limits={"maxNumSeqs": 3})
    await cluster.until(cluster.deployment)
    await cluster.until(lambda: cluster.status().get("limits", {}).get("epoch") == 1)
    await cluster.add_service(limits={"maxNumSeqs": 4})
    await cluster.until(lambda: cluster.status()["limits"]["epoch"] == 2)

    await cluster.api.delete_object(LLM, "chat")
    await cluster.add_service()
    await cluster.until(lambda: "of the deleted LLMService" in cluster.condition("Progressing").get("message", ""))

    assert cluster.status()["limits"]["epoch"] == 1
    assert "ChildRefused" not in cluster.events()
    for resource, name in (
        ("v1/serviceaccounts", "chat"),
        ("v1/configmaps", "chat-limits"),
        ("v1/secrets", "chat-admin"),
        ("v1/secrets", "chat-tenants"),
        ("v1/services", "chat"),
        ("apps/v1/deployments", "chat"),
    ):
        await cluster.api.delete_object(resource, name)
    await cluster.until(cluster.deployment)
    owner = cluster.deployment()["metadata"]["ownerReferences"][0]["uid"]
    assert owner == cluster.api.find(LLM, "chat")["metadata"]["uid"]
    await cluster.until(lambda: cluster.condition("Progressing")["reason"] == "Progressing")


async def test_a_deleted_secret_comes_back_with_the_token_that_the_pods_know(cluster: Any) -> None:
    cluster.settings = cluster.settings.model_copy(update={"resync_seconds": 1.0})
    await cluster.start_operator()
    await cluster.add_service()
    await cluster.until(lambda: cluster.status().get("observedGeneration") == 1)
    token = cluster.token()

    await cluster.api.delete_object("v1/secrets", "chat-admin")

    await cluster.until(lambda: cluster.api.find("v1/secrets", "chat-admin"))
    assert cluster.token() == token


async def test_a_silent_admin_port_is_told_once(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service()
    await cluster.until(cluster.deployment)
    engine = await cluster.add_pod("chat-0")
    await cluster.until(lambda: engine.accepted)
    cluster.speed = 1000.0  # past the time in which repetitions are folded

    engine.silent = True
    await cluster.until(lambda: "AdminUnreachable" in cluster.events())
    record = next(cluster.running.directory.get(key) for key in cluster.running.directory)
    await cluster.until(lambda: record.acks["chat-0"].silences > 4)

    assert cluster.events().count("AdminUnreachable") == 1


async def test_a_token_that_no_header_can_carry_is_replaced(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service()
    await cluster.until(lambda: cluster.status().get("observedGeneration") == 1)
    await cluster.stop_operator()
    secret = cluster.api.find("v1/secrets", "chat-admin")

    for broken in (b"\xff\xfe", b"two\nlines", "schlüssel".encode()):
        secret["data"] = {"token": base64.b64encode(broken).decode()}
        await cluster.api.put("v1/secrets", secret)
        await cluster.start_operator()
        await cluster.until(lambda: cluster.api.find("v1/secrets", "chat-admin")["data"] != secret["data"])
        await cluster.stop_operator()
        assert len(cluster.token()) >= 32


async def test_a_container_that_was_seen_to_restart_is_told_when_it_has_its_limits_back(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service(limits={"maxNumSeqs": 3})
    await cluster.until(cluster.deployment)
    engine = await cluster.add_pod("chat-0")
    await cluster.until(lambda: cluster.condition("LimitsInSync").get("status") == "True")

    engine.restart()
    await cluster.put_pod("chat-0", ready=False, restartCount=1)
    await cluster.until(lambda: cluster.status()["readySummary"] == "0/1")
    await cluster.put_pod("chat-0", restartCount=1)

    await cluster.until(lambda: engine.limits.max_num_seqs == 3)
    assert await cluster.until(lambda: "LimitsDriftCorrected" in cluster.events())


async def test_a_rollout_is_told_at_its_start_and_at_its_end(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service()
    await cluster.until(cluster.deployment)
    await cluster.add_pod("chat-0")
    await cluster.until(lambda: cluster.condition("Progressing").get("reason") == "Complete")
    before = cluster.status()["rollout"]["revision"]

    await cluster.add_service(envelope={"maxNumSeqs": 64})
    await cluster.until(lambda: cluster.status()["rollout"].get("step") == "0/1")
    assert cluster.status()["rollout"]["stableRevision"] == before
    await cluster.put_pod("chat-0")  # in place of a new pod: the label of the new revision

    await cluster.until(lambda: "RolloutCompleted" in cluster.events())
    assert cluster.events().count("RolloutStarted") == 1
    await cluster.until(lambda: "step" not in cluster.status()["rollout"])
    assert cluster.status()["rollout"]["stableRevision"] == cluster.status()["rollout"]["revision"] != before


async def test_a_missed_slo_is_told_once_and_so_is_its_return(cluster: Any) -> None:
    cluster.speed = 8.0
    await cluster.start_operator()
    await cluster.add_service(**FAST)
    await cluster.until(cluster.deployment)
    await cluster.add_pod("chat-0")
    cluster.prometheus.pods, cluster.prometheus.values = ("chat-0",), CALM | {"ttft_p95_ms": 9000}

    await cluster.until(lambda: "SLOBreached" in cluster.events())
    assert "TTFTHigh" in cluster.note("SLOBreached")
    cluster.prometheus.values = CALM

    await cluster.until(lambda: "SLORecovered" in cluster.events())
    await cluster.until(lambda: cluster.condition("SLOMet")["status"] == "True")
    assert cluster.events().count("SLOBreached") == cluster.events().count("SLORecovered") == 1
    assert 0 < cluster.status()["slo"]["attainmentPercent"] < 100
