"""Controllers that set maxNumSeqs by the rules of arXiv:2503.05248, for comparison with limits that stay."""

from collections.abc import Callable, Mapping

from guidevane_bench.simulator.control import Controller, FleetSample, LimitsOrder, PodSample
from guidevane_runtime.core.batch_bounds import TOLERANCE, Bounds, LatencySearch, least_known, memory_aware_cap

DEFAULT_BOUNDS = Bounds(1, 256)
"""256: what vLLM starts with when nothing is said."""
DEFAULT_ITL_MS = 50.0
"""Target of the latency rule when no ITL line is given."""


class BatchController:
    """One cap for all pods: the smallest that one of them asks for."""

    def __init__(
        self, *, itl_ms: float | None = None, by_memory: bool = False, bounds: Bounds = DEFAULT_BOUNDS
    ) -> None:
        """itl_ms: most that the latency rule leaves alone; None leaves that rule out. by_memory: that one is in.

        The latency rule hears the mean gap between tokens since its last look, as in the paper: the p95 of one second
        is made by the prefills in it, which no batch size governs.
        """
        self._bounds = bounds
        self._by_memory = by_memory
        self._itl_ms = itl_ms
        self._memory_caps: dict[int, int | None] = {}
        self._searches: dict[int, LatencySearch] = {}

    def decide(self, sample: FleetSample) -> LimitsOrder | None:
        caps = [self._cap(pod) for pod in sample.pods if pod is not None]
        cap = least_known(*caps)
        if cap is None or cap == sample.limits.max_num_seqs:
            return None
        return LimitsOrder(sample.limits.model_copy(update={"max_num_seqs": cap}))

    def _cap(self, pod: PodSample) -> int | None:
        return least_known(self._memory_cap(pod), self._latency_cap(pod))

    def _memory_cap(self, pod: PodSample) -> int | None:
        if not self._by_memory:
            return None
        cap = memory_aware_cap(pod.stats, self._memory_caps.get(pod.pod), self._bounds)
        self._memory_caps[pod.pod] = cap
        return cap

    def _latency_cap(self, pod: PodSample) -> int | None:
        if self._itl_ms is None:
            return None
        search = self._searches.get(pod.pod) or self._new_search(self._itl_ms)
        search = search.after(pod.meter.itl.mean_ms, pod.stats.num_running)
        self._searches[pod.pod] = search
        return search.cap

    def _new_search(self, itl_ms: float) -> LatencySearch:
        """The SLO is the upper edge of what counts as near the target: within it nothing is over."""
        return LatencySearch.over(self._bounds, itl_ms / (1 + TOLERANCE))


CONTROLLERS: Mapping[str, Callable[[float], Controller]] = {
    "memory-aware": lambda _: BatchController(by_memory=True),
    "sla-aware": lambda itl_ms: BatchController(itl_ms=itl_ms),
    "combined": lambda itl_ms: BatchController(itl_ms=itl_ms, by_memory=True),
}
"""By name; each is made for an ITL in ms."""
