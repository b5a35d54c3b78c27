"""The guidevane_tenant_* families. Labels are few: tenants that are listed, and those that still have something here.

What a tenant has inside is read from the door's leases when somebody asks; what it had so far is counted here.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from guidevane_runtime.core.door import Rejection
from guidevane_runtime.core.leases import Occupancy

OWN_CAPS = (Rejection.TENANT_CONCURRENCY, Rejection.TENANT_TOKENS)
"""Reasons whose series are there from the start; others come with the first refusal."""


@dataclass(slots=True)
class TenantTotals:
    """Of one tenant, since it was listed or first came."""

    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    rejections: Counter[Rejection] = field(default_factory=lambda: Counter(dict.fromkeys(OWN_CAPS, 0)))


class TenantMetrics(Collector):
    """One sample per tenant and family, made at each scrape."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._totals: dict[str, TenantTotals] = {}
        self.listed: Callable[[], Iterable[str]] = lambda: ()
        """Names of the tenants file, or the one tenant of a server without one."""
        self.uses: Callable[[], Mapping[str, Occupancy]] = dict
        """What those have inside that have something there."""

    def totals(self, tenant: str) -> TenantTotals:
        return self._totals.setdefault(tenant, TenantTotals())

    def collect(self) -> Iterator[Metric]:
        """A tenant that is listed no more is gone with its last request."""
        uses = self.uses()
        shown = sorted({*self.listed(), *uses})
        self._totals = {tenant: self.totals(tenant) for tenant in shown}
        held = {tenant: uses.get(tenant, Occupancy()) for tenant in shown}
        yield self._gauge(
            "guidevane_tenant_requests_in_flight",
            "Requests between the door and their end.",
            {tenant: one.num_live for tenant, one in held.items()},
        )
        yield self._gauge(
            "guidevane_tenant_queued_tokens",
            "Prompt tokens of requests without a first token.",
            {tenant: one.num_queued_tokens for tenant, one in held.items()},
        )
        yield self._counter(
            "guidevane_tenant_prompt_tokens",
            "Prompt tokens, each prompt once.",
            {tenant: one.num_prompt_tokens for tenant, one in self._totals.items()},
        )
        yield self._counter(
            "guidevane_tenant_generation_tokens",
            "Output tokens.",
            {tenant: one.num_generation_tokens for tenant, one in self._totals.items()},
        )
        yield self._rejections()

    def _gauge(self, name: str, text: str, values: Mapping[str, int]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=(*self._labels, "tenant"))
        for tenant, value in values.items():
            family.add_metric((*self._labels.values(), tenant), value)
        return family

    def _counter(self, name: str, text: str, values: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*self._labels, "tenant"))
        for tenant, value in values.items():
            family.add_metric((*self._labels.values(), tenant), value)
        return family

    def _rejections(self) -> Metric:
        family = CounterMetricFamily(
            "guidevane_tenant_rejections",
            "Requests refused at the door or in the queue.",
            labels=(*self._labels, "tenant", "reason"),
        )
        for tenant, totals in self._totals.items():
            for reason, count in totals.rejections.items():
                family.add_metric((*self._labels.values(), tenant, reason), count)
        return family
