"""arXiv:2503.05248 for any input: in bounds, monotone, never a division by nothing."""

from hypothesis import given
from hypothesis import strategies as st

from guidevane_runtime.core.batch_bounds import Bounds, LatencySearch, memory_aware_cap
from guidevane_runtime.core.messages import EngineStats

counts = st.integers(0, 10_000)
bounds = st.tuples(st.integers(1, 500), st.integers(0, 500)).map(lambda pair: Bounds(pair[0], pair[0] + pair[1]))
latencies = st.none() | st.floats(0, 1e6, allow_nan=False)


@st.composite
def engine_stats(draw: st.DrawFn) -> EngineStats:
    total = draw(counts)
    return EngineStats(
        num_running=draw(counts),
        num_waiting=draw(counts),
        num_blocks_total=total,
        num_blocks_used=draw(st.integers(0, total)),
    )


@given(engine_stats(), bounds)
def test_memory_rule_is_unknown_or_in_its_bounds(stats: EngineStats, limits: Bounds) -> None:
    cap = memory_aware_cap(stats, None, limits)
    is_known = bool(stats.num_waiting and stats.num_running and stats.num_blocks_used)
    assert (cap is not None) == is_known
    assert cap is None or limits.lower <= cap <= limits.upper


@given(engine_stats(), bounds, st.integers(1, 5000))
def test_more_blocks_in_use_by_as_many_never_raise_the_memory_cap(
    stats: EngineStats, limits: Bounds, more: int
) -> None:
    fuller = EngineStats(
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_blocks_total=stats.num_blocks_total,
        num_blocks_used=stats.num_blocks_used + more,
    )
    before, after = memory_aware_cap(stats, None, limits), memory_aware_cap(fuller, None, limits)
    assert before is None or after is None or after <= before


@given(bounds, st.lists(st.tuples(latencies, st.integers(0, 1000)), max_size=30))
def test_latency_rule_stays_in_its_bounds_whatever_it_is_told(
    limits: Bounds, looks: list[tuple[float | None, int]]
) -> None:
    search = LatencySearch.over(limits, 50.0)
    for latency_ms, num_running in looks:
        search = search.after(latency_ms, num_running)
        assert limits.lower <= search.low <= search.cap <= search.high <= limits.upper


@given(bounds, st.lists(st.tuples(latencies, st.integers(0, 1000)), max_size=10), st.integers(1, 1000))
def test_latency_over_never_raises_the_cap_and_under_never_lowers_it(
    limits: Bounds, looks: list[tuple[float | None, int]], num_running: int
) -> None:
    search = LatencySearch.over(limits, 50.0)
    for look in looks:
        search = search.after(*look)
    assert search.after(1000.0, num_running).cap <= search.cap
    assert search.after(1.0, num_running).cap >= search.cap
