"""Who runs, in order of admission; who of them decodes next, and who is in mid-prefill."""

from collections.abc import Collection

from guidevane_runtime.core.budget import StepPlan
from guidevane_runtime.core.request import Request


class RunningRequests:
    """Owns every request that has blocks and a slot, and only those."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self.all: Collection[Request] = self._requests.values()
        """In order of admission; a live view."""

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]

    def prefills(self) -> list[Request]:
        return [request for request in self.all if request.num_uncomputed_tokens > 1]

    def decodes_in_turn(self, step: StepPlan) -> list[Request]:
        """In order of admission; the least recently served first when the budget is short, so everyone has a turn."""
        decodes = [request for request in self.all if request.num_uncomputed_tokens == 1]
        if len(decodes) > step.budget.num_decodes_left:
            decodes.sort(key=lambda request: request.last_turn)
        return decodes
