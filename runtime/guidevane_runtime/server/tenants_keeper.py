"""Who is which tenant, and on which terms: the tenants file, read again while the server runs.

It holds digests of keys and no key. Without a file, or with no tenant in it, everybody is let in as one tenant.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import replace

from guidevane_api.pod_files import TenantsFile
from guidevane_runtime.core.door import Refused, Rejection
from guidevane_runtime.core.messages import SetTenants
from guidevane_runtime.core.tenants import TenantPolicy, policy_of
from guidevane_runtime.server.watched_file import WatchedFile

logger = logging.getLogger(__name__)

EVERYBODY = ""
"""The one tenant of a server without tenants; also the cache scope that all share then."""


class TenantsKeeper:
    """The file as it was last good, and the terms that the engine is to obey."""

    def __init__(self, watched: WatchedFile[TenantsFile] | None = None) -> None:
        """Raises StartError for a file that can't be read or is not valid."""
        self._watched = watched
        self.file = watched.read() if watched else TenantsFile()
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
        return self._watched is None or self._watched.is_good

    def reload(self) -> bool:
        """Look at the file again. True: there are new terms or keys. A bad file changes nothing."""
        file = self._watched.changed() if self._watched else None
        if file is None or file == self.file:
            return False
        logger.info("tenants changed", extra=_changes(self.file, file))
        self.file, self._names = file, _names_by_digest(file)
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
