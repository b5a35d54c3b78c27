"""What a setup can do: the highest request rate at which its SLO still holds, and its throughput with no SLO at all.

Every setup is played the same load: the same seed gives the same lengths in the same order at every rate.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from guidevane_api.limits import MAX_TOKENS, PartialLimits, SchedulerLimits
from guidevane_bench.errors import SpecError, sentence_of
from guidevane_bench.report.latency import LatencyHistogram
from guidevane_bench.simulator.batch_control import CONTROLLERS
from guidevane_bench.simulator.costs import CostModel
from guidevane_bench.simulator.fleet import Fleet, FleetSpec, Outcome
from guidevane_bench.simulator.ledger import End
from guidevane_bench.simulator.pod import PodShape
from guidevane_bench.workload.load import LoadSpec
from guidevane_bench.workload.request import LoadRequest
from guidevane_runtime.core.guard import GuardConfig
from guidevane_runtime.core.guard_steps import Line

SCRAPE_INTERVAL_S = 1.0
"""A controller looks as often as the guard does."""
MAX_RATE, MIN_RATE = 4096.0, 1 / 64
"""Requests per second between which a capacity is looked for."""
FIRST_STRIDE = 1.1
"""Setups are seldom far from each other, and each starts where the last one ended."""
PRECISION = 1.02
"""Ratio of the lowest rate that failed to the highest that held at which the search ends."""
MAX_UNSERVED_PERCENT = 1.0
"""Requests that may go unserved at capacity."""
ROOMY_QUEUE = PartialLimits(
    max_queued_requests=65536, max_queued_tokens=MAX_TOKENS, waiting_timeout_milliseconds=86_400_000
)
"""For throughput: nothing is refused, whatever waits."""
VLLM_KV_PERCENT = 99
"""vLLM's watermark leaves 1 % of the blocks free at admission."""


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to bound the batch."""

    name: str
    shape: PodShape
    controller: str = ""
    """A name of CONTROLLERS; empty: the limits stay."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One run. Latencies in ms; None without samples."""

    rate: float
    """Requests per second that came; 0 when all were there at once."""
    ttft_p95_ms: float | None
    itl_p95_ms: float | None
    unserved_percent: float
    """Refused, timed out or lost."""
    output_tokens_per_s: float
    num_preemptions: int

    def holds(self, lines: Mapping[Line, float]) -> bool:
        """Whether TTFT and ITL hold over the whole run, and all but a few requests were served."""
        slow = (self.ttft_p95_ms or 0.0) > lines[Line.TTFT] or (self.itl_p95_ms or 0.0) > lines[Line.ITL]
        return not slow and self.unserved_percent <= MAX_UNSERVED_PERCENT


@dataclass(frozen=True, slots=True)
class Trial:
    """What does not differ between setups."""

    load: LoadSpec
    """Its arrivals are ours to set."""
    costs: CostModel
    lines: Mapping[Line, float]
    """Of TTFT and ITL."""

    def at_rate(self, setup: Setup, rate: float) -> Figures:
        requests = replace(self.load, arrivals=f"poisson:rate={rate}").requests()
        return self._figures(setup, requests, rate)

    def saturated(self, setup: Setup, count: int) -> Figures:
        """So many requests, all there at once."""
        enough = replace(self.load, arrivals=f"poisson:rate={2 * count / self.load.duration_s}")
        requests = [replace(request, arrival_s=0.0) for request in enough.requests()[:count]]
        limits = setup.shape.limits.merged(ROOMY_QUEUE)
        return self._figures(replace(setup, shape=replace(setup.shape, limits=limits)), requests, 0.0)

    def _figures(self, setup: Setup, requests: list[LoadRequest], rate: float) -> Figures:
        controller = CONTROLLERS[setup.controller](self.lines[Line.ITL]) if setup.controller else None
        spec = FleetSpec(setup.shape, self.costs, scrape_interval_s=SCRAPE_INTERVAL_S)
        return _figures(Fleet(spec, controller).run(requests), rate)


def capacity(holds: Callable[[float], bool], start: float) -> float:
    """The highest rate that holds, within PRECISION: away from `start` in growing strides, then halfway by ratio."""
    low = high = start
    stride = FIRST_STRIDE
    is_up = holds(start)
    while low == high or holds(high if is_up else low) == is_up:
        low, high = (high, high * stride) if is_up else (low / stride, low)
        stride = min(2.0, stride * stride)
        if not MIN_RATE < low <= high < MAX_RATE:
            raise SpecError(
                f"between {MIN_RATE:g} and {MAX_RATE:g} requests/s the SLO always or never holds; change it"
            )
    while high / low > PRECISION:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def parse_setup(name: str, limits: SchedulerLimits, num_blocks: int, lines: Mapping[Line, float]) -> Setup:
    """BASE, BASE+guard or BASE+CONTROLLER; BASE is guidevane, static-N or peak-kv-N.

    guidevane is the runtime with its limits as they are. static-N is like vLLM: N requests at most, whatever fits now
    comes in, and growth preempts. peak-kv-N differs from it by guidevane's estimate of the peak at admission only.
    """
    base, _, extra = name.partition("+")
    kind, _, number = base.rpartition("-")
    if base == "guidevane":
        shape = PodShape(limits, num_blocks)
    elif kind in ("static", "peak-kv") and number.isdecimal():
        try:
            own = PartialLimits(max_num_seqs=int(number), kv_cache_utilization_limit_percent=VLLM_KV_PERCENT)
        except ValueError as error:
            raise SpecError(f"--setups has {name!r}: {sentence_of(error)}") from error
        shape = PodShape(limits.merged(own), num_blocks, is_optimistic=kind == "static")
    else:
        raise SpecError(f"--setups has {name!r}; begin with guidevane, static-N or peak-kv-N, say static-256")
    if extra == "guard":
        return Setup(name, replace(shape, guard=GuardConfig(lines)))
    if extra and extra not in CONTROLLERS:
        raise SpecError(f"--setups has {name!r}; after the + comes one of guard, {', '.join(CONTROLLERS)}")
    return Setup(name, shape, extra)


def _figures(outcome: Outcome, rate: float) -> Figures:
    entries = outcome.ledger.entries
    itl, ttft = LatencyHistogram(), LatencyHistogram()
    for histogram in outcome.ledger.itl_by_group.values():
        itl.merge(histogram)
    for entry in entries:
        if entry.ttft_s is not None:
            ttft.add(entry.ttft_s)
    num_unserved = sum(entry.end is not End.FINISHED for entry in entries)
    return Figures(
        rate,
        _p95_ms(ttft),
        _p95_ms(itl),
        100 * num_unserved / max(1, len(entries)),
        sum(entry.num_tokens for entry in entries) / outcome.ended_s if outcome.ended_s else 0.0,
        outcome.num_scheduler_preemptions,
    )


def _p95_ms(histogram: LatencyHistogram) -> float | None:
    value_s = histogram.quantile(0.95)
    return None if value_s is None else 1000 * value_s
