"""Whose a request is, and what becomes of a tenants file that changes."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from guidevane_api.pod_files import TenantsFile
from guidevane_runtime.core.door import Refused, Rejection
from guidevane_runtime.core.tenants import TenantTerms
from guidevane_runtime.errors import StartError
from guidevane_runtime.server.tenants_keeper import TenantsKeeper
from guidevane_runtime.server.watched_file import WatchedFile


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def tenant(name: str, *keys: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "keySha256": [digest(key) for key in keys], **more}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


class File:
    """A tenants file on a disk, as Kubernetes mounts it: a link that is swapped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "tenants.json"
        self.num_versions = 0

    def write(self, text: str) -> None:
        self.num_versions += 1
        version = self.folder / f"version{self.num_versions}"
        version.write_text(text)
        link = self.folder / "next"
        link.symlink_to(version)
        link.rename(self.path)

    def write_tenants(self, *tenants: dict[str, Any], **more: Any) -> None:
        self.write(json.dumps({"tenants": tenants, **more}))

    def keeper(self) -> TenantsKeeper:
        return TenantsKeeper(WatchedFile(self.path, "--tenants-file", TenantsFile))


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path)


# ----------------------------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize("headers", [{}, bearer("anything")])
def test_without_a_file_everybody_is_the_same_tenant(headers: dict[str, str]) -> None:
    keeper = TenantsKeeper()
    assert keeper.tenant_of(headers) == ""
    assert keeper.names == ("",)


def test_without_a_tenant_in_the_file_everybody_is_the_same_tenant(file: File) -> None:
    file.write("{}")
    assert file.keeper().tenant_of({}) == ""


def test_each_key_is_its_tenants(file: File) -> None:
    file.write_tenants(tenant("a", "key-a"), tenant("b", "key-b", "key-b2"))
    keeper = file.keeper()
    found = [keeper.tenant_of(bearer(key)) for key in ("key-a", "key-b", "key-b2")]
    assert found == ["a", "b", "b"]
    assert keeper.tenant_of({"Authorization": "bearer  key-a "}) == "a"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("wrong"),
        bearer(""),
        {"Authorization": "key-a"},
        {"Authorization": "Basic key-a"},
        {"Authorization": "Bearer " + digest("key-a")},
        {"X-Tenant-Id": "a"},
    ],
)
def test_no_key_and_a_wrong_one_are_refused_and_not_told(file: File, headers: dict[str, str]) -> None:
    file.write_tenants(tenant("a", "key-a"))
    with pytest.raises(Refused) as raised:
        file.keeper().tenant_of(headers)
    assert (raised.value.reason, raised.value.wait_s) == (Rejection.AUTH, None)
    assert "wrong" not in str(raised.value) and "key-a" not in str(raised.value)


def test_a_tenant_without_keys_has_the_requests_without_a_key_and_no_others(file: File) -> None:
    file.write_tenants(tenant("a", "key-a"), tenant("public"))
    keeper = file.keeper()
    assert (keeper.tenant_of({}), keeper.tenant_of(bearer("key-a"))) == ("public", "a")
    with pytest.raises(Refused):
        keeper.tenant_of(bearer("wrong"))


def test_a_key_may_hold_any_bytes(file: File) -> None:
    file.write_tenants({"name": "a", "keySha256": [hashlib.sha256(b"\xff\xe9").hexdigest()]})
    assert file.keeper().tenant_of(bearer(b"\xff\xe9".decode("utf-8", "surrogateescape"))) == "a"


# ---------------------------------------------------------------------------------------------------------------- terms


def test_terms_and_shares_are_the_files(file: File) -> None:
    file.write_tenants(
        tenant("a", "k", weight=3, maxInFlight=5, maxQueuedTokens=70), classes={"interactive": 4, "offline": 2}
    )
    policy = file.keeper().policy
    assert policy.terms_of("a") == TenantTerms("a", 3, 5, 70)
    assert (policy.interactive_share, policy.offline_share, policy.pauses_offline) == (4, 2, False)


