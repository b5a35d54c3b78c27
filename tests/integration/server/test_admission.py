"""The door under pressure: queue caps, timeouts, and who pays for what."""

import asyncio
import collections
import itertools
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

LIMITS = {
    "maxModelLen": 16384,
    "maxNumSeqs": 2,
    "maxQueuedRequests": 3,
    "maxQueuedTokens": 400,
    "waitingTimeoutMilliseconds": 60000,
}
LONG = {"prompt": "a", "max_tokens": 16000, "ignore_eos": True}
"""Outlives every wait of this file, and is aborted."""
SHORT = {"prompt": "a", "max_tokens": 1}
epochs = itertools.count(1)


@pytest.fixture(scope="module")
def small(start_runtime: Any, tiny_model: Path) -> Iterator[Any]:
    """Two at once, three wait, for as long as a test says."""
    flags = ("--served-model-name", "tiny", "--dtype", "float32", "--kv-cache-memory", "4Mi")
    with start_runtime(tiny_model, *flags, limits=LIMITS) as started:
        started.wait_for_ports()
        started.wait_for_engine()
        yield started


@asynccontextmanager
async def running(client: Any, count: int) -> Any:
    """That many long requests, in their decode; aborted at the exit."""
    tasks = [asyncio.create_task(client.post("/v1/completions", LONG)) for _ in range(count)]
    try:
        await client.wait_for_metric("vllm:num_requests_running", count)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.wait_until_idle()


@asynccontextmanager
async def patience(client: Any, wait_ms: int) -> Any:
    """Who waits, waits so long at most."""

    async def change(wait_ms: int) -> None:
        limits = {"waitingTimeoutMilliseconds": wait_ms}
        status, _ = await client.admin("PATCH", {"epoch": next(epochs), "limits": limits})
        assert status == 200

    await change(wait_ms)
    try:
        yield
    finally:
        await change(LIMITS["waitingTimeoutMilliseconds"])


async def test_a_burst_never_passes_the_cap(small: Any, connect: Any) -> None:
    async with connect(small) as client, running(client, 2):
        posts = [asyncio.create_task(client.post("/v1/completions", SHORT)) for _ in range(60)]
        answers = [await answer for answer in itertools.islice(asyncio.as_completed(posts), 57)]
        # Three wait behind two that run for longer; the rest was refused at the door.
        await client.wait_for_metric("vllm:num_requests_waiting", 3)
        waiting = [post for post in posts if not post.done()]
        async with patience(client, 1):
            late = await asyncio.gather(*waiting)
    assert collections.Counter(status for status, _, _ in answers) == {503: 57}
    assert collections.Counter(status for status, _, _ in late) == {504: 3}
    assert {body["error"]["code"] for _, body, _ in answers} == {"queue_full"}
    assert all(1 <= int(headers["Retry-After"]) <= 120 for _, _, headers in answers)


async def test_a_request_that_waited_too_long_is_504_and_not_to_be_retried(small: Any, connect: Any) -> None:
    async with connect(small) as client, running(client, 2), patience(client, 200):
        before = await client.metrics()
        status, body, headers = await client.post("/v1/completions", SHORT)
        after = await client.metrics()
    assert (status, body["error"]["code"], headers["x-should-retry"]) == (504, "queue_timeout", "false")
    name = "guidevane_admission_rejections_total{reason=timeout}"
    assert after[name] == before[name] + 1


async def test_all_choices_come_in_or_none(small: Any, connect: Any) -> None:
    async with connect(small) as client:
        async with running(client, 1):
            before = await client.metrics()
            status, body, _ = await client.post("/v1/completions", {**SHORT, "n": 5})
            after = await client.metrics()
        assert (status, body["error"]["code"]) == (503, "queue_full")
        assert after["vllm:request_prompt_tokens_count"] == before["vllm:request_prompt_tokens_count"]
        status, _, _ = await client.post("/v1/completions", {**SHORT, "n": 5})
        assert status == 200


async def test_queued_prompt_tokens_are_capped(small: Any, connect: Any) -> None:
    async with connect(small) as client, running(client, 2):
        waiting = asyncio.create_task(client.post("/v1/completions", {**SHORT, "prompt": "a" * 300}))
        await client.wait_for_metric("vllm:num_requests_waiting", 1)
        status, body, headers = await client.post("/v1/completions", {**SHORT, "prompt": "a" * 200})
        assert (status, body["error"]["code"]) == (503, "queue_full")
        assert "300" in body["error"]["message"] and int(headers["Retry-After"]) >= 1
    assert (await waiting)[0] == 200


async def test_a_prompt_above_the_token_cap_is_served_when_nothing_else_waits(small: Any, connect: Any) -> None:
    async with connect(small) as client:
        status, _, _ = await client.post("/v1/completions", {**SHORT, "prompt": "a" * 500})
        assert status == 200


async def test_a_prompt_that_the_cache_can_never_hold_is_refused_at_once(
    start_runtime: Any, tiny_model: Path, connect: Any
) -> None:
    # 16 tokens a block, 2 layers, 2 heads of 8, K and V in fp32: 4 KiB a block.
    flags = ("--dtype", "float32", "--kv-cache-memory", "256Ki")
    with start_runtime(tiny_model, *flags) as started:
        started.wait_for_ports()
        started.wait_for_engine()
        async with connect(started) as client:
            status, body, _ = await client.post("/v1/completions", {"prompt": "a" * 1500, "max_tokens": 1})
            assert (status, body["error"]["code"]) == (400, "kv_capacity_exceeded")
            status, _, _ = await client.post("/v1/completions", SHORT)
            assert status == 200
