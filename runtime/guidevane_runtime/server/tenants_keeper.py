"""Who is which tenant, and on which terms: the tenants file, read again while the server runs.

It holds digests of keys and no key. Without a file, or with no tenant in it, everybody is let in as one tenant.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from pydantic import ValidationError

from guidevane_api.pod_files import TenantsFile
from guidevane_runtime.core.door import Refused, Rejection
from guidevane_runtime.core.messages import SetTenants
from guidevane_runtime.core.tenants import TenantPolicy, policy_of
from guidevane_runtime.errors import StartError
from guidevane_runtime.settings import sentence

logger = logging.getLogger(__name__)

EVERYBODY = ""
"""The one tenant of a server without tenants; also the cache scope that all share then."""


class TenantsKeeper:
    """The file as it was last good, and the terms that the engine is to obey."""

    def __init__(self, read: Callable[[], bytes] = lambda: b"{}") -> None:
        """read: the file as it is now. Raises StartError when it can't be read or is not valid."""
        self._read = read
        self._raw = read()
        self._complaint: tuple[bytes, str] | None = None
        self.file = _parse(self._raw)
        self.policy = policy_of(self.file)
        self._names = _names_by_digest(self.file)
        self._epoch = 1

    @property
    def command(self) -> SetTenants:
        """What the engine is to be told."""
        return SetTenants(self.policy, self._epoch)

    @property
    def names(self) -> tuple[str, ...]:
        """Of those who are let in."""
        return tuple(tenant.name for tenant in self.file.tenants) or (EVERYBODY,)

    @property
    def is_file_good(self) -> bool:
        """Whether the file as it is now is what is obeyed."""
        return self._complaint is None

    def reload(self) -> bool:
        """Look at the file again. True: there are new terms or keys. A bad file changes nothing, and is logged once."""
        raw = b""
        try:
            raw = self._read()
            file = self.file if raw == self._raw else _parse(raw)
        except StartError as error:
            self._complain(raw, error.message)
            return False
        self._complaint = None
        if raw == self._raw:
            return False
        old, self.file, self._raw = self.file, file, raw
        self._names = _names_by_digest(file)
        logger.info("tenants changed", extra=_changes(old, file))
        self._set(replace(policy_of(file), pauses_offline=self.policy.pauses_offline))
        return True

    def pause_offline(self, is_paused: bool) -> bool:
        """The guard holds offline work back, or lets it go on. True: that is news."""
        if self.policy.pauses_offline == is_paused:
            return False
        self._set(replace(self.policy, pauses_offline=is_paused))
        return True

    def tenant_of(self, headers: Mapping[str, str]) -> str:
        """Whose request this is, by its key and nothing else. Raises Refused for a wrong or missing key."""
        if not self._names:
            return EVERYBODY
        key = _bearer_key(headers)
        tenant = self._names.get(hashlib.sha256(key).hexdigest() if key else "")
        if tenant is None:
            what = "the API key is not known here" if key else "an API key is needed"
            raise Refused(Rejection.AUTH, f"{what}: Authorization: Bearer <key>")
        return tenant

    def _set(self, policy: TenantPolicy) -> None:
        self.policy = policy
        self._epoch += 1

    def _complain(self, raw: bytes, why: str) -> None:
        if self._complaint != (raw, why):
            logger.warning("the tenants file is not obeyed; the last good one stays", extra={"reason": why})
        self._complaint = raw, why


def _parse(raw: bytes) -> TenantsFile:
    try:
        return TenantsFile.model_validate_json(raw)
    except ValidationError as error:
        raise StartError(f"the tenants file is not valid: {sentence(error)}") from error


def _names_by_digest(file: TenantsFile) -> dict[str, str]:
    """The tenant without keys is found under the empty string."""
    return {digest: tenant.name for tenant in file.tenants for digest in tenant.key_sha256 or ("",)}


def _bearer_key(headers: Mapping[str, str]) -> bytes:
    """Empty when there is none."""
    scheme, _, given = headers.get("Authorization", "").partition(" ")
    return given.strip().encode("utf-8", "surrogateescape") if scheme.lower() == "bearer" else b""


def _changes(old: TenantsFile, new: TenantsFile) -> dict[str, str]:
    """By name, without a word of their keys."""
    before, after = ({tenant.name: tenant for tenant in file.tenants} for file in (old, new))
    changed = [name for name in before.keys() & after.keys() if before[name] != after[name]]
    found = {"added": after.keys() - before.keys(), "removed": before.keys() - after.keys(), "changed": changed}
    return {what: ",".join(sorted(names)) for what, names in found.items() if names}
