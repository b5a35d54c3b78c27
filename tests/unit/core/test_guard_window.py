import pytest

from guidevane_runtime.core.guard_window import MeanWindow, QuantileWindow


def p95() -> QuantileWindow:
    return QuantileWindow(10.0, 10, 0.95)


def test_a_quantile_is_right_within_a_percent() -> None:
    window = p95()
    for value in range(1, 1001):
        window.add(5.0, float(value))
    assert window.value(5.0) == pytest.approx(950, rel=0.01)


def test_the_p95_of_ten_is_the_largest() -> None:
    window = p95()
    for value in range(1, 11):
        window.add(5.0, float(value))
    assert window.value(5.0) == pytest.approx(10, rel=0.01)


@pytest.mark.parametrize(("num_slow", "is_seen"), [(4, False), (5, False), (6, True)])
def test_more_than_one_in_twenty_shows_in_the_p95(num_slow: int, is_seen: bool) -> None:
    window = p95()
    for i in range(100):
        window.add(5.0, 1000.0 if i < num_slow else 10.0)
    value = window.value(5.0)
    assert value is not None and (value > 900) == is_seen


def test_a_window_slides() -> None:
    window = p95()
    for _ in range(100):
        window.add(5.0, 1000.0)
    for i in range(100):
        window.add(12.0, 10.0 + i / 100)
    assert window.value(14.9) == pytest.approx(1000, rel=0.01)
    assert window.value(15.0) == pytest.approx(11, rel=0.02)


@pytest.mark.parametrize("window", [p95(), MeanWindow(10.0, 10)])
def test_an_idle_window_knows_nothing(window: MeanWindow | QuantileWindow) -> None:
    assert window.value(1.0) is None
    for _ in range(9):
        window.add(1.0, 3.0)
    assert window.value(1.0) is None
    window.add(1.0, 3.0)
    assert window.value(1.0) == pytest.approx(3.0, rel=0.01)
    assert window.value(100.0) is None


def test_a_mean_of_refused_and_let_in_is_a_rate() -> None:
    window = MeanWindow(10.0, 1)
    for value in (0.0, 0.0, 0.0, 100.0):
        window.add(2.0, value)
    assert window.value(2.0) == 25.0


def test_a_late_sample_counts_and_zero_is_a_value() -> None:
    window = QuantileWindow(10.0, 1, 0.95)
    window.add(50.0, 0.0)
    window.add(41.0, 0.0)
    value = window.value(50.0)
    assert value is not None and 0 <= value < 0.001


def test_memory_is_bounded_by_the_range_of_values_not_by_their_number() -> None:
    window = p95()
    for i in range(20_000):
        window.add(i / 100, 1.0 + i % 100_000)
    assert sum(len(bucket.classes) for bucket in window._buckets) < 6000
