"""The server's life: a host that can't be one, and looks that go on."""

import asyncio
import logging

import pytest
from aiohttp import web

from guidevane_runtime.errors import StartError
from guidevane_runtime.server.process import keep_watching, listening


async def test_a_watch_that_fails_is_logged_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    looks: asyncio.Queue[int] = asyncio.Queue()

    async def look() -> None:
        looks.put_nowait(1)
        raise ZeroDivisionError("a bug")

    watching = asyncio.create_task(keep_watching(look, pause_s=0.0))
    for _ in range(3):
        await asyncio.wait_for(looks.get(), 5)
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    assert caplog.records[0].levelno == logging.ERROR and caplog.records[0].exc_info


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
async def test_a_host_that_can_not_be_listened_on_is_named(host: str) -> None:
    with pytest.raises(StartError, match=f"can't listen on {host}:0"):
        async with listening(web.Application(), "serving", host, 0):
            pass
