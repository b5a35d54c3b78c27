"""Least requests in flight first; among equals the lowest pod number, so that a run can be told again."""

from heapq import heapify, heappop, heappush


class LeastLoadedRouter:
    """Knows only what it sent and what came back, as a gateway does. A heap of (load, pod) with stale entries."""

    def __init__(self, num_pods: int) -> None:
        self._loads: list[int | None] = [0] * num_pods
        self._heap = [(0, pod) for pod in range(num_pods)]

    def load(self, pod: int) -> int | None:
        """Requests in flight there; None while it is out."""
        return self._loads[pod]

    def choose(self) -> int | None:
        """The least loaded pod; None while there is none."""
        heap, loads = self._heap, self._loads
        while heap:
            load, pod = heap[0]
            if loads[pod] == load:
                return pod
            heappop(heap)
        return None

    def sent(self, pod: int) -> None:
        self._change(pod, 1)

    def ended(self, pod: int) -> None:
        self._change(pod, -1)

    def take_out(self, pod: int) -> None:
        """Nothing is sent to it any more; what it had is gone with it."""
        self._loads[pod] = None

    def bring_in(self, pod: int) -> None:
        """Back, and empty."""
        self._loads[pod] = 0
        heappush(self._heap, (0, pod))

    def _change(self, pod: int, by: int) -> None:
        load = self._loads[pod]
        if load is None:
            return
        self._loads[pod] = load + by
        heappush(self._heap, (load + by, pod))
        if len(self._heap) > 4 * len(self._loads) + 64:
            self._heap = [(now, at) for at, now in enumerate(self._loads) if now is not None]
            heapify(self._heap)
