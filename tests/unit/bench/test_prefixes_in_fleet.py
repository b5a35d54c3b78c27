"""Prompts that begin alike share their blocks in the simulator as they do in the runtime, and are counted once."""

from collections.abc import Callable

from guidevane_api.limits import SchedulerLimits
from guidevane_bench.report.latency import LatencyHistogram
from guidevane_bench.simulator.costs import CostModel
from guidevane_bench.simulator.fleet import Outcome
from guidevane_bench.simulator.ledger import Entry
from guidevane_bench.simulator.pod import PodShape, SimPod
from guidevane_bench.simulator.series import SeriesPoint
from guidevane_bench.workload.request import PREFIX_BLOCK_TOKENS, LoadRequest

Play = Callable[..., Outcome]

PROMPT = PREFIX_BLOCK_TOKENS + 40


def alike(count: int, *, gap_s: float = 1.0) -> list[LoadRequest]:
    """Their first 512 tokens are the same, the rest is their own."""
    return [LoadRequest(n, n * gap_s, PROMPT, 30, prefix_ids=(7, 100 + n)) for n in range(count)]


def test_prompt_that_begins_like_an_earlier_one_is_computed_from_where_they_differ(play: Play) -> None:
    outcome = play(alike(2))
    first, second = outcome.ledger.entries
    assert first.ttft_s == PROMPT * 0.001 + 0.010
    assert second.ttft_s is not None and abs(second.ttft_s - (40 * 0.001 + 0.010)) < 1e-9
    assert outcome.prefix_hit_percent == round(100 * PREFIX_BLOCK_TOKENS / (2 * PROMPT), 3)


def test_nothing_is_shared_with_prefix_caching_off(play: Play) -> None:
    outcome = play(alike(2), enable_prefix_caching=False)
    assert [entry.ttft_s for entry in outcome.ledger.entries] == [outcome.ledger.entries[0].ttft_s] * 2
    assert outcome.prefix_hit_percent is None


def test_prompts_without_prefix_ids_have_nothing_in_common(play: Play) -> None:
    outcome = play([LoadRequest(n, n * 1.0, PROMPT, 30) for n in range(3)])
    assert outcome.prefix_hit_percent == 0


def test_waste_counts_a_shared_block_once(costs: CostModel, limits_of: Callable[..., SchedulerLimits]) -> None:
    limits = limits_of()
    pod = SimPod(PodShape(limits, 1000), costs, limits, lambda: 0.0, None)
    now_s = 0.0
    for request in alike(3):
        pod.offer(str(request.number), request, Entry(request, LatencyHistogram()))
        for _ in range(3):
            end_s = pod.try_begin_step(now_s)
            assert end_s is not None
            pod.end_step()
            now_s = end_s
    # Mid-step, as a scrape sees it: every known token has its slot.
    pod.try_begin_step(now_s)
    filled: dict[int, int] = {}
    for request in pod.scheduler.running:
        for index, block_id in enumerate(request.blocks.block_ids):
            filled[block_id] = min(16, request.num_tokens - 16 * index)
    point = SeriesPoint.of(now_s, [pod])
    assert point.num_slots_used == 16 * len(filled)
    assert point.num_slots_unfilled == 16 * len(filled) - sum(filled.values())
    num_shared = PREFIX_BLOCK_TOKENS // 16
    assert len(filled) < sum(len(request.blocks.block_ids) for request in pod.scheduler.running) - num_shared


def test_waste_of_a_fleet_that_shares_is_a_share(play: Play) -> None:
    outcome = play(alike(30, gap_s=0.05), scrape_interval_s=0.1)
    waste = outcome.series.kv_waste_percent()
    assert waste is not None and 0 < waste < 10
