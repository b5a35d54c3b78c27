"""The waiting room: requests by (priority, arrival). A preempted request comes back to its own place."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import NamedTuple

from guidevane_runtime.core.request import Request


class Place(NamedTuple):
    """Where a request stands; the id only keeps the order total."""

    priority: int
    arrival_s: float
    request_id: str


def place_of(request: Request) -> Place:
    return Place(request.submit.priority, request.submit.arrival_s, request.request_id)


class WaitingQueue:
    """Owns every waiting request, and only those."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Request]:
        """In no particular order."""
        return iter(self._requests.values())

    @property
    def num_tokens(self) -> int:
        """Tokens that wait to be computed."""
        return sum(request.num_tokens for request in self)

    def oldest_arrival_s(self) -> float | None:
        return min((request.submit.arrival_s for request in self), default=None)

    def add(self, request: Request) -> None:
        insort(self._places, place_of(request))
        self._requests[request.request_id] = request

    def remove(self, request: Request) -> None:
        """Its place is gone at once, so the queue never counts the dead."""
        del self._places[bisect_left(self._places, place_of(request))]
        del self._requests[request.request_id]

    def in_line(self) -> list[Request]:
        """First in line first."""
        return [self._requests[place.request_id] for place in self._places]

    def first(self, is_eligible: Callable[[Request], bool]) -> Request | None:
        """The first in line that may be looked at now."""
        in_line = (self._requests[place.request_id] for place in self._places)
        return next((request for request in in_line if is_eligible(request)), None)
