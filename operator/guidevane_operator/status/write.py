"""What of a new status has to be written, and whether now."""

from typing import Any

from guidevane_api.status import StatusModel

Json = dict[str, Any]


def merge_patch(old: Json, new: Json) -> Json:
    """The JSON merge patch (RFC 7386) that turns `old` into `new`; empty if they are equal."""
    patch: Json = {name: None for name in old if name not in new}
    for name, value in new.items():
        before = old.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            inner = merge_patch(before, value)
            if inner:
                patch[name] = inner
        elif name not in old or value != before:
            patch[name] = value
    return patch


def to_json(block: StatusModel) -> Json:
    """A status, or a block of it, as the API holds it: absent fields are left out."""
    return block.model_dump(mode="json", by_alias=True, exclude_none=True)


def is_urgent(old: Json, new: Json) -> bool:
    """Whether the difference is a transition or a decision, not just numbers that moved."""
    return _steady(old) != _steady(new)


def _steady(status: Json) -> Json:
    """A status without what moves all the time."""
    steady = {name: value for name, value in status.items() if name not in ("slo", "failures")}
    steady["conditions"] = [
        (c.get("type"), c.get("status"), c.get("reason"), c.get("observedGeneration"))
        for c in status.get("conditions") or ()
    ]
    steady["guard"] = bool((status.get("guard") or {}).get("level"))
    steady["metrics"] = (status.get("metrics") or {}).get("state")
    retune = dict(status.get("retune") or {})
    retune.pop("message", None)
    proposal = retune.pop("proposal", None) or {}
    steady["retune"] = retune | {"proposal": [proposal.get(name) for name in ("knob", "from", "to", "rule")]}
    return steady
