"""Signals from the pods' own expositions: the same meaning as from Prometheus."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from guidevane_api.status import MetricsState
from guidevane_operator.pod_metrics import PodRing, quantile, read_scrape, signals_of
from guidevane_operator.signals import Absent, Known, Partial

WINDOW_S = 60.0


class Pod:
    """A pod's metrics, and the ring of what was scraped from it."""

    def __init__(self) -> None:
        self.ring, self.now_s = PodRing(), 0.0
        self.restart()

    def restart(self) -> None:
        self.registry = CollectorRegistry()
        self.kv = Gauge("vllm:kv_cache_usage_perc", "-", registry=self.registry)
        self.running = Gauge("vllm:num_requests_running", "-", registry=self.registry)
        self.waiting = Gauge("vllm:num_requests_waiting", "-", registry=self.registry)
        self.preemptions = Counter("vllm:num_preemptions", "-", registry=self.registry)
        self.success = Counter("vllm:request_success", "-", ("finished_reason",), registry=self.registry)
        self.prompt = Counter("vllm:prompt_tokens", "-", registry=self.registry)
        self.generated = Counter("vllm:generation_tokens", "-", registry=self.registry)
        buckets = (0.1, 0.5, 1.0)
        by_class = Histogram(
            "vllm:time_to_first_token_seconds", "-", ("class",), registry=self.registry, buckets=buckets
        )
        self.ttft, self.offline_ttft = by_class.labels("interactive"), by_class.labels("offline")
        self.itl = Histogram("vllm:inter_token_latency_seconds", "-", registry=self.registry, buckets=buckets)
        self.queue = Histogram("vllm:request_queue_time_seconds", "-", registry=self.registry, buckets=buckets)
        self.over = Gauge("guidevane_guard_line_breached", "-", ("line",), registry=self.registry)

    def say_level(self, level: int, *over: str) -> None:
        """What the guard exports; a runtime without one says nothing."""
        if not hasattr(self, "level"):
            self.level = Gauge("guidevane_guard_level", "-", registry=self.registry)
        self.level.set(level)
        for line in ("ttft_p95_ms", "itl_p95_ms"):
            self.over.labels(line).set(line in over)

    def scrape(self, after_s: float = 15.0) -> None:
        self.now_s += after_s
        self.ring.add(read_scrape(generate_latest(self.registry).decode(), self.now_s), WINDOW_S)

    def serve(self, count: int, ttft_s: float = 0.3) -> None:
        for _ in range(count):
            self.success.labels("stop").inc()
            self.success.labels("abort").inc()
            self.ttft.observe(ttft_s)


def test_counts_are_those_of_the_window_and_of_answered_requests() -> None:
    pod = Pod()
    pod.serve(100)
    pod.scrape()
    pod.serve(7)
    pod.scrape()
    signals = signals_of([pod.ring], 1)
    assert signals.state is MetricsState.KNOWN
    assert signals.finished == Known(7.0, 0.0, None)
    assert isinstance(signals.ttft_p95_ms, Known)
    assert signals.ttft_p95_ms.samples == 7
    assert 100 < signals.ttft_p95_ms.value <= 500


def test_waits_of_offline_work_break_no_slo() -> None:
    pod = Pod()
    pod.scrape()
    pod.serve(10, ttft_s=0.05)
    for _ in range(90):
        pod.offline_ttft.observe(0.9)
    pod.scrape()
    ttft = signals_of([pod.ring], 1).ttft_p95_ms
    assert isinstance(ttft, Known)
    assert (ttft.samples, ttft.value <= 100) == (10, True)


def test_what_is_older_than_the_window_no_longer_counts() -> None:
    pod = Pod()
    pod.scrape()
    pod.serve(50, ttft_s=0.9)
    for _ in range(6):
        pod.scrape()
    signals = signals_of([pod.ring], 1)
    assert signals.finished == Known(0.0, 0.0, None)
    assert signals.ttft_p95_ms == Absent("no traffic in the window")


def test_a_restart_starts_the_window_afresh() -> None:
    pod = Pod()
    pod.serve(1000)
    pod.scrape()
    pod.restart()
    pod.serve(3)
    pod.scrape()
    assert isinstance(signals_of([pod.ring], 1).finished, Absent), "one scrape of this life tells no rate"
    pod.serve(4)
    pod.scrape()
    assert signals_of([pod.ring], 1).finished == Known(4.0, 0.0, None)


