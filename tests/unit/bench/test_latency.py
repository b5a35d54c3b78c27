import pytest
from hypothesis import given
from hypothesis import strategies as st

from guidevane_bench.report.latency import GROWTH, LatencyHistogram


def histogram_of(values: list[float]) -> LatencyHistogram:
    histogram = LatencyHistogram()
    for value in values:
        histogram.add(value)
    return histogram


@given(st.lists(st.floats(1e-5, 1e4), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_quantile_is_the_sample_of_that_rank_within_a_bucket(values: list[float], share: float) -> None:
    exact = sorted(values)[max(0, -(-share * len(values) // 1) - 1).__trunc__()]
    assert histogram_of(values).quantile(share) == pytest.approx(exact, rel=GROWTH - 1)


@given(st.lists(st.floats(0, 1e4)), st.lists(st.floats(0, 1e4)))
def test_merged_histograms_say_what_one_histogram_of_all_says(left: list[float], right: list[float]) -> None:
    merged = histogram_of(left)
    merged.merge(histogram_of(right))
    together = histogram_of(left + right)
    assert merged.curve() == together.curve()
    assert merged.summary()["p95_ms"] == together.summary()["p95_ms"]


def test_no_sample_is_no_number() -> None:
    assert LatencyHistogram().summary() == {
        "num_samples": 0,
        "mean_ms": None,
        "p50_ms": None,
        "p95_ms": None,
        "p99_ms": None,
        "max_ms": None,
    }


def test_nothing_is_reported_above_the_largest_sample() -> None:
    values = [0.01 * 1.0005**n for n in range(20)]
    assert all((histogram_of([value]).quantile(0.5) or 0) <= value for value in values)
