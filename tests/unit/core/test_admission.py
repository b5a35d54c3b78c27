import pytest
from hypothesis import given
from hypothesis import strategies as st

from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.admission import MemoryGate, Need, Needs, OutputForecast, kv_limit_blocks
from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.messages import SamplingParams, Submit
from guidevane_runtime.core.request import Request


def test_without_a_past_a_chat_answer_is_expected() -> None:
    forecast = OutputForecast()
    assert [forecast.num_more_tokens(n) for n in (0, 100, 255)] == [256, 156, 255]


def test_what_nobody_reached_is_expected_to_double() -> None:
    forecast = OutputForecast()
    forecast.record(10)
    assert forecast.num_more_tokens(1000) == 1000


def test_the_forecast_is_the_upper_end_of_those_that_got_longer() -> None:
    forecast = OutputForecast()
    for num_tokens in range(1, 101):
        forecast.record(num_tokens)
    assert forecast.num_more_tokens(0) == 90
    assert forecast.num_more_tokens(80) == 98 - 80


def test_the_forecast_forgets() -> None:
    forecast = OutputForecast()
    for num_tokens in [5000] * 10 + [20] * forecast.WINDOW:
        forecast.record(num_tokens)
    assert forecast.num_more_tokens(0) == 20


def test_the_forecast_remembers_as_many_as_its_window_holds() -> None:
    forecast = OutputForecast()
    for num_tokens in [5000] + [20] * (forecast.WINDOW - 1):
        forecast.record(num_tokens)
    remembered = forecast.num_more_tokens(20)
    forecast.record(20)
    assert (remembered, forecast.num_more_tokens(20)) == (4980, 236)


@pytest.mark.parametrize(("num_blocks", "percent", "limit"), [(10, 1, 1), (10, 55, 5), (10, 100, 10), (300, 1, 3)])
def test_the_kv_limit_is_in_whole_blocks_and_never_nothing(num_blocks: int, percent: int, limit: int) -> None:
    limits = SchedulerLimits(kv_cache_utilization_limit_percent=percent)
    assert kv_limit_blocks(BlockPool(num_blocks, 4), limits) == limit


def gate_beside_one_running(num_blocks: int, num_preemptions: int) -> bool:
    """10 prompt tokens each, up to 100 in all; the past says that outputs have 2 tokens."""
    pool, forecast = BlockPool(num_blocks, 1), OutputForecast()
    forecast.record(2)
    params = SamplingParams(max_tokens=90, seed=0)
    running, candidate = (
        Request(Submit(name, tuple(range(10)), params, arrival_s=0.0), max_num_tokens=100, blocks=pool.table())
        for name in "ab"
    )
    running.blocks.try_grow_to(10)
    candidate.num_preemptions = num_preemptions
    limits = SchedulerLimits(kv_cache_utilization_limit_percent=100)
    return MemoryGate(pool, limits, forecast, [running]).held(candidate) is None


@pytest.mark.parametrize(("num_preemptions", "peak"), [(0, 24), (1, 28), (2, 36), (3, 200)])
def test_each_preemption_makes_the_return_safer(num_preemptions: int, peak: int) -> None:
    """Twice the forecast, four times, and then all that both could ever need."""
    assert gate_beside_one_running(peak, num_preemptions)
    assert not gate_beside_one_running(peak - 1, num_preemptions)


def test_the_peak_is_when_the_shorter_one_ends() -> None:
    """LightLLM's estimate: they don't all hold their maximum at once."""
    pool, forecast = BlockPool(1000, 1), OutputForecast()
    for num_tokens in (10, 50):
        forecast.record(num_tokens)
    params = SamplingParams(max_tokens=500, seed=0)
    old, new = (
        Request(Submit(name, (1,), params, arrival_s=0.0), max_num_tokens=bound, blocks=pool.table())
        for name, bound in (("old", 41), ("new", 6))
    )
    # held 1 + 1, left 10 (the forecast) and 5 (its bound): 2 * 5 + 2 when `new` ends, 10 + 1 when `old` does.
    for percent, fits in ((12, True), (11, False)):
        limits = SchedulerLimits(kv_cache_utilization_limit_percent=percent)
        assert (MemoryGate(BlockPool(100, 1), limits, forecast, [old]).held(new) is None) == fits


@pytest.mark.parametrize(("num_preemptions", "fits"), [(2, True), (3, False)])
def test_from_the_third_preemption_on_the_peak_is_of_all_that_could_ever_be_needed(
    num_preemptions: int, fits: bool
) -> None:
    """40 + 1 tokens are expected of `old` by four times the forecast; 41 and 6 could be needed."""
    pool, forecast = BlockPool(100, 1), OutputForecast()
    for num_tokens in (10, 50):
        forecast.record(num_tokens)
    params = SamplingParams(max_tokens=500, seed=0)
    old, new = (
        Request(Submit(name, (1,), params, arrival_s=0.0), max_num_tokens=bound, blocks=pool.table())
        for name, bound in (("old", 41), ("new", 6))
    )
    new.num_preemptions = num_preemptions
    limits = SchedulerLimits(kv_cache_utilization_limit_percent=41)
    assert (MemoryGate(pool, limits, forecast, [old]).held(new) is None) == fits


LENGTHS = st.tuples(st.integers(0, 500), st.integers(1, 500))


@given(st.lists(LENGTHS, max_size=8), st.lists(LENGTHS, min_size=1, max_size=4))
def test_all_needs_at_once_are_never_less_than_their_peak(inside: list[Need], candidates: list[Need]) -> None:
    """Who fits even so is let in without a look at the peak."""
    needs = Needs(inside)
    for candidate in candidates:
        lengths = sorted([*inside, candidate], reverse=True)
        peak = max(left * (i + 1) + sum(held for _, held in lengths[: i + 1]) for i, (left, _) in enumerate(lengths))
        assert needs.peak(candidate) == peak <= needs.all_at_once(candidate)
        needs.add(candidate)
        inside = [*inside, candidate]
