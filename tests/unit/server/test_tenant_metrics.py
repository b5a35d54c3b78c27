"""Series by tenant: what they say, and which tenants have them."""

import pytest
from prometheus_client import CollectorRegistry

from guidevane_runtime.core.door import Rejection
from guidevane_runtime.core.leases import Occupancy
from guidevane_runtime.core.messages import RequestOutput, SamplingParams
from guidevane_runtime.server.choices import Choice
from guidevane_runtime.server.metrics import RequestTimes, ServerMetrics
from guidevane_runtime.server.text.tokenizer import Tokenizer

FAMILIES = ("requests_in_flight", "queued_tokens", "prompt_tokens_total", "generation_tokens_total")


class House:
    """Metrics of a server, and who is listed and inside."""

    def __init__(self) -> None:
        self.metrics = ServerMetrics(CollectorRegistry(), "m", 8192)
        self.listed = ["a", "b"]
        self.uses: dict[str, Occupancy] = {}
        self.metrics.tenants.listed = lambda: self.listed
        self.metrics.tenants.uses = lambda: self.uses

    def values(self, tenant: str) -> tuple[float | None, ...]:
        labels = {"model_name": "m", "engine": "0", "tenant": tenant}
        return tuple(self.metrics.registry.get_sample_value(f"guidevane_tenant_{name}", labels) for name in FAMILIES)

    def rejections(self, tenant: str, reason: Rejection) -> float | None:
        labels = {"model_name": "m", "engine": "0", "tenant": tenant, "reason": str(reason)}
        return self.metrics.registry.get_sample_value("guidevane_tenant_rejections_total", labels)


@pytest.fixture
def house() -> House:
    return House()


def test_listed_tenants_are_there_from_the_start_and_nobody_else(house: House) -> None:
    assert house.values("a") == house.values("b") == (0, 0, 0, 0)
    assert house.values("c") == (None,) * 4


def test_what_a_tenant_has_inside_is_read_from_its_leases(house: House) -> None:
    house.uses["a"] = Occupancy(num_live=3, num_waiting=2, num_queued_tokens=70)
    assert house.values("a")[:2] == (3, 70)
    assert house.values("b")[:2] == (0, 0)


def test_tokens_are_counted_for_their_tenant(house: House, tokenizer: Tokenizer) -> None:
    choice = Choice(0, (1, 2, 3), SamplingParams(max_tokens=9, seed=1), tokenizer)
    times = RequestTimes(arrival_s=10.0, tenant="a")
    for now_s in (11.0, 12.0):
        output = RequestOutput("r", (5,), first_scheduled_s=10.5)
        house.metrics.output_arrived(times, output, choice, 1, now_s)
    assert house.values("a")[2:] == (3, 2)
    assert house.values("b")[2:] == (0, 0)


def test_refusals_are_counted_for_their_tenant_by_reason(house: House) -> None:
    house.metrics.rejected(Rejection.TENANT_CONCURRENCY, "a")
    house.metrics.rejected(Rejection.AUTH)
    assert house.rejections("a", Rejection.TENANT_CONCURRENCY) == 1
    assert house.rejections("b", Rejection.TENANT_CONCURRENCY) == 0
    assert house.rejections("a", Rejection.QUEUE_FULL) is None
    total = house.metrics.registry.get_sample_value
    labels = {"model_name": "m", "engine": "0", "reason": "auth"}
    assert total("guidevane_admission_rejections_total", labels) == 1


def test_a_tenant_that_is_listed_no_more_is_gone_with_its_last_request(house: House) -> None:
    house.metrics.rejected(Rejection.TENANT_CONCURRENCY, "a")
    house.listed = ["b"]
    house.uses["a"] = Occupancy(1, 0, 0)
    assert house.values("a") == (1, 0, 0, 0)
    del house.uses["a"]
    assert house.values("a") == (None,) * 4
    assert house.rejections("a", Rejection.TENANT_CONCURRENCY) is None
    house.listed = ["a", "b"]
    assert house.rejections("a", Rejection.TENANT_CONCURRENCY) == 0
