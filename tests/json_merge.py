"""RFC 7386, as the API server does it."""

from typing import Any


def merged(value: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    result = dict(value) if isinstance(value, dict) else {}
    for name, inner in patch.items():
        if inner is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), inner)
    return result
