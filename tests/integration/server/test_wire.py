"""What clients do to HTTP itself: bodies that are not what they say, connections that outlive a drain."""

import asyncio
import gzip
from collections.abc import AsyncIterator

import pytest

from tests.integration.server.in_process import TOKEN, House, house

BODY = b'{"prompt": "a", "max_tokens": 1}'


@pytest.fixture
async def plain() -> AsyncIterator[House]:
    async with house() as opened:
        yield opened


@pytest.mark.parametrize("coding", ["gzip", "br", "GZIP, identity"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_a_compressed_body_is_refused_unread(plain: House, path: str, coding: str) -> None:
    headers = {"Content-Encoding": coding}
    async with plain.serving.post(path, data=gzip.compress(BODY), headers=headers) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (415, "unsupported_media_type")
    assert "send the body as plain JSON" in error["message"]
    refused = 'guidevane_admission_rejections_total{engine="0",model_name="m",reason="validation"}'
    assert await plain.metric(refused) == ("/v1/" in path)


async def test_a_body_that_says_it_is_not_compressed_is_read(plain: House) -> None:
    async with plain.serving.post("/v1/completions", data=BODY, headers={"Content-Encoding": "identity"}) as response:
        assert response.status == 200


async def test_compressed_limits_are_refused(plain: House) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Encoding": "gzip"}
    async with plain.admin.patch("/admin/limits", data=gzip.compress(b"{}"), headers=headers) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (415, "unsupported_media_type")


async def status_and_end(house: House, path: str) -> tuple[int, bool]:
    """Status of an answer, and whether the connection is over with it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", house.serving.server.port)
    writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}" % path.encode())
    head = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), b"\r\nconnection: close\r\n" in head.lower()


async def test_while_draining_a_client_that_tries_again_needs_a_new_connection(plain: House) -> None:
    assert await status_and_end(plain, "/v1/completions") == (400, False)
    plain.services.gate.drain()
    assert await status_and_end(plain, "/v1/completions") == (503, True)
    assert await status_and_end(plain, "/nowhere") == (404, True)


async def test_a_stream_that_began_before_the_drain_is_whole(plain: House) -> None:
    body = {"prompt": "a", "max_tokens": 50, "ignore_eos": True, "stream": True}
    async with plain.serving.post("/v1/completions", json=body) as response:
        await response.content.readuntil(b"\n\n")
        plain.services.gate.drain()
        assert (await response.text()).endswith("data: [DONE]\n\n")
