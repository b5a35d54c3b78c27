"""spec.tenancy and the keys in Secrets become what pods read: live, as digests, and nobody is let in by accident."""

import base64
import hashlib
import json
from typing import Any

from guidevane_api.pod_files import TenantsFile

GOLD = {"name": "gold", "weight": 3, "keySecretRef": {"name": "keys", "key": "gold"}}
SILVER = {"name": "silver", "keySecretRef": {"name": "others", "key": "silver"}}
KEY = "sk-gold-0123456789"


def told(cluster: Any) -> TenantsFile:
    """What the pods are told."""
    secret = cluster.api.find("v1/secrets", "chat-tenants") or {"data": {"tenants.json": "e30="}}
    return TenantsFile.model_validate_json(base64.b64decode(secret["data"]["tenants.json"]))


def digests(cluster: Any) -> dict[str, tuple[str, ...]]:
    return {tenant.name: tenant.key_sha256 for tenant in told(cluster).tenants}


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


async def put_key(cluster: Any, secret: str, **keys: str) -> None:
    data = {name: base64.b64encode(value.encode()).decode() for name, value in keys.items()}
    await cluster.api.put("v1/secrets", {"metadata": {"name": secret}, "data": data})


async def test_tenants_are_told_by_digest_and_a_key_is_written_nowhere(cluster: Any) -> None:
    await put_key(cluster, "keys", gold=KEY)
    await put_key(cluster, "others", silver="sk-silver")
    await cluster.start_operator()
    await cluster.add_service(tenancy={"tenants": [GOLD, SILVER, {"name": "rest"}]})

    await cluster.until(lambda: len(told(cluster).tenants) == 3)

    assert digests(cluster) == {"gold": (digest(KEY),), "silver": (digest("sk-silver"),), "rest": ()}
    await cluster.until(lambda: cluster.condition("TenantKeysFound").get("status") == "True")
    written = [body.raw for (_, _, name), body in cluster.api.objects.items() if name not in ("keys", "others")]
    assert KEY not in json.dumps(written)
    assert base64.b64encode(KEY.encode()).decode() not in json.dumps(written)
    assert cluster.api.find("v1/secrets", "chat-tenants")["metadata"]["ownerReferences"][0]["name"] == "chat"


async def test_no_change_of_tenancy_or_slo_touches_the_pod_template(cluster: Any) -> None:
    await put_key(cluster, "keys", gold=KEY)
    await cluster.start_operator()
    await cluster.add_service()
    await cluster.until(cluster.deployment)
    template = cluster.deployment()["spec"]["template"]

    await cluster.add_service(tenancy={"tenants": [GOLD]})
    await cluster.until(lambda: digests(cluster) == {"gold": (digest(KEY),)})
    await cluster.add_service(tenancy={"tenants": [GOLD | {"weight": 7}], "classes": {"interactive": 4}})
    await cluster.until(lambda: told(cluster).classes.interactive == 4 and told(cluster).tenants[0].weight == 7)
    await cluster.add_service(slo={"itlP95Milliseconds": 77, "guard": "On"})

    def lines() -> dict[str, Any]:
        return dict(json.loads(cluster.api.find("v1/configmaps", "chat-limits")["data"]["slo.json"]))

    await cluster.until(lambda: lines()["itlP95Milliseconds"] == 77)
    assert lines()["mode"] == "on"
    await cluster.until(lambda: not told(cluster).tenants)
    assert cluster.deployment()["spec"]["template"] == template


async def test_a_tenant_without_a_secret_is_locked_out_until_there_is_one(cluster: Any) -> None:
    await put_key(cluster, "keys", gold=KEY)
    await cluster.start_operator()
    await cluster.add_service(tenancy={"tenants": [GOLD, SILVER]})

    await cluster.until(lambda: cluster.condition("TenantKeysFound").get("reason") == "KeyMissing")
    await cluster.until(lambda: "TenantLockedOut" in cluster.events())

    named = "tenant silver: Secret others does not exist; create it with a key in silver"
    assert named in cluster.condition("TenantKeysFound")["message"]
    assert named in cluster.note("TenantLockedOut")
    assert digests(cluster)["gold"] == (digest(KEY),)
    assert len(digests(cluster)["silver"]) == 1, "no digest at all would mean: no key needed"
    assert cluster.condition("SpecAccepted")["status"] == "True"

    await put_key(cluster, "others", silver="sk-silver")

    await cluster.until(lambda: digests(cluster)["silver"] == (digest("sk-silver"),))
    await cluster.until(lambda: cluster.condition("TenantKeysFound").get("status") == "True")


async def test_a_rotated_key_is_noticed_and_an_unchanged_one_costs_no_write(cluster: Any) -> None:
    await put_key(cluster, "keys", gold=KEY)
    await cluster.start_operator()
    await cluster.add_service(tenancy={"tenants": [GOLD]})
    await cluster.until(lambda: digests(cluster) == {"gold": (digest(KEY),)})

    await put_key(cluster, "keys", gold=f"sk-new\n{KEY}")
    await cluster.until(lambda: digests(cluster) == {"gold": (digest("sk-new"), digest(KEY))})
    await cluster.until(lambda: cluster.condition("TenantKeysFound"))
    reads, writes = cluster.api.secret_reads, cluster.api.writes.copy()

    await cluster.until(lambda: cluster.api.secret_reads >= reads + 4)

    assert cluster.api.writes == writes


async def test_a_tenants_secret_of_somebody_else_is_left_alone(cluster: Any) -> None:
    await put_key(cluster, "chat-tenants", gold=KEY)
    await cluster.start_operator()
    await cluster.add_service()

    await cluster.until(lambda: cluster.condition("Progressing").get("reason") == "ChildRefused")

    assert "Secret chat-tenants exists and is not of this LLMService" in cluster.condition("Progressing")["message"]
    assert "tenants.json" not in cluster.api.find("v1/secrets", "chat-tenants")["data"]
