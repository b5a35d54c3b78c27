"""How many requests to run at once, by memory and by latency: the two rules of Pang, Li & Wang, arXiv:2503.05248.

Both are estimators: they say a number, and whoever asks decides what to do with it. They know statistics; they never
see a request or a clock. What is unknown stays unknown: None, never 0.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from guidevane_runtime.core.messages import EngineStats

MEMORY_SHARE_PERCENT = 95
"""Of all blocks that the batch may fill. The paper's 0.95."""

TOLERANCE = 0.2
"""Of latency around its target, as a share: 10 ms around 50 ms."""


class Bounds(NamedTuple):
    """Inclusive range of a batch size."""

    lower: int
    upper: int

    def clamp(self, num_seqs: int) -> int:
        return max(self.lower, min(self.upper, num_seqs))


def memory_aware_cap(stats: EngineStats, previous: int | None, bounds: Bounds) -> int | None:
    """How many sequences as large as those that run now fill 95 % of the blocks. Algorithm 1 of arXiv:2503.05248.

    It moves only while requests both wait and run, never below what runs, and stays in its bounds; otherwise the
    previous answer holds, which is None until there is one.

    This is the algorithm as its authors' repository states it: blocks per sequence are used / running. The paper also
    derives a form from the mean and deviation of request lengths and a probability of overflow, whose parameters it
    leaves to the reader; that one is not implemented.
    """
    if not (stats.num_waiting and stats.num_running and stats.num_blocks_used):
        return previous
    # floor(0.95 * total / (used / running)), in integers.
    cap = MEMORY_SHARE_PERCENT * stats.num_blocks_total * stats.num_running // (100 * stats.num_blocks_used)
    return bounds.clamp(max(cap, stats.num_running))


@dataclass(frozen=True, slots=True)
class LatencySearch:
    """Search for the largest batch that holds a latency that drifts. After Algorithm 2 of arXiv:2503.05248.

    The paper's: latency feedback on batch size, as a noisy binary search between two bounds; the batch shrinks while
    latency is over its target and grows while it is under. How exactly the bounds move is our reading, not checked
    against the text of the algorithm, and it is ours that no bound moves against the verdict: being over never raises
    the cap, being under never lowers it. Defaults are those of a public implementation (sgl-project/sglang pull request
    28477).
    """

    target_ms: float
    bounds: Bounds
    low: int
    high: int
    tolerance: float = TOLERANCE
    """Share of the target, on both sides of it, within which the batch is right as it is."""
    width: int = 20
    """Least distance of low and high, in requests: as far as noise may move the cap."""
    step: int = 5
    """Requests by which the bound that was not hit gives way at each look, so that an old verdict is forgotten."""

    @classmethod
    def over(cls, bounds: Bounds, target_ms: float) -> Self:
        """Nothing is known yet: all of the bounds."""
        return cls(target_ms, bounds, bounds.lower, bounds.upper)

    @property
    def cap(self) -> int:
        """Requests to run at once. With the bounds at their lower end it is half a width above it."""
        return (self.low + self.high) // 2

    def after(self, latency_ms: float | None, num_running: int) -> Self:
        """One look: the latency of late, and the batch that had it. None, or an empty batch: nothing is learned."""
        if latency_ms is None or num_running < 1:
            return self
        if latency_ms > self.target_ms * (1 + self.tolerance):
            return self._between(self.low - self.step, min(self.high, max(num_running, self.low + self.width)))
        if latency_ms < self.target_ms * (1 - self.tolerance):
            return self._between(max(self.low, min(num_running, self.high - self.width)), self.high + self.step)
        if num_running < self.low:
            return self  # so few come that the cap is not what bounds them
        return self._between(num_running - self.width // 2, num_running + self.width // 2)

    def _between(self, low: int, high: int) -> Self:
        return replace(self, low=self.bounds.clamp(low), high=self.bounds.clamp(high))


def least_known(*caps: int | None) -> int | None:
    """Both rules at once: the smaller cap, of those that are known."""
    return min((cap for cap in caps if cap is not None), default=None)
