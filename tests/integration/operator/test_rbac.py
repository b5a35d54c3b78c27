"""The ClusterRole against what the operator asks of the API in the life of a service: all of it, and nothing more."""

from pathlib import Path
from typing import Any

import yaml

ROLE = Path(__file__).parents[3] / "manifests" / "base" / "cluster-role.yaml"
NOT_CALLED = {("guidevane.dev", "llmservices/finalizers", "update")}
"""Asked for by admission, where OwnerReferencesPermissionEnforcement is on."""


def allowed() -> set[tuple[str, str, str]]:
    role = next(iter(yaml.safe_load_all(ROLE.read_text())))
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


async def test_the_role_allows_what_the_operator_does_in_the_life_of_a_service_and_nothing_else(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service(replicas=2)
    await cluster.until(cluster.deployment)
    engine = await cluster.add_pod("chat-0")
    await cluster.until(lambda: engine.accepted)
    await cluster.add_service(replicas=1, limits={"maxNumSeqs": 3})
    await cluster.until(lambda: "LimitsChanged" in cluster.events())
    await cluster.until(lambda: cluster.api.find("policy/v1/poddisruptionbudgets", "chat") is None)
    cluster.running.directory.get(next(iter(cluster.running.directory))).needs_refresh = True
    await cluster.until(lambda: ("", "pods", "list") in cluster.api.asked)
    await cluster.api.delete_object("guidevane.dev/v1alpha1/llmservices", "chat")
    await cluster.until(lambda: not list(cluster.running.directory))

    assert cluster.api.asked - allowed() == set()
    assert allowed() - NOT_CALLED - cluster.api.asked == set()
