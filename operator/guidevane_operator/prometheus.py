"""Signals of a service from a Prometheus server: one instant query per observation.

All signals of one observation come from one query at one evaluation time, so they belong together, and ages are
differences on the server's own clock. The client knows PromQL and HTTP; it never decides anything.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from guidevane_api.status import MetricsState
from guidevane_operator.answers import TooLongError, read_body
from guidevane_operator.signals import Absent, Known, Partial, Signal, Signals, Stale, fault_of

MAX_AGE_SCRAPES = 3
"""A sample older than this many scrape intervals is stale."""


@dataclass(frozen=True)
class Target:
    """Whose signals to read, and over which times."""

    namespace: str
    pods: tuple[str, ...]
    """Names of the ready pods: every one of them must have given a sample."""
    window_s: int
    scrape_interval_s: int


class PrometheusError(Exception):
    """The server gave no usable answer: the message says what it gave."""


class PrometheusClient:
    """Reads signals over the HTTP API of one Prometheus server."""

    def __init__(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def observe(self, url: str, target: Target) -> Signals:
        """Signals of `target` now. Never raises for a server that is away or answers nonsense: that is a state."""
        expected = len(target.pods)
        if not expected:
            return Signals(why="no ready pod to observe")
        try:
            samples = await self._query(url, build_query(target))
        except PrometheusError as away:
            return Signals(why=str(away), unreachable=True, expected_pods=expected)
        return read_signals(samples, target)

    async def _query(self, url: str, query: str) -> list[Mapping[str, Any]]:
        """Samples of an instant vector."""
        endpoint = url.rstrip("/") + "/api/v1/query"
        try:
            async with self._session.post(endpoint, data={"query": query}, timeout=self._timeout) as response:
                if response.status != 200:
                    raise PrometheusError(f"Prometheus at {url} answered {response.status}")
                body = json.loads(await read_body(response))
        except TooLongError as error:
            raise PrometheusError(f"Prometheus at {url}: {error}") from error
        except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as error:
            raise PrometheusError(
                f"Prometheus at {url} gave no answer ({type(error).__name__}); check spec.monitoring.prometheusURL"
            ) from error
        try:
            if body["status"] != "success" or body["data"]["resultType"] != "vector":
                raise PrometheusError(f"Prometheus at {url} answered with {body['status']}, no vector")
            return list(body["data"]["result"])
        except (KeyError, TypeError) as error:
            raise PrometheusError(f"{url} answered something that is not the Prometheus API") from error


ONE_JOB = "max without (job, instance, endpoint, service)"
"""A pod that two jobs scrape must not count twice."""

SCRAPED_AT = "scraped_at"
"""Name of the per-pod signal that carries the time of the last scrape."""

GUARD_LINE = "guard_line"
"""Name of the signals, one a line, that say which protection lines are over."""
GUARD_LEVEL_METRIC = "guidevane_guard_level"
GUARD_LINE_METRIC = "guidevane_guard_line_breached"
SLO_FIELDS = {
    "ttft_p95_ms": "ttftP95Milliseconds",
    "itl_p95_ms": "itlP95Milliseconds",
    "queue_wait_p95_ms": "queueWaitP95Milliseconds",
    "kv_cache_utilization_max": "kvCacheUtilizationMaxPercent",
    "admission_reject_rate_max": "admissionRejectRateMaxPercent",
}
"""Protection lines as the runtime labels them -> fields of spec.slo."""

OFFLINE = "offline"
"""Class of requests that nobody waits for: their latencies are long by design, and break no SLO."""
AWAITED = f',class!="{OFFLINE}"'

GAUGE_FOR_FRESHNESS = "vllm:num_requests_running"
"""Present from a runtime's first scrape on, traffic or none."""


def build_query(target: Target) -> str:
    """One PromQL expression whose samples carry the label `signal`."""
    pods = "|".join(re.escape(pod).replace("\\", "\\\\") for pod in sorted(target.pods))
    selector = f'namespace="{target.namespace}",pod=~"{pods}"'
    window = f"[{target.window_s}s]"

    def increase(series: str, more: str = "") -> str:
        return f"sum({ONE_JOB} (increase({series}{{{selector}{more}}}{window})))"

    def quantile(q: str, histogram: str) -> str:
        rates = f"{ONE_JOB} (rate({histogram}_bucket{{{selector}{AWAITED}}}{window}))"
        return f"1000 * histogram_quantile({q}, sum by (le) ({rates}))"

    level = f"{GUARD_LEVEL_METRIC}{{{selector}}}"
    expressions = {
        SCRAPED_AT: f"max by (pod) (timestamp({GAUGE_FOR_FRESHNESS}{{{selector}}}))",
        "kv_percent": f"100 * max(vllm:kv_cache_usage_perc{{{selector}}})",
        "running_per_pod": f"avg(max by (pod) (max_over_time(vllm:num_requests_running{{{selector}}}{window})))",
        "waiting": f"sum(max by (pod) (max_over_time(vllm:num_requests_waiting{{{selector}}}{window})))",
        "preemptions": increase("vllm:num_preemptions_total"),
        "finished": increase("vllm:request_success_total", ',finished_reason=~"stop|length"'),
        "prompt_tokens": increase("vllm:prompt_tokens_total"),
        "generation_tokens": increase("vllm:generation_tokens_total"),
        # A pod that does not say its level is not at level 0.
        "guard_level": f"max({level}) and count(count by (pod) ({level})) == {len(target.pods)}",
        GUARD_LINE: f"max by (line) ({GUARD_LINE_METRIC}{{{selector}}}) > 0",
    }
    for name, (q, histogram) in QUANTILES.items():
        expressions[name] = quantile(q, histogram)
        expressions[name + SAMPLES] = increase(histogram + "_count", AWAITED)
    return " or ".join(f'label_replace({body}, "signal", "{name}", "", "")' for name, body in expressions.items())


