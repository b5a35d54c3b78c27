"""Clients that go away, at any moment: nothing may be left of them."""

import asyncio
import random
from typing import Any

import pytest

LONG = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True}


async def abort_after(client: Any, body: dict[str, Any], delay_s: float) -> None:
    """Send a request, read what comes, and close the socket after delay_s."""
    try:
        async with asyncio.timeout(delay_s):
            async with client.session.post(f"{client.runtime.url}/v1/completions", json=body) as response:
                async for _ in response.content.iter_any():
                    pass
                await asyncio.sleep(delay_s)
    except TimeoutError:
        return


async def assert_nothing_is_left(client: Any) -> None:
    await client.wait_until_idle()
    metrics = await client.metrics()
    assert metrics["vllm:kv_cache_usage_perc"] == 0
    assert metrics["guidevane_oldest_waiting_seconds"] == 0
    status, answer, _ = await client.post("/v1/completions", {"prompt": "still there?", "max_tokens": 4})
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 12)


async def test_two_hundred_aborts_at_random_moments_leave_nothing(client: Any) -> None:
    # Eight run at once: the rest is aborted while queued, in prefill or in decode, as its delay has it.
    dice = random.Random(11)
    bodies = [
        {**LONG, "prompt": "a" * dice.choice((1, 50, 1200)), "max_tokens": 800, "stream": dice.random() < 0.5}
        for _ in range(200)
    ]
    places = asyncio.Semaphore(40)

    async def one(body: dict[str, Any]) -> None:
        async with places:
            await abort_after(client, body, dice.uniform(0.0, 0.4))

    before = await client.metrics()
    await asyncio.gather(*map(one, bodies))
    await assert_nothing_is_left(client)
    after = await client.metrics()
    name = "vllm:request_success_total{finished_reason=abort}"
    assert after[name] - before[name] > 100
    assert after["guidevane_client_disconnects_total"] - before["guidevane_client_disconnects_total"] > 100


@pytest.mark.parametrize("stream", [True, False])
async def test_blocks_are_free_soon_after_a_client_is_gone(client: Any, stream: bool) -> None:
    before = await client.metrics()
    task = asyncio.create_task(abort_after(client, {**LONG, "stream": stream, "n": 3}, 30.0))
    await client.wait_for_metric("vllm:num_requests_running", 3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await assert_nothing_is_left(client)
    # Aborted, not run to their end unread; and counted as what it was.
    after = await client.metrics()
    name = "vllm:request_success_total{finished_reason=abort}"
    assert after[name] - before[name] == 3
    name = "http_requests_total{handler=/v1/completions,method=POST,status=499}"
    assert after[name] - before.get(name, 0) == 1


async def test_a_client_that_goes_before_its_body_is_complete_leaves_nothing(client: Any) -> None:
    host, port = client.runtime.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    await assert_nothing_is_left(client)
