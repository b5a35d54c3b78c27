"""Signals of a service from its pods' own /metrics, for clusters without a Prometheus: a short ring of scrapes per pod.

The same signals as from Prometheus, under the same rules: counts are differences inside one life of a pod, quantiles
come from histograms merged over pods, and a pod that does not answer makes the whole observation partial.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from yarl import URL

from guidevane_api.status import MetricsState
from guidevane_operator.answers import read_body
from guidevane_operator.prometheus import GUARD_LEVEL_METRIC, GUARD_LINE_METRIC, OFFLINE, QUANTILES, Target, slo_fields
from guidevane_operator.signals import Absent, Known, Partial, Signal, Signals, fault_of

KV_USE, RUNNING, WAITING = "vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting"
GAUGES = (KV_USE, RUNNING, WAITING, GUARD_LEVEL_METRIC)
COUNTERS = {
    "preemptions": "vllm:num_preemptions_total",
    "finished": "vllm:request_success_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generation_tokens": "vllm:generation_tokens_total",
}
HISTOGRAMS = frozenset(histogram for _, histogram in QUANTILES.values())
FINISHED = ("stop", "length")
"""finished_reason of a request that was answered."""

Buckets = dict[float, float]
"""Upper bound in seconds -> observations up to it, cumulative."""


@dataclass(frozen=True)
class Scrape:
    """What one pod said at one moment, cut down to what signals need."""

    at_s: float
    gauges: Mapping[str, float]
    counters: Mapping[str, float]
    buckets: Mapping[str, Buckets]
    guard_lines: frozenset[str] = frozenset()
    """Protection lines that were over, as the runtime labels them."""

    def is_before(self, later: "Scrape") -> bool:
        """Whether `later` is of the same life of the pod: no counter and no bucket went back."""
        if any(later.counters.get(name, 0.0) < value for name, value in self.counters.items()):
            return False
        pairs = [(found, later.buckets.get(name, {})) for name, found in self.buckets.items()]
        return not any(after.get(bound, 0.0) < count for before, after in pairs for bound, count in before.items())


def read_scrape(text: str, at_s: float) -> Scrape:
    """Parse an exposition. Raises ValueError for text that is none."""
    gauges: dict[str, float] = {}
    counters: dict[str, float] = defaultdict(float)
    buckets: dict[str, Buckets] = defaultdict(lambda: defaultdict(float))
    lines: set[str] = set()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name
            if name in GAUGES:
                gauges[name] = _highest((gauges.get(name, sample.value), sample.value))
            elif name == GUARD_LINE_METRIC and sample.value > 0:
                if "line" not in sample.labels:
                    raise ValueError(f"{name} has no label: line")
                lines.add(sample.labels["line"])
            elif name in COUNTERS.values():
                if sample.labels.get("finished_reason", FINISHED[0]) in FINISHED:
                    counters[name] += sample.value
            elif name.removesuffix("_bucket") in HISTOGRAMS and "le" in sample.labels:
                is_awaited = sample.labels.get("class") != OFFLINE
                buckets[family.name][float(sample.labels["le"])] += sample.value if is_awaited else 0.0
    merged = {name: dict(found) for name, found in buckets.items()}
    return Scrape(at_s, gauges, dict(counters), merged, frozenset(lines))


@dataclass
class PodRing:
    """The scrapes of one pod that the window covers, and the one just before it."""

    scrapes: list[Scrape] = field(default_factory=list)

    def add(self, scrape: Scrape, window_s: float) -> None:
        """Take one in; forget what is out of the window, and everything before a restart."""
        if self.scrapes and not self.scrapes[-1].is_before(scrape):
            self.scrapes = []
        self.scrapes.append(scrape)
        while len(self.scrapes) > 2 and self.scrapes[1].at_s <= scrape.at_s - window_s:
            self.scrapes.pop(0)


class PodScraper:
    """Scrapes the pods of services directly."""

    def __init__(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def observe(
        self, rings: dict[str, PodRing], addresses: Mapping[str, str], port: int, target: Target, now_s: float
    ) -> Signals:
        """Scrape every pod of `addresses` (name -> IP) once, and read the signals of the window."""
        for name in set(rings) - set(addresses):
            del rings[name]
        texts = await asyncio.gather(*(self._fetch(address, port) for address in addresses.values()))
        fresh: list[PodRing] = []
        for name, text in zip(addresses, texts, strict=True):
            try:
                scrape = read_scrape(text, now_s) if text is not None else None
            except ValueError:
                scrape = None
            if scrape is not None and scrape.gauges:
                ring = rings.setdefault(name, PodRing())
                ring.add(scrape, target.window_s)
                fresh.append(ring)
        return signals_of(fresh, len(addresses))

    async def _fetch(self, address: str, port: int) -> str | None:
        """One exposition, None without an answer."""
        url = URL.build(scheme="http", host=address, port=port, path="/metrics")
        try:
            async with self._session.get(url, timeout=self._timeout, allow_redirects=False) as response:
                return (await read_body(response)).decode() if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError):
            return None


def signals_of(rings: list[PodRing], expected: int) -> Signals:
    """The signals of pods that just answered, out of `expected`."""
    if not rings:
        return Signals(why="no pod answers on /metrics", unreachable=True, expected_pods=expected)
    fresh = len(rings)

    def typed(name: str, value: float | None, samples: float | None = None) -> Signal:
        if value is None:
            return Absent("no such series yet")
        fault = fault_of(name, value)
        if fault is not None:
            return fault
        return Known(value, 0.0, samples) if fresh == expected else Partial(value, fresh, expected)

    quantiles: dict[str, Any] = {}
    for name, (q, histogram) in QUANTILES.items():
        merged = _merged_buckets(rings, histogram)
        count = _highest(merged.values()) if merged else 0.0
        value = quantile(float(q), merged) if count else None
        fault = fault_of(f"the count of {name}", count)
        absent = Absent("no traffic in the window")
        quantiles[name] = fault or (absent if value is None else typed(name, 1000 * value, count))
    kv, levels = _latest(rings, KV_USE), _latest(rings, GUARD_LEVEL_METRIC)
    running, waiting = _peaks(rings, RUNNING), _peaks(rings, WAITING)
    known = fresh == expected
    return Signals(
        state=MetricsState.KNOWN if known else MetricsState.PARTIAL,
        why="" if known else f"{fresh} of {expected} ready pods answer on /metrics",
        fresh_pods=fresh,
        expected_pods=expected,
        kv_percent=typed("kv_percent", 100 * _highest(kv) if kv else None),
        running_per_pod=typed("running_per_pod", sum(running) / len(running) if running else None),
        waiting=typed("waiting", sum(waiting) if waiting else None),
        preemptions=typed("preemptions", _increase(rings, "preemptions")),
        finished=typed("finished", _increase(rings, "finished")),
        prompt_tokens=typed("prompt_tokens", _increase(rings, "prompt_tokens")),
        generation_tokens=typed("generation_tokens", _increase(rings, "generation_tokens")),
        # A pod that does not say its level is not at level 0.
        guard_level=typed("guard_level", _highest(levels) if len(levels) == fresh else None),
        guard_lines=slo_fields(line for ring in rings for line in ring.scrapes[-1].guard_lines),
        **quantiles,
    )


def _latest(rings: list[PodRing], gauge: str) -> list[float]:
    """The newest value of a gauge, of each pod that has it."""
    return [ring.scrapes[-1].gauges[gauge] for ring in rings if gauge in ring.scrapes[-1].gauges]


def _peaks(rings: list[PodRing], gauge: str) -> list[float]:
    """Peak of a gauge in the window, of each pod that has it."""
    found = [[s.gauges[gauge] for s in ring.scrapes if gauge in s.gauges] for ring in rings]
    return [_highest(values) for values in found if values]


def _highest(values: Iterable[float]) -> float:
    """The highest of some values; one that is no number is not hidden by the others."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found)


