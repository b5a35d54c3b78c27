"""Story: tenants show keys of their own; keys, weights and lines of the SLO change on a running pod."""

import json
import urllib.error
import urllib.request
from typing import Any

from e2e import support

SERVICE = "smollm2"
KEYS = {"gold": "sk-gold-1", "silver": "sk-silver-1"}


def _tenants(gold_weight: int) -> support.Manifest:
    refs = {name: {"name": "tenant-keys", "key": name} for name in KEYS}
    gold = {"name": "gold", "weight": gold_weight, "keySecretRef": refs["gold"]}
    return {"tenants": [gold, {"name": "silver", "keySecretRef": refs["silver"]}]}


def _put_keys(namespace: str, keys: dict[str, str]) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "tenant-keys"}, "stringData": keys}
    support.apply(secret, namespace)


def _ask(url: str, key: str = "") -> int:
    """HTTP status of a completion of one token under that key."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    body = json.dumps({"model": SERVICE, "prompt": "One", "max_tokens": 1}).encode()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/v1/completions", body, headers), timeout=30
        ) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        return refused.code


def _pod(namespace: str) -> support.Manifest:
    (pod,) = support.pods_of(SERVICE, namespace)
    return pod


def _tenants_file(namespace: str) -> dict[str, Any]:
    read = "print(open('/etc/guidevane/tenants/tenants.json').read())"
    pod = _pod(namespace)["metadata"]["name"]
    return dict(json.loads(support.kubectl("exec", pod, "-n", namespace, "--", "python3", "-c", read)))


def _took_over_line(namespace: str, milliseconds: int) -> bool:
    """Whether the runtime says that its guard protects that ITL line now."""
    lines = support.kubectl("logs", _pod(namespace)["metadata"]["name"], "-n", namespace).splitlines()
    entries = [json.loads(line) for line in lines if line.startswith("{")]
    changes = [entry for entry in entries if entry.get("message") == "protection lines changed"]
    return bool(changes) and changes[-1].get("itl_p95_milliseconds") == milliseconds


def test_only_a_key_of_a_tenant_opens_the_service(namespace: str) -> None:
    _put_keys(namespace, KEYS)
    support.apply(support.sample("smollm2-cpu", tenancy=_tenants(1)), namespace)
    support.wait_ready(SERVICE, namespace)
    url = support.service_url(SERVICE, namespace)

    assert {name: _ask(url, key) for name, key in KEYS.items()} == {"gold": 200, "silver": 200}
    assert (_ask(url), _ask(url, "sk-nobody")) == (401, 401)
    service = support.get("llm", SERVICE, namespace)
    assert support.condition(service, "TenantKeysFound")["status"] == "True"


def test_keys_weights_and_lines_change_without_a_restart(namespace: str) -> None:
    url, before = support.service_url(SERVICE, namespace), _pod(namespace)

    _put_keys(namespace, KEYS | {"gold": "sk-gold-2"})
    support.patch_spec(SERVICE, namespace, {"tenancy": _tenants(5), "slo": {"itlP95Milliseconds": 333}})

    support.wait_for("the new key opens", lambda: _ask(url, "sk-gold-2") == 200, timeout_s=90)
    support.wait_for("the new line is protected", lambda: _took_over_line(namespace, 333), timeout_s=90)
    assert (_ask(url, KEYS["gold"]), _ask(url, KEYS["silver"])) == (401, 200)
    assert [tenant["weight"] for tenant in _tenants_file(namespace)["tenants"]] == [5, 1]
    after = _pod(namespace)
    assert (after["metadata"]["uid"], support.restarts(after)) == (before["metadata"]["uid"], 0)


def test_a_tenant_whose_key_is_taken_away_is_refused_and_named(namespace: str) -> None:
    url = support.service_url(SERVICE, namespace)
    support.kubectl("patch", "secret", "tenant-keys", "-n", namespace, "-p", '{"data": {"silver": null}}')

    locked = support.has_condition(SERVICE, namespace, "TenantKeysFound", "False")
    told = support.wait_for("TenantKeysFound False", locked)

    assert "tenant silver: Secret tenant-keys has no silver" in support.condition(told, "TenantKeysFound")["message"]
    support.wait_for("silver is refused", lambda: _ask(url, KEYS["silver"]) == 401, timeout_s=90)
    assert _ask(url, "sk-gold-2") == 200
