"""The fleet over time, one point per scrape: for plots, and for the share of KV memory that holds nothing."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from guidevane_bench.simulator.pod import SimPod
from guidevane_runtime.core.request import Request


def num_slots_unfilled(running: Iterable[Request], block_size: int) -> int:
    """Slots at the end of each request's last block. A block that several hold is full, so none counts twice."""
    return sum([len(request.blocks.block_ids) * block_size - request.num_tokens for request in running])


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
    num_slots_unfilled: int
    """Of those, the ones that no known token is for: the ends of last blocks. Blocks that are shared are full."""

    @classmethod
    def of(cls, time_s: float, pods: Iterable[SimPod]) -> "SeriesPoint":
        num_pods = running = waiting = blocks = used = slots = unfilled = 0
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
            unfilled += num_slots_unfilled(requests, pool.block_size)
        return cls(time_s, num_pods, running, waiting, blocks, used, slots, unfilled)


@dataclass(slots=True)
class Series:
    """Points in order of time."""

    points: list[SeriesPoint] = field(default_factory=list)

    def kv_waste_percent(self) -> float | None:
        """Share of taken KV slots that no known token is for: the unfilled ends of last blocks."""
        slots = sum(point.num_slots_used for point in self.points)
        unfilled = sum(point.num_slots_unfilled for point in self.points)
        return round(100 * unfilled / slots, 3) if slots else None

    def kv_use_percent(self) -> float | None:
        """Mean over time of the share of blocks in use."""
        blocks = sum(point.num_blocks for point in self.points)
        used = sum(point.num_blocks_used for point in self.points)
        return round(100 * used / blocks, 3) if blocks else None
