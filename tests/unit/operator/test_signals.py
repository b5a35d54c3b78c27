"""Signals: what a sample may mean, and what it may never be taken for."""

import dataclasses
import re
from typing import Any

import pytest

from guidevane_api.status import MetricsState
from guidevane_operator.prometheus import PLAIN_SIGNALS, QUANTILES, SAMPLES, Target, build_query, read_signals
from guidevane_operator.signals import (
    Absent,
    Invalid,
    Known,
    Partial,
    SignalHistory,
    Signals,
    Stale,
    guard_words,
    known_value,
)

TARGET = Target("demo", ("chat-0", "chat-1"), window_s=60, scrape_interval_s=15)
NOW = 1_000_000.0


def samples(ages: dict[str, float] | None = None, **values: Any) -> list[dict[str, Any]]:
    """A full answer, with some values set otherwise; None leaves one out."""
    calm = dict.fromkeys((*PLAIN_SIGNALS, *QUANTILES), 10.0) | {name + SAMPLES: 100.0 for name in QUANTILES}
    found = [
        {"metric": {"signal": name}, "value": [NOW, str(value)]}
        for name, value in (calm | values).items()
        if value is not None
    ]
    for pod, age in ({"chat-0": 3.0, "chat-1": 4.0} if ages is None else ages).items():
        found.append({"metric": {"signal": "scraped_at", "pod": pod}, "value": [NOW, str(NOW - age)]})
    return found


def test_fresh_samples_are_known_with_age_and_count() -> None:
    signals = read_signals(samples(ttft_p95_ms=840.0), TARGET)
    assert signals.state is MetricsState.KNOWN
    assert signals.ttft_p95_ms == Known(840.0, 4.0, 100.0)
    assert signals.kv_percent == Known(10.0, 4.0, None)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1"])
def test_a_value_that_cannot_be_one_is_invalid_and_not_zero(value: str) -> None:
    signals = read_signals(samples(kv_percent=value), TARGET)
    assert isinstance(signals.kv_percent, Invalid)
    assert known_value(signals.kv_percent) is None


def test_a_renamed_metric_is_absent_and_not_zero() -> None:
    signals = read_signals(samples(preemptions=None), TARGET)
    assert isinstance(signals.preemptions, Absent)
    assert known_value(signals.preemptions) is None


def test_a_quantile_without_observations_is_no_traffic() -> None:
    signals = read_signals(samples(ttft_p95_ms="NaN", **{"ttft_p95_ms" + SAMPLES: 0}), TARGET)
    assert signals.ttft_p95_ms == Absent("no traffic in the window")


def test_an_empty_answer_is_absent() -> None:
    signals = read_signals([], TARGET)
    assert (signals.state, signals.fresh_pods, signals.expected_pods) == (MetricsState.ABSENT, 0, 2)


def test_old_scrapes_are_stale() -> None:
    signals = read_signals(samples(ages={"chat-0": 600.0, "chat-1": 601.0}), TARGET)
    assert signals.state is MetricsState.STALE
    assert signals.kv_percent == Stale(601.0)


def test_a_missing_pod_makes_every_value_partial() -> None:
    signals = read_signals(samples(ages={"chat-0": 3.0}), TARGET)
    assert signals.state is MetricsState.PARTIAL
    assert signals.kv_percent == Partial(10.0, 1, 2)
    assert known_value(signals.kv_percent) is None


def test_lines_that_are_over_are_named_as_in_the_spec() -> None:
    over = [
        {"metric": {"signal": "guard_line", "line": line}, "value": [NOW, "1"]}
        for line in ("itl_p95_ms", "kv_cache_utilization_max", "of_a_later_release")
    ]
    signals = read_signals(samples(guard_level=2.0) + over, TARGET)
    assert signals.guard_lines == ("itlP95Milliseconds", "kvCacheUtilizationMaxPercent")
    assert guard_words(signals) == "level 2, over itlP95Milliseconds, kvCacheUtilizationMaxPercent"


def test_the_order_of_pods_does_not_matter() -> None:
    turned = dataclasses.replace(TARGET, pods=TARGET.pods[::-1])
    assert read_signals(samples(), TARGET) == read_signals(samples()[::-1], turned)
    assert build_query(TARGET) == build_query(turned)


@pytest.mark.parametrize("sample", [{}, {"metric": {}}, {"metric": {"signal": "x"}, "value": ["a", "b"]}, 7])
def test_samples_of_an_unknown_shape_are_absent(sample: Any) -> None:
    assert read_signals([sample], TARGET).state is MetricsState.ABSENT


def test_pod_names_are_matched_exactly() -> None:
    query = build_query(dataclasses.replace(TARGET, pods=("chat.0",)))
    pattern = re.search(r'pod=~"([^"]*)"', query)
    assert pattern is not None
    expression = pattern.group(1).replace("\\\\", "\\")
    assert re.fullmatch(expression, "chat.0")
    assert not re.fullmatch(expression, "chatx0")


def test_too_few_samples_have_no_value() -> None:
    assert known_value(Known(5.0, 1.0, 29), 30) is None
    assert known_value(Known(5.0, 1.0, 30), 30) == 5.0
    assert known_value(Known(5.0), 30) == 5.0


def observe(history: SignalHistory, *states: MetricsState) -> list[MetricsState]:
    return [history.observe(Signals(state=state, expected_pods=1))[1] for state in states]


def test_one_lost_scrape_is_no_outage_and_one_good_one_no_recovery() -> None:
    known, absent = MetricsState.KNOWN, MetricsState.ABSENT
    history = SignalHistory()
    assert observe(history, known, absent, known) == [known, known, known]
    assert observe(history, absent, absent) == [known, MetricsState.STALE]
    assert observe(history, known, known) == [MetricsState.STALE, known]


def test_before_the_first_sample_there_is_nothing_to_lose() -> None:
    assert observe(SignalHistory(), MetricsState.ABSENT, MetricsState.ABSENT) == [MetricsState.ABSENT] * 2
