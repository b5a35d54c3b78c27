"""Tenants' terms: what is refused as terms, and whom the caps keep outside."""

from dataclasses import replace

import pytest

from guidevane_api.pod_files import TenantEntry, TenantsFile
from guidevane_api.spec_traffic import ClassShares
from guidevane_runtime.core.tenants import RequestClass, TenantPolicy, TenantTerms, TenantUse, cap_refusal, policy_of

TERMS = TenantTerms("acme", max_in_flight=4, max_queued_tokens=100)


@pytest.mark.parametrize("field", ["weight", "max_in_flight", "max_queued_tokens"])
def test_terms_below_one_are_refused_by_name(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} of tenant 'acme' is 0, at least 1"):
        replace(TERMS, **{field: 0})


@pytest.mark.parametrize("field", ["interactive_share", "offline_share", "input_price", "output_price"])
def test_a_policy_without_shares_or_prices_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is 0"):
        replace(TenantPolicy(), **{field: 0})


def test_a_tenant_is_listed_once() -> None:
    with pytest.raises(ValueError, match="'acme' is listed 2 times"):
        TenantPolicy((TERMS, TenantTerms("acme")))


def test_a_tenant_that_is_not_listed_has_weight_one_and_no_cap() -> None:
    policy = TenantPolicy((TERMS,))
    assert policy.terms_of("acme") is TERMS
    assert policy.terms_of("other") == TenantTerms("other", 1, None, None)


def test_a_tenants_file_sets_weights_caps_and_class_shares() -> None:
    file = TenantsFile(
        tenants=(
            TenantEntry(name="acme", weight=3, max_in_flight=4, max_queued_tokens=100, key_sha256=("0" * 64,)),
            TenantEntry(name="free"),
        ),
        classes=ClassShares(interactive=7, offline=2),
    )
    assert policy_of(file) == TenantPolicy(
        (TenantTerms("acme", 3, 4, 100), TenantTerms("free")), interactive_share=7, offline_share=2
    )


def test_each_class_has_its_share() -> None:
    policy = TenantPolicy(interactive_share=7, offline_share=2)
    assert [policy.share_of(request_class) for request_class in RequestClass] == [7, 2]


@pytest.mark.parametrize(
    ("in_flight", "queued", "num_requests", "num_tokens", "why"),
    [
        (3, 0, 1, 10, ""),
        (3, 0, 2, 10, "5 requests at once, its maxInFlight is 4"),
        (0, 90, 1, 10, ""),
        (0, 90, 1, 11, "101 prompt tokens waiting, its maxQueuedTokens is 100"),
        (0, 0, 1, 500, ""),
    ],
)
def test_caps_keep_outside_what_is_above_them_and_let_a_lone_request_in(
    in_flight: int, queued: int, num_requests: int, num_tokens: int, why: str
) -> None:
    refusal = cap_refusal(TERMS, TenantUse(in_flight, queued), num_requests, num_tokens)
    assert why in refusal and bool(why) == bool(refusal)


def test_a_tenant_without_caps_is_never_refused() -> None:
    assert cap_refusal(TenantTerms("free"), TenantUse(10**6, 10**9), 1000, 10**6) == ""
