"""Status of a service: built by pure functions from facts, written on change only."""

from guidevane_operator.status.build import StatusFacts, build_status
from guidevane_operator.status.write import is_urgent, merge_patch

__all__ = ["StatusFacts", "build_status", "is_urgent", "merge_patch"]
