"""An LLMService becomes children, limits and status; the operator runs under kopf against the API in memory."""

from typing import Any


async def test_a_service_gets_its_children_and_a_status(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service(replicas=2)
    await cluster.until(lambda: cluster.status().get("observedGeneration") == 1)

    for resource, name in (
        ("apps/v1/deployments", "chat"),
        ("v1/services", "chat"),
        ("v1/configmaps", "chat-limits"),
        ("v1/secrets", "chat-admin"),
        ("v1/secrets", "chat-tenants"),
        ("v1/serviceaccounts", "chat"),
        ("policy/v1/poddisruptionbudgets", "chat"),
    ):
        child = cluster.api.find(resource, name)
        assert child is not None, name
        assert child["metadata"]["ownerReferences"][0]["name"] == "chat"
    assert cluster.status()["readySummary"] == "0/2"
    assert cluster.condition("Ready")["status"] == "False"
    assert cluster.status()["selector"] == "guidevane.dev/name=chat"


async def test_a_ready_pod_gets_the_limits_and_the_service_becomes_ready(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service()
    await cluster.until(cluster.deployment)
    engine = await cluster.add_pod("chat-0")

    await cluster.until(lambda: cluster.condition("LimitsInSync").get("status") == "True")
    await cluster.until(lambda: cluster.condition("Ready").get("status") == "True")

    assert engine.limits.max_num_seqs == 8
    assert cluster.status()["readySummary"] == "1/1"
    assert cluster.status()["limits"]["inSyncPods"] == 1
    assert cluster.status()["limits"]["source"] == "Spec"


async def test_changed_limits_reach_all_pods_without_touching_the_pod_template(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service(replicas=3)
    await cluster.until(cluster.deployment)
    engines = [await cluster.add_pod(f"chat-{n}") for n in range(3)]
    await cluster.until(lambda: cluster.status().get("limits", {}).get("inSyncPods") == 3)
    template = cluster.deployment()["spec"]["template"]

    await cluster.add_service(replicas=3, limits={"maxNumSeqs": 2})

    await cluster.until(lambda: [engine.limits.max_num_seqs for engine in engines] == [2, 2, 2])
    await cluster.until(lambda: cluster.status()["limits"]["epoch"] == 2)
    await cluster.until(lambda: "LimitsChanged" in cluster.events())
    assert cluster.deployment()["spec"]["template"] == template
    assert '"maxNumSeqs": 2' in cluster.api.find("v1/configmaps", "chat-limits")["data"]["limits.json"]


async def test_an_epoch_is_in_status_before_a_pod_hears_of_it(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service()
    await cluster.until(cluster.deployment)
    engine = await cluster.add_pod("chat-0")
    await cluster.until(lambda: engine.accepted)

    for value in (4, 2, 6):
        await cluster.add_service(limits={"maxNumSeqs": value})
        await cluster.until(lambda wanted=value: engine.limits.max_num_seqs == wanted)

    pairs = zip(engine.persisted_when_asked, engine.accepted, strict=True)
    assert all(persisted >= patch.epoch for persisted, patch in pairs)


async def test_a_restarted_container_gets_its_limits_back(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service(limits={"maxNumSeqs": 3})
    await cluster.until(cluster.deployment)
    engine = await cluster.add_pod("chat-0")
    await cluster.until(lambda: engine.limits.max_num_seqs == 3)

    engine.restart()

    await cluster.until(lambda: engine.limits.max_num_seqs == 3)
    assert await cluster.until(lambda: "LimitsDriftCorrected" in cluster.events())


async def test_a_pod_that_refuses_the_limits_is_named_with_its_words(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service()
    await cluster.until(cluster.deployment)
    engine = await cluster.add_pod("chat-0")
    await cluster.until(lambda: engine.accepted)

    engine.refuse = {"maxNumSeqs": "maxNumSeqs is 300, above the boot allocation 256"}
    await cluster.add_service(limits={"maxNumSeqs": 9})

    await cluster.until(lambda: cluster.condition("LimitsInSync").get("reason") == "PatchFailed")
    message = cluster.condition("LimitsInSync")["message"]
    assert "chat-0" in message
    assert "above the boot allocation 256" in message


async def test_a_silent_admin_port_does_not_hold_up_the_other_pods(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service(replicas=2)
    await cluster.until(cluster.deployment)
    silent, healthy = await cluster.add_pod("chat-0"), await cluster.add_pod("chat-1")
    await cluster.until(lambda: silent.accepted and healthy.accepted)

    silent.silent = True
    await cluster.add_service(replicas=2, limits={"maxNumSeqs": 2})

    await cluster.until(lambda: healthy.limits.max_num_seqs == 2)
    await cluster.until(lambda: cluster.condition("LimitsInSync").get("reason") == "AdminUnreachable")
    silent.silent = False
    assert await cluster.until(lambda: silent.limits.max_num_seqs == 2)


async def test_a_pod_ahead_of_a_lost_status_is_outrun(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service()
    await cluster.until(cluster.deployment)
    engine = await cluster.add_pod("chat-0", ready=False)
    engine.epoch = 41

    await cluster.put_pod("chat-0")

    await cluster.until(lambda: cluster.condition("LimitsInSync").get("status") == "True")
    assert engine.epoch == 42
    assert cluster.status()["limits"]["epoch"] == 42


async def test_a_field_that_is_not_in_effect_is_refused_and_pods_stay(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service()
    await cluster.until(cluster.deployment)
    before = cluster.deployment()["spec"]

    await cluster.add_service(replicas=3, model={"uri": "file:///models/tiny", "revision": "abc"})

    await cluster.until(lambda: cluster.condition("SpecAccepted").get("status") == "False")
    assert cluster.condition("SpecAccepted")["reason"] == "FieldNotInEffect"
    assert "spec.model.revision" in cluster.condition("SpecAccepted")["message"]
    assert cluster.deployment()["spec"] == before
    await cluster.add_service(replicas=3)
    await cluster.until(lambda: cluster.condition("SpecAccepted").get("status") == "True")
    await cluster.until(lambda: cluster.deployment()["spec"]["replicas"] == 3)


async def test_a_model_that_does_not_exist_is_said_in_status_and_nothing_is_recreated(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service()
    await cluster.until(cluster.deployment)
    ended = {"terminated": {"exitCode": 3, "reason": "Error", "message": "model path /models/tiny does not exist"}}
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
    uid = cluster.deployment()["metadata"]["uid"]

    await cluster.add_pod("chat-0", ready=False, restartCount=4, state=waiting, lastState=ended)

    await cluster.until(lambda: cluster.status().get("reason") == "ModelNotFound")
    assert "model path /models/tiny does not exist" in cluster.condition("Ready")["message"]
    await cluster.until(lambda: "ModelNotFound" in cluster.events())
    assert cluster.deployment()["metadata"]["uid"] == uid
    assert not any(write.startswith("DELETE pods") for write in cluster.api.writes)


async def test_a_deleted_deployment_is_made_again(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service()
    first = await cluster.until(cluster.deployment)

    await cluster.api.delete_object("apps/v1/deployments", "chat")

    assert await cluster.until(lambda: (cluster.deployment() or first)["metadata"]["uid"] != first["metadata"]["uid"])


async def test_the_admin_token_survives_a_new_operator(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service()
    await cluster.until(lambda: cluster.status().get("observedGeneration"))
    token = cluster.token()
    await cluster.stop_operator()

    await cluster.start_operator()
    await cluster.add_service(replicas=2)
    await cluster.until(lambda: cluster.status().get("observedGeneration") == 2)

    assert len(token) >= 32
    assert cluster.token() == token


async def test_suspend_takes_all_pods_and_keeps_the_rest(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service(suspend=True, replicas=3)

    await cluster.until(lambda: cluster.status().get("reason") == "Suspended")

    assert cluster.deployment()["spec"]["replicas"] == 0
    assert cluster.api.find("v1/configmaps", "chat-limits")


async def test_a_paused_service_is_reported_and_not_touched(cluster: Any) -> None:
    await cluster.start_operator()
    body = cluster.service()
    body["metadata"]["annotations"] = {"guidevane.dev/paused": "true"}
    await cluster.api.put("guidevane.dev/v1alpha1/llmservices", body)

    await cluster.until(lambda: cluster.status().get("observedGeneration") == 1)

    assert cluster.deployment() is None
    assert cluster.condition("RetuneActive")["reason"] in ("Paused", "Observe", "Disabled")


async def test_the_budget_goes_when_one_replica_is_left(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service(replicas=2)
    await cluster.until(lambda: cluster.api.find("policy/v1/poddisruptionbudgets", "chat"))

    await cluster.add_service(replicas=1)

    assert await cluster.until(lambda: cluster.api.find("policy/v1/poddisruptionbudgets", "chat") is None)


async def test_no_finalizer_and_no_annotation_is_put_on_a_service(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service()
    await cluster.until(lambda: cluster.status().get("observedGeneration") == 1)

    meta = cluster.api.find("guidevane.dev/v1alpha1/llmservices", "chat")["metadata"]
    assert "finalizers" not in meta
    assert "annotations" not in meta
    assert set(cluster.api.writes) <= {
        "PATCH llmservices/status",
        "DELETE poddisruptionbudgets/",
        "POST events/",
        *(f"PATCH {kind}/" for kind in ("serviceaccounts", "configmaps", "secrets", "services", "deployments")),
    }


async def test_an_object_of_somebody_else_under_a_childs_name_is_left_alone(cluster: Any) -> None:
    foreign = {"metadata": {"name": "chat"}, "spec": {"selector": {"app": "theirs"}}}
    await cluster.api.put("v1/services", foreign)
    await cluster.api.put("policy/v1/poddisruptionbudgets", {"metadata": {"name": "chat"}, "spec": {"minAvailable": 1}})
    await cluster.start_operator()
    await cluster.add_service()

    await cluster.until(lambda: cluster.status().get("reason") == "ChildRefused")

    assert "Service chat exists and is not of this LLMService" in cluster.condition("Ready")["message"]
    assert cluster.api.find("v1/services", "chat")["spec"] == foreign["spec"]
    await cluster.api.delete_object("v1/services", "chat")
    await cluster.until(cluster.deployment)
    assert cluster.api.find("policy/v1/poddisruptionbudgets", "chat")["spec"] == {"minAvailable": 1}


async def test_the_same_limits_written_out_reach_the_pods_under_a_new_epoch(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service()
    await cluster.until(cluster.deployment)
    engine = await cluster.add_pod("chat-0")
    await cluster.until(lambda: engine.accepted)

    await cluster.add_service(limits={"maxNumSeqs": 8, "maxModelLen": 8192})

    await cluster.until(lambda: engine.epoch == 2)
    assert await cluster.until(lambda: cluster.condition("LimitsInSync").get("status") == "True")
