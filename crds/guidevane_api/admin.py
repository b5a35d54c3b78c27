"""The admin contract between operator and runtime: bodies of GET and PATCH /admin/limits.

Atomic at an iteration boundary, fenced by a monotonic epoch, leased, validated against the envelope.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from guidevane_api.limits import ApiModel, Envelope, PartialLimits, SchedulerLimits

MAX_EPOCH = (1 << 53) - 1
"""Exact in a metric and in any JSON library; the epoch is in status too, where Kubernetes keeps 64 bits at most."""


class LimitsSource(StrEnum):
    """Who set the limits that are in force."""

    STARTUP = "Startup"
    SPEC = "Spec"
    RETUNE = "Retune"
    REVERT = "Revert"
    LEASE_EXPIRED = "LeaseExpired"


class ShrinkMode(StrEnum):
    """What happens to work above a limit that was lowered."""

    DRAIN = "drain"
    """Running requests finish; admission stops until use is below the limit."""
    PREEMPT = "preempt"
    """Requests above the limit go back to the queue and are recomputed later."""


class LimitsPatch(ApiModel):
    """Body of PATCH /admin/limits."""

    epoch: Annotated[int, Field(ge=1, le=MAX_EPOCH)]
    """Fencing number. Below the stored one: 409. Equal with an equal body: 200, nothing done (it renews the lease)."""
    limits: PartialLimits
    lease_seconds: Annotated[int, Field(ge=1, le=86400)] = 600
    """Back to the start-up limits if not renewed in this time."""
    source: LimitsSource = LimitsSource.SPEC
    mode: ShrinkMode = ShrinkMode.DRAIN


class LimitsView(ApiModel):
    """Body of GET /admin/limits, and the answer to an accepted PATCH."""

    target: SchedulerLimits
    """What was asked for last."""
    effective: SchedulerLimits
    """What holds since the last step: the target, except that a limit that was lowered below its present use is as high
    as that use until it has fallen to the target."""
    startup: SchedulerLimits
    """What a lease that ran out goes back to."""
    ceiling: Envelope
    epoch: int
    source: LimitsSource
    lease_remaining_seconds: int | None = None
    boot_id: str
    """A new one for every start of the engine: epochs are kept per boot id."""
    num_running: int
    num_waiting: int
