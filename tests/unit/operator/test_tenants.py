"""Keys of tenants become digests; a tenant without a usable key is locked out, and nobody is let in by accident."""

import base64
import hashlib
from typing import Any

import pytest

from guidevane_api.conditions import Reason
from guidevane_api.spec_traffic import TenancySpec
from guidevane_operator.tenants import TenantsPlan, plan_tenants, secret_names


def tenancy(*tenants: dict[str, Any], **more: Any) -> TenancySpec:
    return TenancySpec.model_validate({"tenants": tenants, **more})


def tenant(name: str, secret: str = "keys", **more: Any) -> dict[str, Any]:
    return {"name": name, "keySecretRef": {"name": secret, "key": name}, **more}


def secret(**values: str | bytes) -> dict[str, str]:
    raw = {name: value.encode() if isinstance(value, str) else value for name, value in values.items()}
    return {name: base64.b64encode(value).decode() for name, value in raw.items()}


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def digests(plan: TenantsPlan) -> dict[str, tuple[str, ...]]:
    return {entry.name: entry.key_sha256 for entry in plan.file.tenants}


def test_keys_become_digests_beside_weights_caps_and_shares() -> None:
    spec = tenancy(
        tenant("gold", weight=3, maxInFlight=8, maxQueuedTokens=4096), {"name": "rest"}, classes={"interactive": 5}
    )
    plan = plan_tenants(spec, {"keys": secret(gold="sk-gold\n")})
    gold, rest = plan.file.tenants
    assert (gold.weight, gold.max_in_flight, gold.max_queued_tokens) == (3, 8, 4096)
    assert (gold.key_sha256, rest.key_sha256) == ((digest("sk-gold"),), ())
    assert (plan.file.classes.interactive, plan.locked, plan.sentence) == (5, {}, "")


def test_every_line_is_a_key_while_one_is_being_replaced() -> None:
    plan = plan_tenants(tenancy(tenant("gold")), {"keys": secret(gold="new\n\nold\nnew\n")})
    assert digests(plan)["gold"] == (digest("new"), digest("old"))


@pytest.mark.parametrize(
    ("secrets", "sentence"),
    [
        ({}, "tenant gold: Secret keys does not exist; create it with a key in gold"),
        (
            {"keys": secret(silver="x")},
            "tenant gold: Secret keys has no gold; put a key there, or correct keySecretRef",
        ),
        ({"keys": secret(gold=" \n")}, "tenant gold: gold of Secret keys is empty; put a key there"),
        ({"keys": {"gold": "?"}}, "tenant gold: gold of Secret keys is empty; put a key there"),
        (
            {"keys": secret(gold=b"\xff\xfe")},
            "tenant gold: gold of Secret keys holds what no HTTP header can carry; use printable ASCII",
        ),
        (
            {"keys": secret(gold="two words")},
            "tenant gold: gold of Secret keys holds what no HTTP header can carry; use printable ASCII",
        ),
        (
            {"keys": secret(gold="\n".join("123456789"))},
            "tenant gold: gold of Secret keys has 9 lines, limit 8; leave one key a line",
        ),
    ],
)
def test_a_tenant_without_a_usable_key_is_named_with_the_way_out(secrets: Any, sentence: str) -> None:
    plan = plan_tenants(tenancy(tenant("gold"), tenant("silver", "others")), secrets | {"others": secret(silver="s")})
    assert plan.sentence == sentence
    assert plan.locked["gold"].reason is Reason.KEY_MISSING
    assert digests(plan)["silver"] == (digest("s"),), "the others go on"


def test_a_locked_tenant_needs_a_key_that_nobody_has() -> None:
    plan = plan_tenants(tenancy(tenant("gold"), tenant("silver")), {})
    found = digests(plan)
    assert [len(keys) for keys in found.values()] == [1, 1], "none at all would let everybody in"
    assert found["gold"] != found["silver"]
    assert all(keys[0].endswith("0" * 56) for keys in found.values())


def test_tenants_with_a_key_in_common_are_locked_and_the_third_goes_on() -> None:
    spec = tenancy(tenant("gold"), tenant("silver", "others"), tenant("bronze"))
    secrets = {"keys": secret(gold="a\nb", bronze="c"), "others": secret(silver="b")}
    plan = plan_tenants(spec, secrets)
    assert {name: lock.reason for name, lock in plan.locked.items()} == dict.fromkeys(
        ("gold", "silver"), Reason.KEY_SHARED
    )
    assert "tenant gold: gold of Secret keys holds a key that silver has too; give each its own" in plan.sentence
    assert digests(plan)["bronze"] == (digest("c"),)


def test_many_locked_tenants_make_no_endless_sentence() -> None:
    plan = plan_tenants(tenancy(*(tenant(f"t{number}") for number in range(64))), {})
    assert plan.sentence.endswith("; and 59 more")
    assert len(plan.sentence) < 1024


@pytest.mark.parametrize("spec", [None, tenancy()])
def test_without_tenants_everybody_is_let_in(spec: TenancySpec | None) -> None:
    assert plan_tenants(spec, {}).file.tenants == ()
    assert secret_names(spec) == []


def test_a_secret_that_holds_many_keys_is_read_once() -> None:
    assert secret_names(tenancy(tenant("b"), tenant("a"), {"name": "c"}, tenant("d", "apart"))) == ["apart", "keys"]
