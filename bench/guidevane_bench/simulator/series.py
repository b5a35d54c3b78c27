"""The fleet over time, one point per scrape: for plots, and for the share of KV memory that holds nothing."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from guidevane_bench.simulator.pod import SimPod


@dataclass(frozen=True, slots=True)
class SeriesPoint:
    """Sums over all pods that live."""

    time_s: float
    num_pods: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_blocks_used: int
    num_slots_used: int
    """Token slots of the blocks in use."""
    num_tokens_held: int
    """Tokens that those slots are for: known tokens of running requests."""

    @classmethod
    def of(cls, time_s: float, pods: Iterable[SimPod]) -> "SeriesPoint":
        num_pods = running = waiting = blocks = used = slots = held = 0
        for pod in pods:
            pool = pod.scheduler.pool
            num_pods += 1
            blocks += pool.num_blocks
            if not pod.live:
                continue
            requests = pod.scheduler.running
            running += len(requests)
            waiting += len(pod.live) - len(requests)
            used += pool.num_used
            slots += pool.num_used * pool.block_size
            held += sum([request.num_tokens for request in requests])
        return cls(time_s, num_pods, running, waiting, blocks, used, slots, held)


@dataclass(slots=True)
class Series:
    """Points in order of time."""

    points: list[SeriesPoint] = field(default_factory=list)

    def kv_waste_percent(self) -> float | None:
        """Share of taken KV slots that no known token is for: the unfilled ends of last blocks."""
        slots = sum(point.num_slots_used for point in self.points)
        held = sum(point.num_tokens_held for point in self.points)
        return round(100 * (slots - held) / slots, 3) if slots else None

    def kv_use_percent(self) -> float | None:
        """Mean over time of the share of blocks in use."""
        blocks = sum(point.num_blocks for point in self.points)
        used = sum(point.num_blocks_used for point in self.points)
        return round(100 * used / blocks, 3) if blocks else None
