"""Requests in a fixed order, with cheap ends: what the waiting room and the deadlines are made of."""

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from guidevane_runtime.core.request import Request

Key = tuple[float | str, ...]
"""Where a request stands. It may not change while the request is in the line."""

MIN_COMPACTED = 64
"""A heap smaller than this is left as it is: sweeping it saves nothing."""


class Line:
    """first in O(1), add and discard in O(log n), both amortised; a walk pays O(log k) for its k-th request.

    A binary heap with tombstones: who is discarded stays in the heap until it surfaces, or until more than half of the
    heap is dead. Nothing but the heap ever sees a tombstone.
    """

    def __init__(self, key: Callable[[Request], Key]) -> None:
        self._key = key
        self._heap: list[tuple[Key, int, Request]] = []
        self._serials: dict[str, int] = {}
        """Entry of each request that is here; an entry with another serial is a tombstone."""
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._serials)

    def __iter__(self) -> Iterator[Request]:
        """In order. The line may not change meanwhile."""
        # Who leaves from the front leaves a tombstone there: off with it, or every walk would pass them all.
        heap, frontier = self._heap, [(self._heap[0], 0)] if self.first else []
        while frontier:
            entry, at = heappop(frontier)
            for child in range(2 * at + 1, min(2 * at + 3, len(heap))):
                heappush(frontier, (heap[child], child))
            if self._is_alive(entry):
                yield entry[2]

    @property
    def first(self) -> Request | None:
        while self._heap and not self._is_alive(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def add(self, request: Request) -> None:
        self._num_added += 1
        self._serials[request.request_id] = self._num_added
        heappush(self._heap, (self._key(request), self._num_added, request))

    def discard(self, request: Request) -> None:
        """Gone at once for everybody who asks; no error when it isn't here."""
        self._serials.pop(request.request_id, None)
        if len(self._heap) > max(MIN_COMPACTED, 2 * len(self._serials)):
            self._heap = [entry for entry in self._heap if self._is_alive(entry)]
            heapify(self._heap)

    def _is_alive(self, entry: tuple[Key, int, Request]) -> bool:
        return self._serials.get(entry[2].request_id) == entry[1]
