"""The signals of a real Prometheus that scrapes real exporters; skipped where no `prometheus` binary is at hand."""

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from guidevane_api.status import MetricsState
from guidevane_operator.prometheus import PrometheusClient, Target
from guidevane_operator.signals import Absent, Known, Signals

BUILT = sorted(Path.home().glob(".cache/guidevane/bin/prometheus-*/prometheus"))
BINARY = shutil.which("prometheus") or (str(BUILT[-1]) if BUILT else None)
pytestmark = pytest.mark.skipif(BINARY is None, reason="NO PROMETHEUS: no binary on PATH, none built by e2e/cluster")

WINDOW_S, SCRAPE_S = 8, 1
LABELS = {"model_name": "tiny", "engine": "0"}


class Exporter:
    """A pod's /metrics under the runtime's names."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        names = tuple(LABELS)

        def gauge(name: str) -> Gauge:
            return Gauge(name, "-", names, registry=self.registry).labels(**LABELS)

        def counter(name: str) -> Counter:
            return Counter(name, "-", names, registry=self.registry).labels(**LABELS)

        def histograms(name: str, buckets: tuple[float, ...]) -> list[Histogram]:
            family = Histogram(name, "-", (*names, "class"), registry=self.registry, buckets=buckets)
            return [family.labels(**LABELS, **{"class": kind}) for kind in ("interactive", "offline")]

        self.kv, self.running = gauge("vllm:kv_cache_usage_perc"), gauge("vllm:num_requests_running")
        self.waiting = gauge("vllm:num_requests_waiting")
        self.levels = Gauge("guidevane_guard_level", "-", names, registry=self.registry)
        self.level = self.levels.labels(**LABELS)
        over = Gauge("guidevane_guard_line_breached", "-", (*names, "line"), registry=self.registry)
        self.ttft_over, self.itl_over = (over.labels(**LABELS, line=line) for line in ("ttft_p95_ms", "itl_p95_ms"))
        self.preemptions = counter("vllm:num_preemptions")
        self.prompt, self.generated = counter("vllm:prompt_tokens"), counter("vllm:generation_tokens")
        success = Counter("vllm:request_success", "-", (*names, "finished_reason"), registry=self.registry)
        self.success = success.labels(**LABELS, finished_reason="stop")
        self.aborted = success.labels(**LABELS, finished_reason="abort")
        self.ttft, self.offline_ttft = histograms("vllm:time_to_first_token_seconds", (0.1, 0.5, 1.0, 2.0))
        self.itl, _ = histograms("vllm:inter_token_latency_seconds", (0.01, 0.05, 0.1, 0.2))
        self.queue, _ = histograms("vllm:request_queue_time_seconds", (0.1, 0.5, 1.0))

    async def handle(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self.registry), content_type="text/plain")

    def serve_one(self) -> None:
        """One request: 20 tokens, TTFT in the bucket up to 500 ms, ITL in that up to 50 ms; offline, TTFT is long."""
        self.offline_ttft.observe(1.5)
        self.success.inc()
        self.prompt.inc(100)
        self.generated.inc(20)
        self.ttft.observe(0.4)
        self.queue.observe(0.05)
        for _ in range(19):
            self.itl.observe(0.04)


class Scraped:
    """Two exporters, the Prometheus that scrapes them, and a client."""

    def __init__(self, exporters: dict[str, Exporter], url: str, client: PrometheusClient) -> None:
        self.exporters, self.url, self.client = exporters, url, client
        self.runners: dict[str, web.AppRunner] = {}

    async def observe(self, *pods: str) -> Signals:
        return await self.client.observe(self.url, Target("demo", pods or tuple(self.exporters), WINDOW_S, SCRAPE_S))

    async def until(self, holds: Any, *pods: str, traffic: bool = True) -> Signals:
        """Observe, with traffic, until it holds."""
        async with asyncio.timeout(120):
            while not holds(signals := await self.observe(*pods)):
                for exporter in self.exporters.values() if traffic else ():
                    exporter.serve_one()
                await asyncio.sleep(0.2)
        return signals


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
async def scraped(tmp_path: Path) -> AsyncIterator[Scraped]:
    assert BINARY is not None
    async with AsyncExitStack() as stack:
        exporters = {"chat-0": Exporter(), "chat-1": Exporter()}
        runners: dict[str, web.AppRunner] = {}
        static = []
        for pod, exporter in exporters.items():
            application = web.Application()
            application.router.add_get("/metrics", exporter.handle)
            runner = runners[pod] = web.AppRunner(application, shutdown_timeout=0)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            target = f"127.0.0.1:{runner.addresses[0][1]}"
            static.append({"targets": [target], "labels": {"namespace": "demo", "pod": pod}})
        # Two jobs scrape the same pods: nothing may count twice.
        jobs = [{"job_name": name, "static_configs": static} for name in ("guidevane", "again")]
        config = {"global": {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": "1s"}, "scrape_configs": jobs}
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        port = free_port()
        process = await asyncio.create_subprocess_exec(
            BINARY,
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            session = await stack.enter_async_context(aiohttp.ClientSession())
            found = Scraped(exporters, f"http://127.0.0.1:{port}", PrometheusClient(session, 5.0))
            found.runners = runners
            yield found
        finally:
            process.terminate()
            await process.wait()


async def test_signals_are_read_once_per_pod_with_their_samples(scraped: Scraped) -> None:
    scraped.exporters["chat-0"].kv.set(0.25)
    scraped.exporters["chat-1"].kv.set(0.75)
    for exporter in scraped.exporters.values():
        exporter.running.set(6)
        exporter.waiting.set(3)

    signals = await scraped.until(lambda s: isinstance(s.ttft_p95_ms, Known) and s.ttft_p95_ms.samples > 10)

    assert (signals.state, signals.fresh_pods, signals.expected_pods) == (MetricsState.KNOWN, 2, 2)
    assert signals.kv_percent.value == pytest.approx(75)
    assert signals.running_per_pod.value == pytest.approx(6)
    assert signals.waiting.value == pytest.approx(6)
    assert 100 < signals.ttft_p95_ms.value <= 500
    assert 10 < signals.itl_p95_ms.value <= signals.itl_p99_ms.value <= 50
    assert signals.queue_wait_p95_ms.value <= 100
    assert signals.preemptions.value == 0
    assert signals.itl_p95_ms.samples == pytest.approx(19 * signals.ttft_p95_ms.samples, rel=0.2)
    assert signals.prompt_tokens.value == pytest.approx(100 * signals.finished.value, rel=0.3)


async def test_the_guard_is_that_of_the_pod_that_gives_way_most(scraped: Scraped) -> None:
    calm = await scraped.until(lambda s: isinstance(s.guard_level, Known), traffic=False)
    scraped.exporters["chat-1"].level.set(3)
    scraped.exporters["chat-1"].itl_over.set(1)

    signals = await scraped.until(lambda s: s.guard_lines, traffic=False)

    assert (calm.guard_level.value, calm.guard_lines) == (0, ())
    assert (signals.guard_level.value, signals.guard_lines) == (3, ("itlP95Milliseconds",))


async def test_a_pod_that_does_not_say_its_level_is_not_at_level_0(scraped: Scraped) -> None:
    scraped.exporters["chat-1"].registry.unregister(scraped.exporters["chat-1"].levels)

    # It may have been scraped once before it fell silent.
    signals = await scraped.until(lambda s: not isinstance(s.guard_level, Known) and s.fresh_pods == 2, traffic=False)

    assert isinstance(signals.kv_percent, Known)
    assert isinstance(signals.guard_level, Absent)


async def test_no_traffic_is_known_as_no_traffic(scraped: Scraped) -> None:
    signals = await scraped.until(lambda s: isinstance(s.finished, Known), traffic=False)

    assert signals.state is MetricsState.KNOWN
    assert signals.finished.value == 0
    assert signals.ttft_p95_ms == Absent("no traffic in the window")


async def test_a_pod_that_is_never_scraped_makes_the_signals_partial(scraped: Scraped) -> None:
    signals = await scraped.until(lambda s: s.fresh_pods == 2, "chat-0", "chat-1", "chat-9")

    assert (signals.state, signals.expected_pods) == (MetricsState.PARTIAL, 3)
    assert not isinstance(signals.kv_percent, Known)


async def test_pods_that_stop_answering_are_no_longer_known(scraped: Scraped) -> None:
    await scraped.until(lambda s: s.state is MetricsState.KNOWN)
    for runner in scraped.runners.values():
        await runner.cleanup()

    signals = await scraped.until(lambda s: s.state is not MetricsState.KNOWN, traffic=False)

    assert signals.state in (MetricsState.ABSENT, MetricsState.STALE, MetricsState.PARTIAL)
    assert not isinstance(signals.kv_percent, Known)
