"""Who came first, and how much is waiting: answers that cost the same whatever the number of those that wait."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

from guidevane_runtime.core.request import Request


class Arrival(NamedTuple):
    """When a request came; the id only keeps the order total."""

    arrival_s: float
    request_id: str


class ArrivalOrder:
    """Waiting requests by age, and their tokens together. A request gets no token while it waits."""

    def __init__(self) -> None:
        self._arrivals: list[Arrival] = []
        self.num_tokens = 0

    def add(self, request: Request) -> None:
        insort(self._arrivals, _arrival_of(request))
        self.num_tokens += request.num_tokens

    def remove(self, request: Request) -> None:
        del self._arrivals[bisect_left(self._arrivals, _arrival_of(request))]
        self.num_tokens -= request.num_tokens

    @property
    def oldest_s(self) -> float | None:
        return self._arrivals[0].arrival_s if self._arrivals else None

    def before(self, time_s: float) -> Iterator[str]:
        """Ids of those that came earlier than time_s, oldest first."""
        for arrival in self._arrivals:
            if arrival.arrival_s >= time_s:
                return
            yield arrival.request_id


def _arrival_of(request: Request) -> Arrival:
    return Arrival(request.submit.arrival_s, request.request_id)