def test_a_change_of_the_file_is_obeyed_and_has_a_higher_epoch(file: File) -> None:
    file.write_tenants(tenant("a", "key-a"))
    keeper = file.keeper()
    before = keeper.command
    file.write_tenants(tenant("a", "key-a", weight=2), tenant("b", "key-b"))
    assert keeper.reload()
    assert keeper.tenant_of(bearer("key-b")) == "b"
    assert keeper.command.epoch > before.epoch
    assert keeper.command.policy.terms_of("a").weight == 2
    assert not keeper.reload()


def test_a_key_that_is_taken_out_opens_nothing_any_more(file: File) -> None:
    file.write_tenants(tenant("a", "old", "new"))
    keeper = file.keeper()
    file.write_tenants(tenant("a", "new"))
    keeper.reload()
    with pytest.raises(Refused):
        keeper.tenant_of(bearer("old"))


def test_the_guards_pause_outlives_a_change_of_the_file(file: File) -> None:
    file.write_tenants(tenant("a", "key-a"))
    keeper = file.keeper()
    epoch = keeper.command.epoch
    assert keeper.pause_offline(True) and not keeper.pause_offline(True)
    assert (keeper.command.policy.pauses_offline, keeper.command.epoch) == (True, epoch + 1)
    file.write_tenants(tenant("b", "key-b"))
    keeper.reload()
    assert keeper.policy.pauses_offline
    assert keeper.pause_offline(False) and not keeper.policy.pauses_offline


# ------------------------------------------------------------------------------------------------------------ bad files

BAD = [
    ("{", "Invalid JSON"),
    ('{"tenants": [{"name": "a", "weight": 0}]}', "tenants.0.weight: Input should be greater than or equal to 1"),
    (
        '{"tenants": [{"name": "a"}, {"name": "b"}]}',
        "2 tenants have no key, one at most may have none; give each other one a key",
    ),
    ('{"tenants": [{"name": "a", "keySha256": ["sk-secret"]}]}', "tenants.0.keySha256.0: String should match pattern"),
]


@pytest.mark.parametrize(("text", "why"), BAD)
def test_a_bad_file_stops_the_start_with_a_sentence(file: File, text: str, why: str) -> None:
    file.write(text)
    with pytest.raises(StartError) as raised:
        file.keeper()
    assert why in raised.value.message and "sk-secret" not in raised.value.message


def test_a_file_that_is_not_there_stops_the_start(file: File) -> None:
    with pytest.raises(StartError, match="can't read --tenants-file"):
        file.keeper()


@pytest.mark.parametrize("text", [text for text, _ in BAD])
def test_a_bad_file_later_changes_nothing_and_is_logged_once_per_content(
    file: File, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    file.write_tenants(tenant("a", "key-a"))
    keeper = file.keeper()
    command = keeper.command
    file.write(text)
    for _ in range(3):
        assert not keeper.reload()
    assert (keeper.command, keeper.is_file_good) == (command, False)
    assert keeper.tenant_of(bearer("key-a")) == "a"
    file.write(text + " ")
    keeper.reload()
    assert [record.message for record in caplog.records] == ["file ignored"] * 2
    assert "sk-secret" not in caplog.text


def test_a_file_that_is_gone_for_a_while_is_missed_and_found_again(file: File) -> None:
    file.write_tenants(tenant("a", "key-a"))
    keeper = file.keeper()
    file.path.unlink()
    assert not keeper.reload() and not keeper.is_file_good
    file.write_tenants(tenant("a", "key-a"))
    assert not keeper.reload()
    assert keeper.is_file_good


def test_what_changed_is_logged_by_name_without_keys(file: File, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file.write_tenants(tenant("a", "key-a"), tenant("b", "key-b"), tenant("c", "key-c"))
    keeper = file.keeper()
    file.write_tenants(tenant("a", "key-a"), tenant("b", "key-b", weight=2), tenant("d", "key-d"))
    keeper.reload()
    (record,) = caplog.records
    assert (record.added, record.removed, record.changed) == ("d", "c", "b")  # type: ignore[attr-defined]
    assert digest("key-d") not in str(vars(record))


def test_the_file_of_the_documentation_is_good(file: File) -> None:
    page = (Path(__file__).parents[3] / "docs" / "admission.md").read_text()
    file.write(page.split("```json\n")[1].split("```")[0])
    keeper = file.keeper()
    assert [keeper.tenant_of(bearer("test")), keeper.tenant_of({})] == ["acme", "public"]
