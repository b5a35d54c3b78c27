"""Who shares a service: from spec.tenancy and the Secrets with the tenants' keys to the file that its pods read.

Only digests leave here. A tenant without a key that can be used is locked out, and the others go on.
"""

import base64
import binascii
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from guidevane_api.conditions import Reason
from guidevane_api.pod_files import TenantEntry, TenantsFile
from guidevane_api.spec_traffic import TenancySpec, Tenant

MAX_NAMED = 5
"""Tenants named in one message, at most."""
MAX_KEYS = 8
"""Keys of one tenant at once: TenantEntry takes no more."""

SecretData = Mapping[str, str]
"""Keys and base64 values, as the API holds them."""


@dataclass(frozen=True)
class Lock:
    """Why nobody can be a tenant."""

    reason: Reason
    message: str
    """Names the Secret, the key in it and the way out."""


@dataclass(frozen=True)
class TenantsPlan:
    """What pods are told of the tenants, and who is locked out."""

    file: TenantsFile = field(default_factory=TenantsFile)
    locked: Mapping[str, Lock] = field(default_factory=dict)
    """By tenant."""

    @property
    def sentence(self) -> str:
        """Who is locked out, why, and the way out; empty if nobody is."""
        named = [f"tenant {name}: {lock.message}" for name, lock in self.locked.items()]
        more = f"; and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
        return "; ".join(named[:MAX_NAMED]) + more


def secret_names(tenancy: TenancySpec | None) -> list[str]:
    """Secrets that hold keys of tenants, each once."""
    tenants = tenancy.tenants if tenancy else ()
    return sorted({tenant.key_secret_ref.name for tenant in tenants if tenant.key_secret_ref})


def plan_tenants(tenancy: TenancySpec | None, secrets: Mapping[str, SecretData]) -> TenantsPlan:
    """The file and the locks. `secrets`: what there is of `secret_names`; one left out does not exist."""
    if tenancy is None:
        return TenantsPlan()
    digests: dict[str, tuple[str, ...]] = {}
    locked: dict[str, Lock] = {}
    for tenant in tenancy.tenants:
        found = _digests(tenant, secrets)
        if isinstance(found, Lock):
            locked[tenant.name] = found
        else:
            digests[tenant.name] = found
    locked |= _shared(tenancy.tenants, digests)
    entries = tuple(
        _entry(tenant, (_no_key(number),) if tenant.name in locked else digests[tenant.name])
        for number, tenant in enumerate(tenancy.tenants, 1)
    )
    return TenantsPlan(TenantsFile(tenants=entries, classes=tenancy.classes), locked)


def _digests(tenant: Tenant, secrets: Mapping[str, SecretData]) -> tuple[str, ...] | Lock:
    """Digests of the tenant's keys; none if it needs no key."""
    ref = tenant.key_secret_ref
    if ref is None:
        return ()
    if ref.name not in secrets:
        return _lock(f"Secret {ref.name} does not exist; create it with a key in {ref.key}")
    if ref.key not in secrets[ref.name]:
        return _lock(f"Secret {ref.name} has no {ref.key}; put a key there, or correct keySecretRef")
    keys = _keys(secrets[ref.name][ref.key])
    if not keys:
        return _lock(f"{ref.key} of Secret {ref.name} is empty; put a key there")
    if len(keys) > MAX_KEYS:
        return _lock(f"{ref.key} of Secret {ref.name} has {len(keys)} lines, limit {MAX_KEYS}; leave one key a line")
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        return _lock(f"{ref.key} of Secret {ref.name} holds what no HTTP header can carry; use printable ASCII")
    return tuple(hashlib.sha256(key.encode()).hexdigest() for key in keys)


def _keys(encoded: str) -> list[str]:
    """The keys in a value of a Secret, one a line; several while one is being replaced."""
    try:
        text = base64.b64decode(encoded).decode("utf-8", "replace")
    except binascii.Error:
        return []
    return list(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))


def _shared(tenants: Iterable[Tenant], digests: Mapping[str, tuple[str, ...]]) -> dict[str, Lock]:
    """Locks for all tenants that have a key in common: whose request would it be?"""
    owners: dict[str, list[str]] = defaultdict(list)
    for name, found in digests.items():
        for digest in found:
            owners[digest].append(name)
    locked = {}
    for tenant in tenants:
        ref = tenant.key_secret_ref
        others = {other for digest in digests.get(tenant.name, ()) for other in owners[digest]} - {tenant.name}
        if ref is not None and others:
            message = f"{ref.key} of Secret {ref.name} holds a key that {' and '.join(sorted(others))} has too"
            locked[tenant.name] = Lock(Reason.KEY_SHARED, f"{message}; give each its own")
    return locked


def _lock(message: str) -> Lock:
    return Lock(Reason.KEY_MISSING, message)


def _no_key(number: int) -> str:
    """A digest that no key has, another for each tenant. Without one, the tenant would need no key at all."""
    return f"{number:08x}".ljust(64, "0")


def _entry(tenant: Tenant, digests: tuple[str, ...]) -> TenantEntry:
    return TenantEntry(
        name=tenant.name,
        weight=tenant.weight,
        max_in_flight=tenant.max_in_flight,
        max_queued_tokens=tenant.max_queued_tokens,
        key_sha256=digests,
    )
