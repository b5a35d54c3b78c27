"""Answers without an end: whoever sends them, they cost the operator neither its memory nor its time."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from guidevane_api.admin import LimitsPatch
from guidevane_api.limits import PartialLimits
from guidevane_operator.admin_client import Accepted, AdminClient, Unreachable
from guidevane_operator.app import open_session
from guidevane_operator.pod_metrics import PodScraper
from guidevane_operator.prometheus import PrometheusClient, Target
from tests.integration.operator.conftest import serving

TARGET = Target("demo", ("chat-0",), window_s=60, scrape_interval_s=15)
ENOUGH_BYTES = 64 * 2**20
PATCH = LimitsPatch(epoch=1, limits=PartialLimits(max_num_seqs=2))


class Flood:
    """Answers every request with comments until the other side has had enough."""

    def __init__(self) -> None:
        self.sent, self.port = 0, 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        line = b"#" * 65535 + b"\n"
        try:
            while self.sent < ENOUGH_BYTES:
                await response.write(line)
                self.sent += len(line)
        except ConnectionError:
            pass
        return response


@asynccontextmanager
async def flooding() -> AsyncIterator[Flood]:
    flood, application = Flood(), web.Application()
    application.router.add_route("*", "/{path:.*}", flood.handle)
    runner = web.AppRunner(application, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    flood.port = runner.addresses[0][1]
    try:
        yield flood
    finally:
        await runner.cleanup()


async def test_a_prometheus_without_an_end_is_away() -> None:
    async with flooding() as flood, open_session() as session:
        signals = await PrometheusClient(session, 20.0).observe(f"http://127.0.0.1:{flood.port}", TARGET)
    assert signals.unreachable
    assert "MiB" in signals.why
    assert flood.sent < ENOUGH_BYTES


@pytest.mark.parametrize("body", [b"[" * 200_000, b'{"a":' * 200_000, b"\xff\xfe", b"", b"null", b"7", b'{"error": 7}'])
@pytest.mark.parametrize("status", [200, 400, 409, 500])
async def test_no_answer_is_an_exception(body: bytes, status: int) -> None:
    async def say(_: web.Request) -> web.Response:
        return web.Response(body=body, status=status)

    async with serving("127.0.0.1", 0, "*", "/{path:.*}", say) as port, open_session() as session:
        answer = await AdminClient(session, 20.0).patch("127.0.0.1", port, "t", PATCH)
        signals = await PrometheusClient(session, 20.0).observe(f"http://127.0.0.1:{port}", TARGET)
        scraped = await PodScraper(session, 20.0).observe({}, {"chat-0": "127.0.0.1"}, port, TARGET, 0.0)
    assert not isinstance(answer, Accepted)
    assert signals.fresh_pods == scraped.fresh_pods == 0


async def test_an_exposition_without_an_end_is_none() -> None:
    began = time.monotonic()
    async with flooding() as flood, open_session() as session:
        signals = await PodScraper(session, 20.0).observe({}, {"chat-0": "127.0.0.1"}, flood.port, TARGET, 0.0)
    assert signals.unreachable
    assert flood.sent < ENOUGH_BYTES
    assert time.monotonic() - began < 10


async def test_an_admin_port_without_an_end_does_not_answer() -> None:
    async with flooding() as flood, open_session() as session:
        answer = await AdminClient(session, 20.0).patch("127.0.0.1", flood.port, "t", PATCH)
    assert isinstance(answer, Unreachable)
    assert "MiB" in answer.message
    assert flood.sent < ENOUGH_BYTES
