"""What a pod reads from files while it runs, beside its start-up limits: who shares it, and which SLO it protects.

The operator writes them from spec.tenancy and spec.slo; without Kubernetes a person does. A change is live.
"""

from collections import Counter
from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from guidevane_api.limits import ApiModel, Percent, Tokens
from guidevane_api.schema import Milliseconds, ObjectName
from guidevane_api.spec_traffic import ClassShares

KeyDigest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
"""sha256 of an API key, in hex: the key itself is in no file of a pod."""


class TenantEntry(ApiModel):
    """One tenant: its share, its caps, and how its requests are known."""

    name: ObjectName
    weight: Annotated[int, Field(ge=1, le=1000)] = 1
    max_in_flight: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """None: no cap of its own."""
    max_queued_tokens: Tokens | None = None
    """None: no cap of its own."""
    key_sha256: Annotated[tuple[KeyDigest, ...], Field(max_length=8)] = ()
    """Several while a key is being replaced. Empty: requests without a key are this tenant's."""


class TenantsFile(ApiModel):
    """All tenants. With an empty list everybody is let in, and all are one tenant."""

    tenants: Annotated[tuple[TenantEntry, ...], Field(max_length=64)] = ()
    classes: ClassShares = ClassShares()

    @model_validator(mode="after")
    def _every_request_is_one_tenants(self) -> Self:
        """No name, no key and no lack of a key twice. Of a digest only the beginning is told."""
        for what, length, values in (
            ("name", 253, [tenant.name for tenant in self.tenants]),
            ("key", 8, [digest for tenant in self.tenants for digest in tenant.key_sha256]),
        ):
            for value, count in Counter(values).items():
                if count > 1:
                    raise ValueError(f"{count} tenants have the {what} {value[:length]}; give each tenant its own")
        num_keyless = sum(not tenant.key_sha256 for tenant in self.tenants)
        if num_keyless > 1:
            raise ValueError(f"{num_keyless} tenants have no key, one at most may have none; give each other one a key")
        return self


class GuardMode(StrEnum):
    """What the guard may do."""

    OFF = "off"
    DRY_RUN = "dry-run"
    """It decides, logs and exports, and changes nothing."""
    ON = "on"


class ProtectionLines(ApiModel):
    """Lines of the SLO that a pod's guard protects. None: not looked at."""

    mode: GuardMode = GuardMode.ON
    ttft_p95_milliseconds: Milliseconds | None = None
    itl_p95_milliseconds: Milliseconds | None = None
    queue_wait_p95_milliseconds: Milliseconds | None = None
    kv_cache_utilization_max_percent: Percent | None = None
    admission_reject_rate_max_percent: Percent | None = None

    def given(self) -> dict[str, int]:
        """The lines that are set, by their Python names."""
        return self.model_dump(exclude={"mode"}, exclude_none=True)