def _increase(rings: list[PodRing], signal: str) -> float | None:
    """Growth of a counter over the window, all pods; None until every pod was scraped twice."""
    name = COUNTERS[signal]
    if any(len(ring.scrapes) < 2 or name not in ring.scrapes[-1].counters for ring in rings):
        return None
    return sum(ring.scrapes[-1].counters[name] - ring.scrapes[0].counters.get(name, 0.0) for ring in rings)


def _merged_buckets(rings: list[PodRing], histogram: str) -> Buckets:
    """Observations of the window, all pods together."""
    merged: Buckets = defaultdict(float)
    for ring in rings:
        first, last = ring.scrapes[0].buckets.get(histogram, {}), ring.scrapes[-1].buckets.get(histogram, {})
        if len(ring.scrapes) >= 2:
            for bound, count in last.items():
                merged[bound] += count - first.get(bound, 0.0)
    return dict(merged)


def quantile(q: float, buckets: Buckets) -> float | None:
    """Quantile of cumulative buckets in seconds, linear inside a bucket as Prometheus has it; None if they are empty.

    In the bucket without an upper bound it is the highest bound there is.
    """
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if total <= 0:
        return None
    rank, lower, below = q * total, 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= rank and buckets[bound] > below:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * (rank - below) / (buckets[bound] - below)
        lower, below = bound, buckets[bound]
    return lower
