"""The server over a real engine loop and a fake model, in this process: what is told of live requests, and uploads."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from guidevane_runtime.errors import EngineUnavailable
from guidevane_runtime.server.bodies import BodyReader
from tests.integration.server.in_process import (
    ENDLESS,
    House,
    house,
    until,
)

NAMES = ("urgent", "patient")


@pytest.fixture
async def plain() -> AsyncIterator[House]:
    async with house() as opened:
        yield opened


# ---------------------------------------------------------------------------------------------------- admin/requests


async def test_an_idle_server_lists_nothing(plain: House) -> None:
    assert await plain.ask("/admin/requests") == (200, {"requests": [], "total": 0})


async def test_a_request_is_found_under_the_clients_id_with_what_holds_it_back(plain: House) -> None:
    async with plain.running("a", "b", "mine", prompt="a secret"):
        await until(lambda: plain.services.stats.num_running == 2)
        status, body = await plain.ask("/admin/requests/mine")
        assert (status, body["total"]) == (200, 1)
        (one,) = body["requests"]
        assert (one["requestId"], one["state"], one["position"]) == ("mine", "waiting", 1)
        assert (one["numPromptTokens"], one["numOutputTokens"], one["numPreemptions"]) == (8, 0, 0)
        assert one["ageSeconds"] >= 0
        assert one["heldBackBy"] == {
            "limit": "maxNumSeqs",
            "value": 2,
            "bound": 2,
            "request": None,
            "message": "2 requests run, limit maxNumSeqs 2",
        }
        assert "secret" not in str(body)
        assert (await plain.ask(f"/admin/requests/{one['id']}"))[1]["requests"][0]["id"] == one["id"]


async def test_the_list_has_the_oldest_first_with_their_states(plain: House) -> None:
    async with plain.running("a", "b", "c"):
        await until(lambda: plain.services.stats.num_running == 2)
        _, body = await plain.ask("/admin/requests")
        rows = [(one["requestId"], one["state"], one["heldBackBy"]["limit"]) for one in body["requests"]]
        assert rows == [("a", "running", "nothing"), ("b", "running", "nothing"), ("c", "waiting", "maxNumSeqs")]
        assert body["total"] == 3


async def test_the_list_is_bounded_and_says_how_many_there_are(plain: House) -> None:
    async with plain.running("many", n=120):
        _, body = await plain.ask("/admin/requests")
        assert (len(body["requests"]), body["total"]) == (100, 120)
        assert {one["requestId"] for one in body["requests"]} == {"many"}


async def test_one_that_ended_is_404_and_forgotten(plain: House) -> None:
    async with plain.running("a"):
        assert (await plain.ask("/admin/requests/a"))[0] == 200
    status, body = await plain.ask("/admin/requests/a")
    assert (status, body["error"]["code"]) == (404, "request_not_found")
    assert "request 'a' is not with the engine" in body["error"]["message"]


async def test_requests_are_shown_to_nobody_without_the_token(plain: House) -> None:
    for path in ("/admin/requests", "/admin/requests/a"):
        assert (await plain.ask(path, token="wrong"))[0] == 401
        assert (await plain.serving.get(path)).status == 404


async def test_a_question_to_an_engine_that_goes_is_refused(plain: House) -> None:
    async with plain.running("a"):
        await plain.hold()
        asking = asyncio.create_task(plain.services.engine.explain(["x"]))
        await asyncio.sleep(0)
        await plain.services.engine.stop(grace_s=0.0)
        with pytest.raises(EngineUnavailable, match="the engine is gone"):
            await asking
    with pytest.raises(EngineUnavailable, match="the engine is stopped"):
        await plain.services.engine.explain(["x"])


async def test_a_question_to_an_engine_that_dies_is_refused(plain: House) -> None:
    async with plain.running("a"):
        await plain.hold()
        asking = asyncio.create_task(plain.services.engine.explain(["x"]))
        await asyncio.sleep(0)
        plain.runner.is_broken = True
        plain.runner.may_go.set()
        with pytest.raises(EngineUnavailable, match="the engine is gone"):
            await asking
    with pytest.raises(EngineUnavailable, match="the engine is restarting"):
        await plain.services.engine.explain(["x"])


async def test_an_uploads_flood_is_refused_with_a_wait_and_harms_nobody_afterwards(plain: House) -> None:
    plain.services.bodies = BodyReader(plain.clock, max_bytes=10_000)

    async def endless() -> AsyncIterator[bytes]:
        yield b"{" + b" " * 5_000
        await asyncio.Event().wait()

    flood = [asyncio.create_task(plain.serving.post("/v1/completions", data=endless())) for _ in range(20)]
    await until(lambda: sum(post.done() for post in flood) == 19)
    for post in flood:
        if not post.done():
            post.cancel()
            continue
        response = await post
        assert (response.status, (await response.json())["error"]["code"]) == (503, "bodies_in_flight")
        assert 1 <= int(response.headers["Retry-After"]) <= 120
    await until(lambda: plain.services.bodies.num_bytes == 0)
    async with plain.serving.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}) as response:
        assert response.status == 200


# ------------------------------------------------------------------------------------------- what the engine is told


async def test_a_request_of_a_better_priority_is_in_line_before_those_that_came_first(plain: House) -> None:
    async with plain.running("a", "b", "patient"):
        urgent = {"X-Request-Id": "urgent", "X-Priority": "-1"}
        post = asyncio.create_task(plain.serving.post("/v1/completions", json=ENDLESS, headers=urgent))
        await until(lambda: plain.services.stats.num_waiting == 2)
        positions = [(await plain.ask(f"/admin/requests/{name}"))[1]["requests"][0]["position"] for name in NAMES]
        assert dict(zip(NAMES, positions, strict=True)) == {"urgent": 1, "patient": 2}
        post.cancel()
        await asyncio.wait((post,))


async def test_a_choice_that_ended_gives_its_place_back_while_its_siblings_go_on(plain: House) -> None:
    body = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True, "n": 3}
    gate, post = plain.services.gate, asyncio.create_task(plain.serving.post("/v1/completions", json=body))
    await until(lambda: plain.services.stats.num_running == 2)
    await plain.hold()
    # Two run at once: those two have their first token, and the third waits with its prompt.
    await until(lambda: (gate.num_live, gate.num_queued_tokens) == (3, 3))
    plain.runner.may_go.set()
    await until(lambda: gate.num_live == 1)
    assert not post.done()
    async with await post as response:
        assert response.status == 200
    assert (gate.num_live, gate.num_queued_tokens) == (0, 0)


async def test_what_a_stop_string_ended_is_not_computed_any_further(plain: House) -> None:
    async with plain.serving.post("/v1/completions", json={**ENDLESS, "max_tokens": 60}) as response:
        text = (await response.json())["choices"][0]["text"]
    stop = next(char for char in reversed(text) if char.isalnum() and char.isascii())
    num_steps = plain.services.stats.num_steps
    async with plain.serving.post("/v1/completions", json={**ENDLESS, "stop": stop}) as response:
        assert (await response.json())["choices"][0]["stop_reason"] == stop
    await until(lambda: not plain.services.stats.num_running)
    assert plain.services.stats.num_steps - num_steps < ENDLESS["max_tokens"] / 2
