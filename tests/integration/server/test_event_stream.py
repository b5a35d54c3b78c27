import asyncio
import json
import socket
import sys
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from guidevane_runtime.errors import WaitedTooLong
from guidevane_runtime.server.middleware import error_middleware
from guidevane_runtime.server.peers import PATIENCE_S, watch_peer
from guidevane_runtime.server.shapes import CompletionShape, Envelope
from guidevane_runtime.server.streams import EventWriter, answer_stream


class LateGeneration:
    """Says something when it is time; or fails then."""

    choices = ()

    def __init__(self, error: Exception | None) -> None:
        self._error = error
        self.is_time = asyncio.Event()

    async def next(self) -> dict[int, Any]:
        await self.is_time.wait()
        if self._error:
            raise self._error
        return {}

    @property
    def is_done(self) -> bool:
        return True


async def page_of(generation: LateGeneration, num_pings: int) -> tuple[int, str]:
    """Status and body of a stream of this generation, whose time comes after so many pings."""
    options = {"ping_interval_s": 0.02} if num_pings else {}
    envelope = Envelope("id", 1, "m", include_usage=True)
    shape = CompletionShape(envelope, None, None)  # type: ignore[arg-type]

    async def answer(request: web.Request) -> web.StreamResponse:
        return await answer_stream(request, generation, shape, envelope, **options)

    app = web.Application(middlewares=[error_middleware()])
    app.router.add_get("/", answer)
    async with TestClient(TestServer(app)) as client:
        if not num_pings:
            generation.is_time.set()
        async with client.get("/") as response:
            pings = [await response.content.readuntil(b"\n\n") for _ in range(num_pings)]
            assert pings == [b": ping\n\n"] * num_pings
            generation.is_time.set()
            return response.status, await response.text()


async def test_a_silent_stream_pings_until_its_first_token() -> None:
    _, page = await page_of(LateGeneration(None), num_pings=3)
    assert page.replace(": ping\n\n", "").endswith("data: [DONE]\n\n")


async def test_an_error_before_the_first_byte_has_its_own_status() -> None:
    status, page = await page_of(LateGeneration(WaitedTooLong("too long")), num_pings=0)
    assert (status, json.loads(page)["error"]["code"]) == (504, "queue_timeout")


@pytest.mark.parametrize(
    ("error", "code"), [(WaitedTooLong("x"), "queue_timeout"), (KeyError("bug"), "internal_error")]
)
async def test_an_error_after_the_first_byte_is_an_event(error: Exception, code: str) -> None:
    status, page = await page_of(LateGeneration(error), num_pings=1)
    *_, event, done, _ = page.split("\n\n")
    assert (status, done) == (200, "data: [DONE]")
    assert json.loads(event.removeprefix("data: "))["error"]["code"] == code
    assert "bug" not in page


@pytest.mark.skipif(sys.platform != "linux", reason="the options are Linux's")
async def test_a_client_that_takes_nothing_is_cut_off() -> None:
    ended: asyncio.Queue[BaseException] = asyncio.Queue()

    async def flood(request: web.Request) -> web.StreamResponse:
        watch_peer(request.transport, patience_s=0.2)
        writer = EventWriter(request)
        try:
            while True:
                await writer.send({"text": "x" * 100_000})
        except BaseException as error:
            ended.put_nowait(error)
            raise

    app = web.Application(middlewares=[error_middleware()])
    app.router.add_get("/", flood)
    async with TestServer(app) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(120):
            error = await ended.get()
            assert isinstance(error, asyncio.CancelledError | ConnectionError)
            # The connection is cut, not held open: what was in flight comes, and then its end.
            try:
                while await reader.read(1 << 20):
                    pass
            except ConnectionResetError:
                pass
        writer.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the options are Linux's")
async def test_the_kernel_cuts_a_connection_whose_client_takes_nothing_or_is_gone() -> None:
    async def told(request: web.Request) -> web.Response:
        connection = request.transport and request.transport.get_extra_info("socket")
        options = (socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE)
        found = [connection.getsockopt(socket.IPPROTO_TCP, option) for option in options]
        return web.json_response([*found, connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)])

    app = web.Application(middlewares=[error_middleware()])
    app.router.add_get("/", told)
    async with TestServer(app) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        page = await reader.read()
        writer.close()
    patience_ms, idle_s, is_kept_alive = json.loads(page.partition(b"\r\n\r\n")[2])
    assert (patience_ms, is_kept_alive) == (PATIENCE_S * 1000, 1)
    assert 0 < idle_s < PATIENCE_S