def test_a_restart_shows_although_every_counter_is_past_its_old_value() -> None:
    pod = Pod()
    pod.serve(5, ttft_s=0.05)
    pod.scrape()
    pod.restart()
    pod.serve(6, ttft_s=0.9)
    pod.scrape()
    assert isinstance(signals_of([pod.ring], 1).finished, Absent)
    assert isinstance(signals_of([pod.ring], 1).ttft_p95_ms, Absent)


def test_gauges_are_highest_cache_mean_of_running_peaks_and_sum_of_waiting_peaks() -> None:
    pods = Pod(), Pod()
    for pod, (kv, running, waiting) in zip(pods, ((0.2, 6, 3), (0.8, 2, 1)), strict=True):
        pod.kv.set(kv)
        pod.running.set(running)
        pod.waiting.set(waiting)
        pod.scrape()
        pod.running.set(0)
        pod.scrape()
    signals = signals_of([pod.ring for pod in pods], 2)
    assert signals.kv_percent == Known(pytest.approx(80.0), 0.0, None)
    assert signals.running_per_pod == Known(4.0, 0.0, None)
    assert signals.waiting == Known(4.0, 0.0, None)


def test_a_silent_pod_makes_everything_partial_and_no_pod_at_all_is_unreachable() -> None:
    pod = Pod()
    pod.scrape()
    some, none = signals_of([pod.ring], 2), signals_of([], 2)
    assert some.state is MetricsState.PARTIAL
    assert some.kv_percent == Partial(0.0, 1, 2)
    assert none.state is MetricsState.ABSENT
    assert none.unreachable


def test_the_guard_is_that_of_the_pod_that_gives_way_most_and_all_lines_that_are_over() -> None:
    pods = Pod(), Pod()
    for pod, (level, over) in zip(pods, ((1, "ttft_p95_ms"), (3, "itl_p95_ms")), strict=True):
        pod.say_level(5)
        pod.scrape()
        pod.say_level(level, over)
        pod.scrape()
    signals = signals_of([pod.ring for pod in pods], 2)
    assert signals.guard_level == Known(3.0, 0.0, None)
    assert signals.guard_lines == ("ttftP95Milliseconds", "itlP95Milliseconds")


def test_a_pod_that_does_not_say_its_level_is_not_at_level_0() -> None:
    silent, speaking = Pod(), Pod()
    speaking.say_level(0)
    for pod in (silent, speaking):
        pod.scrape()
    assert signals_of([speaking.ring], 1).guard_level == Known(0.0, 0.0, None)
    assert isinstance(signals_of([silent.ring, speaking.ring], 2).guard_level, Absent)


def test_html_is_no_exposition() -> None:
    with pytest.raises(ValueError, match="<html>"):
        read_scrape("<html><body>proxy error</body></html>", 0.0)


@pytest.mark.parametrize(
    ("q", "buckets", "expected"),
    [
        (0.5, {0.1: 10.0, 0.5: 10.0, math.inf: 10.0}, 0.05),
        (0.95, {0.1: 0.0, 0.5: 100.0, math.inf: 100.0}, 0.1 + 0.4 * 0.95),
        (0.99, {0.1: 0.0, 0.5: 50.0, math.inf: 100.0}, 0.5),
        (0.5, {0.1: 0.0, math.inf: 0.0}, None),
        (0.5, {}, None),
    ],
)
def test_quantiles_are_linear_inside_a_bucket_as_in_prometheus(
    q: float, buckets: dict[float, float], expected: float | None
) -> None:
    assert quantile(q, buckets) == (None if expected is None else pytest.approx(expected))


@given(st.lists(st.floats(0.001, 5.0), min_size=1, max_size=50), st.floats(0.01, 0.99))
def test_a_quantile_lies_in_the_bucket_of_the_exact_one(values: list[float], q: float) -> None:
    bounds = (0.1, 0.5, 1.0, 2.0, math.inf)
    buckets = {bound: float(sum(value <= bound for value in values)) for bound in bounds}
    exact = sorted(values)[math.ceil(q * len(values)) - 1]
    got = quantile(q, buckets)
    assert got is not None
    upper = next(bound for bound in bounds if exact <= bound)
    lower = max((bound for bound in bounds if bound < upper), default=0.0)
    assert lower <= got <= upper
