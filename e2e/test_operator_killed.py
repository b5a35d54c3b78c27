"""Story: the operator dies in mid-traffic; pods and limits stay, the next one resumes. It runs under its own RBAC."""

import asyncio
import json

from e2e import support

SERVICE = "smollm2"
OPERATOR = ("-n", support.SYSTEM_NAMESPACE)


def _operator_pods() -> list[support.Manifest]:
    out = support.kubectl("get", "pods", *OPERATOR, "-l", "app.kubernetes.io/name=guidevane-operator", "-o", "json")
    return [pod for pod in json.loads(out)["items"] if "deletionTimestamp" not in pod["metadata"]]


def _limits(namespace: str) -> support.Manifest:
    return dict(support.get("llm", SERVICE, namespace)["status"]["limits"])


async def test_operator_killed_in_mid_traffic_restarts_no_pod_and_resumes(namespace: str) -> None:
    support.apply(support.sample("smollm2-cpu", limits={"maxNumSeqs": 6}), namespace)
    support.wait_ready(SERVICE, namespace)
    support.wait_for("LimitsInSync", support.has_condition(SERVICE, namespace, "LimitsInSync"))
    (pod,), limits = support.pods_of(SERVICE, namespace), _limits(namespace)
    url = support.service_url(SERVICE, namespace)
    streams = [asyncio.create_task(support.chat(url, "Count.", max_tokens=200, ignore_eos=True)) for _ in range(4)]

    (victim,) = _operator_pods()
    support.kubectl("delete", "pod", victim["metadata"]["name"], *OPERATOR, "--grace-period=0", "--force")
    await support.wait_for_async(
        "a new operator",
        lambda: [
            p
            for p in _operator_pods()
            if p["metadata"]["uid"] != victim["metadata"]["uid"]
            and all(s["ready"] for s in p["status"].get("containerStatuses", [{"ready": False}]))
        ],
    )
    seen = await asyncio.gather(*streams)

    assert [stream for stream in seen if not stream.whole] == []
    (after,) = support.pods_of(SERVICE, namespace)
    assert (after["metadata"]["uid"], support.restarts(after)) == (pod["metadata"]["uid"], 0)
    assert _limits(namespace)["desired"] == limits["desired"]
    support.patch_spec(SERVICE, namespace, {"limits": {"maxNumSeqs": 7}})
    resumed = support.wait_for(
        "the new operator acts", lambda: (now := _limits(namespace))["desired"]["maxNumSeqs"] == 7 and now
    )
    assert resumed["epoch"] > limits["epoch"]


def test_operator_may_not_do_what_it_does_not_need() -> None:
    account = f"system:serviceaccount:{support.SYSTEM_NAMESPACE}:guidevane-operator"

    def may(*what: str) -> bool:
        try:
            return support.kubectl("auth", "can-i", *what, "--as", account).strip() == "yes"
        except support.KubectlError:
            return False

    assert may("patch", "deployments.apps", "-A")
    assert may("patch", "llmservices.guidevane.dev", "--subresource=status", "-A")
    for forbidden in (
        ("delete", "llmservices.guidevane.dev", "-A"),
        ("list", "secrets", "-A"),
        ("create", "pods/exec", "-A"),
        ("patch", "clusterroles"),
        ("patch", "nodes"),
        ("*", "*", "-A"),
    ):
        assert not may(*forbidden), forbidden
