import pytest
from pydantic import ValidationError

from guidevane_api.pod_files import TenantEntry, TenantsFile

KEY_A, KEY_B = "a" * 64, "b" * 64


def test_tenants_with_keys_of_their_own_and_one_without_a_key_are_accepted():
    tenants = (
        TenantEntry(name="a", key_sha256=(KEY_A,)),
        TenantEntry(name="b", key_sha256=(KEY_B,)),
        TenantEntry(name="c"),
    )

    assert TenantsFile(tenants=tenants).tenants == tenants


def test_keys_are_told_apart_by_their_whole_digest():
    tenants = (TenantEntry(name="a", key_sha256=(KEY_A,)), TenantEntry(name="b", key_sha256=("a" * 63 + "b",)))

    assert TenantsFile(tenants=tenants).tenants == tenants


@pytest.mark.parametrize(
    ("tenants", "message"),
    [
        ((TenantEntry(name="a"), TenantEntry(name="a", key_sha256=(KEY_A,))), "2 tenants have the name a"),
        ((TenantEntry(name="a"), TenantEntry(name="a")), "2 tenants have the name a"),
        (
            (TenantEntry(name="a", key_sha256=(KEY_A,)), TenantEntry(name="b", key_sha256=(KEY_A, KEY_B))),
            "2 tenants have the key aaaaaaaa;",
        ),
        ((TenantEntry(name="a"), TenantEntry(name="b")), "2 tenants have no key"),
    ],
)
def test_a_request_that_could_be_two_tenants_is_refused_with_the_reason(tenants, message):
    with pytest.raises(ValidationError, match=message):
        TenantsFile(tenants=tenants)