QUANTILES = {
    "ttft_p95_ms": ("0.95", "vllm:time_to_first_token_seconds"),
    "itl_p95_ms": ("0.95", "vllm:inter_token_latency_seconds"),
    "itl_p99_ms": ("0.99", "vllm:inter_token_latency_seconds"),
    "queue_wait_p95_ms": ("0.95", "vllm:request_queue_time_seconds"),
}
"""Signal -> (quantile, histogram). Taken from histograms merged over pods, never an average of quantiles."""

SAMPLES = ":samples"
"""Suffix of the helper signal that counts the observations behind a quantile."""

PLAIN_SIGNALS = (
    "kv_percent",
    "running_per_pod",
    "waiting",
    "preemptions",
    "finished",
    "prompt_tokens",
    "generation_tokens",
    "guard_level",
)


def read_signals(samples: Iterable[Mapping[str, Any]], target: Target) -> Signals:
    """Turn the samples of `build_query` into typed signals."""
    try:
        values, ages, lines = _sort_samples(samples)
    except (KeyError, IndexError, TypeError, ValueError):
        return Signals(why="Prometheus answered samples of an unknown shape", expected_pods=len(target.pods))
    expected = len(target.pods)
    max_age_s = MAX_AGE_SCRAPES * target.scrape_interval_s
    fresh = sum(1 for pod in target.pods if ages.get(pod, math.inf) <= max_age_s)
    state, why = _state(fresh, expected, ages, max_age_s)
    age_s = max(ages.values(), default=0.0)

    def typed(name: str, count: float | None = None) -> Signal:
        return _typed(name, values.get(name), count, state, age_s, fresh, expected)

    signals: dict[str, Any] = {name: typed(name) for name in PLAIN_SIGNALS}
    for name in QUANTILES:
        count = values.get(name + SAMPLES)
        if count is None:
            signals[name] = Absent(f"no series for the count of {name}")
        elif count == 0:
            signals[name] = Absent("no traffic in the window")
        else:
            signals[name] = fault_of(f"the count of {name}", count) or typed(name, count)
    return Signals(
        state=state, why=why, fresh_pods=fresh, expected_pods=expected, guard_lines=slo_fields(lines), **signals
    )


def slo_fields(lines: Iterable[str]) -> tuple[str, ...]:
    """Fields of spec.slo for lines as the runtime labels them, in a fixed order; one that is not known is left out."""
    over = set(lines)
    return tuple(field for label, field in SLO_FIELDS.items() if label in over)


def _sort_samples(samples: Iterable[Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, float], set[str]]:
    """Values by signal, scrape ages in seconds by pod, and the protection lines that are over."""
    values: dict[str, float] = {}
    ages: dict[str, float] = {}
    lines: set[str] = set()
    for sample in samples:
        evaluated_at, value = float(sample["value"][0]), float(sample["value"][1])
        name = sample["metric"]["signal"]
        if name == SCRAPED_AT:
            age_s = evaluated_at - value
            ages[sample["metric"]["pod"]] = max(0.0, age_s) if math.isfinite(age_s) else math.inf
        elif name == GUARD_LINE:
            lines.add(sample["metric"]["line"])
        else:
            values[name] = value
    return values, ages, lines


def _state(fresh: int, expected: int, ages: Mapping[str, float], max_age_s: float) -> tuple[MetricsState, str]:
    """State of the whole observation from the freshness of the pods' scrapes."""
    if fresh == expected:
        return MetricsState.KNOWN, ""
    if fresh:
        return MetricsState.PARTIAL, f"{fresh} of {expected} ready pods gave a sample in the last {max_age_s:.0f} s"
    if ages:
        return MetricsState.STALE, f"the newest sample is {min(ages.values()):.0f} s old, limit {max_age_s:.0f} s"
    return MetricsState.ABSENT, f"Prometheus has no series of the {expected} ready pods; check its scrape targets"


def _typed(
    name: str, value: float | None, count: float | None, state: MetricsState, age_s: float, fresh: int, expected: int
) -> Signal:
    """One signal: its own fault first, then the state of the observation it comes from."""
    if value is None:
        return Absent(f"no series for {name}")
    fault = fault_of(name, value)
    if fault is not None:
        return fault
    if state is MetricsState.STALE or state is MetricsState.ABSENT:
        return Stale(age_s)
    if state is MetricsState.PARTIAL:
        return Partial(value, fresh, expected)
    return Known(value, age_s, count)
