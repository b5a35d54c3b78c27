"""Controllers by the rules of arXiv:2503.05248: what they see of a fleet, and what they order."""

from collections.abc import Callable

import pytest

from guidevane_api.limits import SchedulerLimits
from guidevane_bench.__main__ import main
from guidevane_bench.simulator.batch_control import CONTROLLERS, BatchController
from guidevane_bench.simulator.control import FleetSample, LimitsOrder, PodSample
from guidevane_bench.simulator.fleet import Outcome
from guidevane_bench.simulator.ledger import PodMeter
from guidevane_bench.workload.request import LoadRequest
from guidevane_runtime.core.messages import EngineStats

LimitsOf = Callable[..., SchedulerLimits]


def pod(
    number: int = 0, *, running: int = 10, waiting: int = 5, used: int = 100, itl_s: float | None = None
) -> PodSample:
    stats = EngineStats(num_running=running, num_waiting=waiting, num_blocks_used=used, num_blocks_total=1000)
    meter = PodMeter()
    if itl_s is not None:
        meter.itl.add(itl_s)
    return PodSample(number, stats, meter, num_ended=0)


@pytest.fixture
def sample(limits_of: LimitsOf) -> Callable[..., FleetSample]:
    return lambda *pods: FleetSample(10.0, limits_of(max_num_seqs=256), pods)


def ordered(order: LimitsOrder | None) -> int | None:
    return None if order is None else order.limits.max_num_seqs


def test_memory_rule_orders_the_cap_of_the_pod_that_has_least_room(sample: Callable[..., FleetSample]) -> None:
    controller = BatchController(by_memory=True)
    assert ordered(controller.decide(sample(pod(0), pod(1, used=200)))) == 47


def test_nothing_is_ordered_while_nothing_is_known(sample: Callable[..., FleetSample]) -> None:
    controller = BatchController(by_memory=True)
    assert controller.decide(sample(pod(waiting=0), None)) is None


def test_what_was_known_of_a_pod_holds_while_it_is_hidden_only_for_those_that_are_seen(
    sample: Callable[..., FleetSample],
) -> None:
    controller = BatchController(by_memory=True)
    controller.decide(sample(pod(0), pod(1, used=200)))
    assert ordered(controller.decide(sample(pod(0, waiting=0), None))) == 95


def test_latency_rule_hears_the_mean_gap_and_calls_over_only_what_is_over_the_slo(
    sample: Callable[..., FleetSample],
) -> None:
    controller = BatchController(itl_ms=50.0)
    assert ordered(controller.decide(sample(pod(running=100, itl_s=0.0499)))) == 100
    assert (ordered(controller.decide(sample(pod(running=100, itl_s=0.0501)))) or 999) < 100


def test_both_rules_at_once_take_the_smaller_cap(sample: Callable[..., FleetSample]) -> None:
    """Memory says 95; latency 64 at first, halfway from 1 to 128 of a batch of 128 that is too slow."""
    both = BatchController(itl_ms=50.0, by_memory=True)
    assert ordered(both.decide(sample(pod(itl_s=0.010)))) == 95
    assert (ordered(both.decide(sample(pod(running=20, used=200, itl_s=0.200)))) or 999) < 95


def test_order_that_changes_nothing_is_not_given(sample: Callable[..., FleetSample], limits_of: LimitsOf) -> None:
    controller = BatchController(by_memory=True)
    at_cap = FleetSample(10.0, limits_of(max_num_seqs=95), (pod(),))
    assert controller.decide(at_cap) is None


def test_memory_rule_preempts_less_than_a_fixed_limit_that_is_too_high(
    play: Callable[..., Outcome], limits_of: LimitsOf
) -> None:
    limits = limits_of(max_num_seqs=64, kv_cache_utilization_limit_percent=99)
    requests = [LoadRequest(n, 0.01 * n, 30, 200) for n in range(120)]
    fixed, ruled = (
        play(requests, limits=limits, num_blocks=120, is_optimistic=True, controller=controller, scrape_interval_s=0.2)
        for controller in (None, BatchController(by_memory=True))
    )
    assert 0 < ruled.num_scheduler_preemptions < fixed.num_scheduler_preemptions


def test_optimistic_admission_preempts_where_the_peak_estimate_waits(
    play: Callable[..., Outcome], limits_of: LimitsOf
) -> None:
    limits = limits_of(max_num_seqs=64, kv_cache_utilization_limit_percent=99)
    requests = [LoadRequest(n, 0.01 * n, 30, 200) for n in range(120)]
    careful, optimistic = (
        play(requests, limits=limits, num_blocks=120, is_optimistic=flag).num_scheduler_preemptions
        for flag in (False, True)
    )
    assert careful < optimistic


@pytest.mark.parametrize("name", CONTROLLERS)
def test_built_in_controller_is_found_by_its_name(name: str, data: object, trace: object) -> None:
    costs = f"{data}/costs_demo_cpu.json"
    options = ["--controller", name, "--admission", "optimistic", "--num-blocks", "200", "--scrape-interval", "1"]
    assert main(["simulate", "--trace", str(trace), "--limit", "20", "--costs", costs, *options]) == 0
