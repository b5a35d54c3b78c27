"""The rules of arXiv:2503.05248, by hand."""

import pytest

from guidevane_runtime.core.batch_bounds import Bounds, LatencySearch, least_known, memory_aware_cap
from guidevane_runtime.core.messages import EngineStats

BOUNDS = Bounds(1, 256)


def stats(*, running: int = 10, waiting: int = 5, used: int = 100, total: int = 1000) -> EngineStats:
    return EngineStats(num_running=running, num_waiting=waiting, num_blocks_used=used, num_blocks_total=total)


def test_memory_rule_fills_95_percent_with_sequences_as_large_as_those_that_run() -> None:
    # 10 blocks each, 950 blocks to fill.
    assert memory_aware_cap(stats(), None, BOUNDS) == 95
    # 14.29 blocks each: 66.5 is cut to 66.
    assert memory_aware_cap(stats(running=7), None, BOUNDS) == 66


def test_memory_rule_never_asks_for_fewer_than_run() -> None:
    assert memory_aware_cap(stats(running=50, used=990), None, BOUNDS) == 50


def test_memory_rule_stays_in_its_bounds() -> None:
    assert memory_aware_cap(stats(), None, Bounds(1, 64)) == 64
    assert memory_aware_cap(stats(running=1, used=900), None, Bounds(8, 64)) == 8


@pytest.mark.parametrize("missing", [{"waiting": 0}, {"running": 0}, {"used": 0}])
def test_memory_rule_says_what_it_said_while_nothing_waits_or_nothing_runs(missing: dict[str, int]) -> None:
    assert memory_aware_cap(stats(**missing), 42, BOUNDS) == 42
    assert memory_aware_cap(stats(**missing), None, BOUNDS) is None


@pytest.fixture
def search() -> LatencySearch:
    return LatencySearch.over(Bounds(1, 101), 50.0)


def test_latency_rule_starts_in_the_middle(search: LatencySearch) -> None:
    assert (search.low, search.high, search.cap) == (1, 101, 51)


def test_latency_over_its_target_halves_the_search_from_above(search: LatencySearch) -> None:
    after = search.after(80.0, 51)
    assert (after.low, after.high, after.cap) == (1, 51, 26)


def test_latency_under_its_target_halves_the_search_from_below(search: LatencySearch) -> None:
    after = search.after(20.0, 51)
    assert (after.low, after.high, after.cap) == (51, 101, 76)


def test_latency_near_its_target_keeps_the_batch_that_had_it(search: LatencySearch) -> None:
    for latency_ms in (41.0, 50.0, 59.0):
        assert search.after(latency_ms, 70).cap == 70


def test_latency_rule_learns_nothing_from_silence_or_an_empty_batch(search: LatencySearch) -> None:
    assert search.after(None, 51) is search
    assert search.after(80.0, 0) is search


def test_bound_that_was_narrowed_gives_way_again(search: LatencySearch) -> None:
    """What was too much once may fit now: the search is for noise that drifts."""
    narrowed = search.after(80.0, 30)
    assert narrowed.high == 30
    for _ in range(20):
        narrowed = narrowed.after(20.0, narrowed.cap)
    assert narrowed.high == 101


def test_latency_rule_finds_the_batch_that_has_the_target(search: LatencySearch) -> None:
    """A step of 10 ms and 1 ms for each request: 40 of them take 50 ms, 20 % of tolerance are 30 to 50."""
    for _ in range(30):
        search = search.after(10.0 + search.cap, search.cap)
    assert 30 <= search.cap <= 50


def test_both_rules_at_once_are_the_smaller_known_cap() -> None:
    assert least_known(7, 5) == 5
    assert least_known(None, 9) == 9
    assert least_known(None, None) is None


def test_small_batch_near_the_target_teaches_nothing_about_larger_ones(search: LatencySearch) -> None:
    grown = search.after(20.0, 80)
    assert grown.low == 80
    assert grown.after(50.0, 3) is grown
