"""Tenants on one runtime, over HTTP: deadlines and headers, what an administrator sees, and a file that changes."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.server.tenants import LONG, SHORT, TENANTS, TenantsFile, holding, in_flight, key_of, tenant


@pytest.fixture
async def client(tenants_runtime: Any, connect: Any) -> AsyncIterator[Any]:
    async with connect(tenants_runtime) as opened:
        yield opened


# ------------------------------------------------------------------------------------------------------------ deadlines


async def test_a_deadline_that_passes_in_the_queue_is_504_with_its_own_code(client: Any) -> None:
    name = "guidevane_admission_rejections_total{reason=deadline_exceeded}"
    async with holding(client, "a", 2):
        before = await client.metrics()
        status, body, headers = await client.post(
            "/v1/completions", SHORT, headers=key_of("b", **{"X-Deadline-Ms": "200"})
        )
        after = await client.metrics()
    assert (status, body["error"]["code"], body["error"]["type"]) == (504, "deadline_exceeded", "timeout_error")
    assert "the deadline passed" in body["error"]["message"] and "after 0 tokens" in body["error"]["message"]
    assert headers["x-should-retry"] == "false"
    assert after[name] == before[name] + 1
    assert after["guidevane_admission_rejections_total{reason=timeout}"] == 0


async def test_a_deadline_that_passes_in_mid_answer_is_an_event_of_the_stream(client: Any) -> None:
    before = await client.metrics()
    body = {**LONG, "stream": True}
    headers = key_of("a", **{"X-Deadline-Ms": "2000"})
    async with client.session.post(f"{client.runtime.url}/v1/completions", json=body, headers=headers) as response:
        events = [line.removeprefix("data: ") for line in (await response.text()).split("\n\n") if line]
    assert response.status == 200
    *chunks, error, done = events
    assert chunks and done == "[DONE]"
    assert json.loads(error)["error"]["code"] == "deadline_exceeded"
    await client.wait_until_idle()
    after = await client.metrics()
    # It ended as aborted, and was not refused: it had an answer.
    outcome, refused = "vllm:request_success_total{finished_reason=abort}", "guidevane_admission_rejections_total"
    assert after[outcome] == before[outcome] + 1
    for reason in ("deadline_exceeded", "timeout"):
        assert after[f"{refused}{{reason={reason}}}"] == before[f"{refused}{{reason={reason}}}"]


async def test_a_deadline_that_is_kept_changes_nothing(client: Any) -> None:
    status, body, _ = await client.post(
        "/v1/completions", SHORT, headers=key_of("a", **{"X-Deadline-Ms": "60000", "X-Priority": "-1"})
    )
    assert (status, body["usage"]["completion_tokens"]) == (200, 1)


@pytest.mark.parametrize("name", ["X-Deadline-Ms", "X-Priority", "X-Request-Class"])
async def test_a_header_that_says_nothing_known_is_400_and_named(client: Any, name: str) -> None:
    status, body, _ = await client.post("/v1/completions", SHORT, headers=key_of("a", **{name: "soon"}))
    assert (status, body["error"]["param"]) == (400, name)


# ---------------------------------------------------------------------------------------------------------- admin port


async def ask(client: Any, path: str) -> Any:
    headers = {"Authorization": "Bearer a-token-for-tests"}
    async with client.session.get(client.runtime.admin_url + path, headers=headers) as response:
        assert response.status == 200
        return await response.json()


async def test_an_administrator_sees_terms_and_use_of_each_tenant_and_no_key(client: Any) -> None:
    async with holding(client, "capped", 3):
        body = await ask(client, "/admin/tenants")
    assert [one["name"] for one in body["tenants"]] == [one["name"] for one in TENANTS]
    capped = next(one for one in body["tenants"] if one["name"] == "capped")
    assert {**capped, "numPromptTokens": 0, "numGenerationTokens": 0} == {
        "name": "capped",
        "weight": 1,
        "maxInFlight": 5,
        "maxQueuedTokens": None,
        "numKeys": 1,
        "numInFlight": 3,
        "numWaiting": 1,
        "numQueuedTokens": 1,
        "numPromptTokens": 0,
        "numGenerationTokens": 0,
    }
    assert body["classes"] == {"interactive": 9, "offline": 1}
    assert (body["offlinePaused"], body["fileGood"]) == (False, True)
    assert not any(digest in str(body) for one in TENANTS for digest in one["keySha256"])


async def test_an_administrator_sees_whose_a_request_is_and_its_class(client: Any) -> None:
    headers = key_of("b", **{"X-Request-Class": "offline", "X-Request-Id": "mine"})
    post = asyncio.create_task(client.post("/v1/completions", LONG, headers=headers))
    await client.wait_for_metric("vllm:num_requests_running", 1)
    (one,) = (await ask(client, "/admin/requests/mine"))["requests"]
    post.cancel()
    assert (one["tenant"], one["class"]) == ("b", "offline")
    await client.wait_until_idle()


# ------------------------------------------------------------------------------------------------- a file that changes


async def wait_for_status(client: Any, name: str, wanted: int) -> None:
    deadline_s = time.monotonic() + 120
    while (status := (await client.post("/v1/completions", SHORT, headers=key_of(name)))[0]) != wanted:
        assert time.monotonic() < deadline_s, f"{name} still gets {status}"
        await asyncio.sleep(0.05)


async def test_a_change_of_the_file_holds_at_once_and_harms_no_stream(client: Any, tenants_file: TenantsFile) -> None:
    async def stream() -> list[Any]:
        body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        headers = key_of("b")
        async with client.session.post(f"{client.runtime.url}/v1/completions", json=body, headers=headers) as response:
            return (await response.text()).split("\n\n")

    try:
        async with holding(client, "capped", 3):
            pass
        streaming = asyncio.create_task(stream())
        await client.wait_for_metric(in_flight("b"), 1)
        tenants_file.write([tenant("a"), tenant("capped", maxInFlight=1), tenant("new")])
        await wait_for_status(client, "new", 200)
        await wait_for_status(client, "b", 401)
        assert not streaming.done(), "the stream ended before the file had changed"
        assert in_flight("b") in await client.metrics()
        status, body, _ = await client.post("/v1/completions", {**SHORT, "n": 2}, headers=key_of("capped"))
        assert (status, body["error"]["param"]) == (400, "n")
        events = [event for event in await streaming if event]
        assert events[-1] == "data: [DONE]" and '"finish_reason":"length"' in events[-2]
        await client.wait_until_idle()
        assert not any("tenant=b" in series for series in await client.metrics())
    finally:
        tenants_file.write(TENANTS)
        await wait_for_status(client, "b", 200)


async def test_a_bad_file_changes_nothing_and_is_seen(client: Any, tenants_file: TenantsFile) -> None:
    try:
        tenants_file.write(text='{"tenants": [{"name": "a", "weight": 0}]}')
        await client.wait_for_metric("guidevane_tenants_file_good", 0)
        assert (await client.post("/v1/completions", SHORT, headers=key_of("b")))[0] == 200
        warnings = [one for one in client.runtime.entries if one["message"] == "file ignored"]
        assert "tenants.0.weight" in warnings[-1]["reason"]
    finally:
        tenants_file.write(TENANTS)
        await client.wait_for_metric("guidevane_tenants_file_good", 1)


def test_a_bad_file_at_the_start_stops_it_with_a_sentence(start_runtime: Any, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    path.write_text('{"tenants": [{"name": "a"}, {"name": "a"}]}')
    with start_runtime(tiny_model, "--tenants-file", str(path)) as started:
        assert started.wait_for_end() == 3
        reason = Path(f"{started.log}.reason").read_text()
    assert "--tenants-file" in reason and "2 tenants have the name a; give each tenant its own" in reason


async def test_no_key_is_in_the_log(client: Any) -> None:
    log = client.runtime.log.read_text()
    assert "tenants changed" in log and "key-of-" not in log
