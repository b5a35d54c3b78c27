"""Whether a spec can be obeyed as it stands. A pure check, beside what the CRD's own rules hold."""

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from guidevane_api.conditions import Reason
from guidevane_api.limits import SchedulerLimits, limit_violations
from guidevane_api.llmservice import LLMServiceSpec, not_in_effect
from guidevane_operator.children.quantity import to_number

MAX_NAMED = 5
"""Fields named in one message, at most."""


@dataclass(frozen=True)
class Accepted:
    """The spec, parsed; every field of it is in effect."""

    spec: LLMServiceSpec


@dataclass(frozen=True)
class Refused:
    """The spec is left alone, and so is what runs."""

    reason: Reason
    message: str
    """Names the fields and the way out."""


def accept(raw: dict[str, Any]) -> Accepted | Refused:
    """Parse a spec as the API server holds it, or say why it cannot be obeyed."""
    try:
        spec = LLMServiceSpec.model_validate(raw)
    except ValidationError as error:
        faults = [f"spec.{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
        return Refused(Reason.INVALID_SPEC, _sentence("the spec can't be read", faults, "correct it"))
    later = [f"{path}: {sentence}" for path, sentence in not_in_effect(raw)]
    if later:
        return Refused(Reason.FIELD_NOT_IN_EFFECT, _sentence("fields without effect are set", later, "remove them"))
    violations = limit_violations(SchedulerLimits.resolve(spec.limits, spec.envelope), spec.envelope)
    if violations:
        faults = [f"spec.limits.{why}" for why in violations.values()]
        return Refused(Reason.INVALID_SPEC, _sentence("the limits contradict each other", faults, "correct them"))
    contradictions = _resource_faults(spec)
    if contradictions:
        return Refused(Reason.INVALID_SPEC, _sentence("no pod could run so", contradictions, "correct it"))
    keyless = [tenant.name for tenant in (spec.tenancy.tenants if spec.tenancy else ()) if not tenant.key_secret_ref]
    if len(keyless) > 1:
        fault = f"spec.tenancy.tenants: {' and '.join(keyless)} have no keySecretRef; only one may"
        return Refused(Reason.INVALID_SPEC, _sentence("tenants can't be told apart", [fault], "give each a key"))
    return Accepted(spec)


def _resource_faults(spec: LLMServiceSpec) -> list[str]:
    """What the API server or the kernel would refuse later, in words that are not the user's."""
    requests, limits, found = spec.resources.requests, spec.resources.limits, []
    for name in ("cpu", "memory"):
        request, limit = getattr(requests, name), getattr(limits, name)
        if request and limit and to_number(request) > to_number(limit):
            found.append(f"spec.resources.requests.{name} is {request}, above spec.resources.limits.{name} {limit}")
    cache, on_gpu = spec.envelope.kv_cache_memory, spec.resources.gpu and spec.resources.gpu.per_replica
    if cache and limits.memory and not on_gpu and to_number(cache) >= to_number(limits.memory):
        found.append(
            f"spec.envelope.kvCacheMemory is {cache}, not below spec.resources.limits.memory {limits.memory},"
            " which the model's weights need too"
        )
    return found


def _sentence(what: str, faults: list[str], way_out: str) -> str:
    """One message from several faults."""
    named = "; ".join(faults[:MAX_NAMED])
    more = f"; and {len(faults) - MAX_NAMED} more" if len(faults) > MAX_NAMED else ""
    return f"{what}: {named}{more}. Pods and limits stay as they are; {way_out} to go on."
