"""Scraping pods directly, over real sockets."""

from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from guidevane_api.status import MetricsState
from guidevane_operator.pod_metrics import PodRing, PodScraper
from guidevane_operator.prometheus import Target
from guidevane_operator.signals import Known

TARGET = Target("demo", ("chat-0", "chat-1"), window_s=60, scrape_interval_s=15)


class Pod:
    """A /metrics route that says what it is told."""

    def __init__(self) -> None:
        self.text, self.status = "", 200

    async def handle(self, _: web.Request) -> web.Response:
        return web.Response(text=self.text, status=self.status)

    def says(self, finished: int) -> None:
        self.text = (
            "# TYPE vllm:num_requests_running gauge\n"
            "vllm:num_requests_running 3\n"
            "# TYPE vllm:request_success_total counter\n"
            f'vllm:request_success_total{{finished_reason="stop"}} {finished}\n'
        )


@pytest.fixture
async def pods() -> AsyncIterator[tuple[dict[str, Pod], dict[str, str], int]]:
    """Two pods on one port, each on an address of its own."""
    found = {name: Pod() for name in TARGET.pods}
    addresses = {name: f"127.0.8.{index + 1}" for index, name in enumerate(found)}
    runners, port = [], 0
    for name, pod in found.items():
        application = web.Application()
        application.router.add_get("/metrics", pod.handle)
        runner = web.AppRunner(application, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, addresses[name], port).start()
        port = runner.addresses[0][1]
        runners.append(runner)
    yield found, addresses, port
    for runner in runners:
        await runner.cleanup()


async def test_two_looks_give_known_rates_and_a_lost_pod_makes_them_partial(
    pods: tuple[dict[str, Pod], dict[str, str], int],
) -> None:
    found, addresses, port = pods
    rings: dict[str, PodRing] = {}
    async with aiohttp.ClientSession() as session:
        scraper = PodScraper(session, 2.0)
        for now_s, finished in ((0.0, 10), (15.0, 14)):
            for pod in found.values():
                pod.says(finished)
            signals = await scraper.observe(rings, addresses, port, TARGET, now_s)
        found["chat-1"].status = 503
        partial = await scraper.observe(rings, addresses, port, TARGET, 30.0)
        found["chat-0"].text = "<html>"
        blind = await scraper.observe(rings, addresses, port, TARGET, 45.0)
        await scraper.observe(rings, {"chat-0": addresses["chat-0"]}, port, TARGET, 60.0)

    assert signals.state is MetricsState.KNOWN
    assert signals.finished == Known(8.0, 0.0, None)
    assert signals.running_per_pod == Known(3.0, 0.0, None)
    assert (partial.state, partial.fresh_pods) == (MetricsState.PARTIAL, 1)
    assert (blind.state, blind.unreachable) == (MetricsState.ABSENT, True)
    assert set(rings) == {"chat-0"}, "the ring of a pod that is gone goes with it"
