"""Which limits a service should have now, and under which epoch: pure functions over spec and status.

spec.limits decides, unless the tuner moved something since the spec was last changed. A change of spec.limits by a
person resets to the spec. The epoch only grows, and is in status before any pod hears of it.
"""

import hashlib
import json
from dataclasses import dataclass, replace

from guidevane_api.admin import LimitsSource
from guidevane_api.limits import Envelope, PartialLimits, SchedulerLimits, limit_violations


@dataclass(frozen=True)
class DesiredLimits:
    """What every ready pod should obey."""

    limits: SchedulerLimits
    epoch: int
    source: LimitsSource
    spec_hash: str
    """Hash of the resolved spec.limits that these limits started from."""

    def bumped(self, limits: SchedulerLimits, source: LimitsSource) -> "DesiredLimits":
        """The same lineage with new limits, one epoch later."""
        return replace(self, limits=limits, epoch=self.epoch + 1, source=source)

    def above(self, epoch: int) -> "DesiredLimits":
        """The same limits with an epoch that pods which saw `epoch` accept."""
        return replace(self, epoch=max(self.epoch, epoch) + 1)


def hash_limits(limits: PartialLimits) -> str:
    """A short, stable name for a set of limits."""
    text = json.dumps(limits.model_dump(mode="json", by_alias=True, exclude_none=True), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def next_desired(spec: PartialLimits, envelope: Envelope, persisted: DesiredLimits | None) -> DesiredLimits:
    """The limits to ask for, given what status says was asked for last."""
    resolved = SchedulerLimits.resolve(spec, envelope)
    # Hashed is what is sent: a pod takes another body under the same epoch for somebody else's.
    spec_hash = hash_limits(outgoing(resolved, spec, envelope))
    if persisted is None:
        return DesiredLimits(resolved, 1, LimitsSource.SPEC, spec_hash)
    if persisted.spec_hash == spec_hash and not limit_violations(persisted.limits, envelope):
        return persisted
    return DesiredLimits(resolved, persisted.epoch + 1, LimitsSource.SPEC, spec_hash)


MODEL_LENGTH_FIELDS = ("max_model_len", "max_prompt_tokens", "max_output_tokens")


def outgoing(limits: SchedulerLimits, spec: PartialLimits, envelope: Envelope) -> PartialLimits:
    """What is sent to a pod. With envelope.maxModelLen 0 only the pod knows its model's length.

    Then lengths that the spec leaves out are left to the pod, which would refuse a default above its model's own.
    """
    fields = limits.model_dump()
    if not envelope.max_model_len:
        for name in MODEL_LENGTH_FIELDS:
            if getattr(spec, name) is None:
                del fields[name]
    return PartialLimits(**fields)


def obeys(target: SchedulerLimits, asked: PartialLimits) -> bool:
    """Whether a pod's target is what was asked for."""
    return all(getattr(target, name) == value for name, value in asked.given().items())
