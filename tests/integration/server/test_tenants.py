"""Several tenants on one runtime, over HTTP: keys, caps, isolation and shares."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.integration.server.tenants import LONG, SHORT, SMALL, holding, in_flight, key_of

OPEN_ROUTES = ("/livez", "/readyz", "/health", "/ping", "/version", "/metrics")
KEYED_ROUTES = (
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
)


@pytest.fixture
async def client(tenants_runtime: Any, connect: Any) -> AsyncIterator[Any]:
    async with connect(tenants_runtime) as opened:
        yield opened


# ----------------------------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize(("method", "path"), KEYED_ROUTES)
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"X-Tenant-Id": "a"}])
async def test_a_missing_or_wrong_key_is_401(client: Any, method: str, path: str, headers: dict[str, str]) -> None:
    async with client.session.request(method, client.runtime.url + path, json={}, headers=headers) as response:
        body = await response.json()
    assert (response.status, body["error"]["code"]) == (401, "invalid_api_key")
    assert (body["error"]["type"], response.headers["WWW-Authenticate"]) == ("authentication_error", "Bearer")
    assert "wrong" not in body["error"]["message"]


@pytest.mark.parametrize("path", OPEN_ROUTES)
async def test_probes_and_metrics_need_no_key(client: Any, path: str) -> None:
    assert (await client.get(path))[0] == 200


async def test_no_route_of_the_serving_port_is_forgotten() -> None:
    from guidevane_runtime.server.api import health, openai, text

    keyed = {(route.method, route.path) for routes in (openai.routes, text.routes) for route in routes}
    named = {("GET", "/v1/models/{name:.+}") if path.endswith("/tiny") else (how, path) for how, path in KEYED_ROUTES}
    assert keyed == named
    assert {route.path for route in health.routes} == set(OPEN_ROUTES)


async def test_a_tenant_is_known_by_its_key_and_not_by_what_it_says(client: Any) -> None:
    name = "guidevane_tenant_generation_tokens_total{{tenant={}}}"
    before = await client.metrics()
    headers = key_of("b", **{"X-Tenant-Id": "a"})
    status, _, _ = await client.post("/v1/completions", SHORT, headers=headers)
    after = await client.metrics()
    assert status == 200
    grown = [after[name.format(one)] - before[name.format(one)] for one in ("a", "b")]
    assert grown == [0, 1]


# ----------------------------------------------------------------------------------------------------------------- caps


async def test_500_posts_at_once_never_exceed_a_cap(client: Any) -> None:
    posts = [asyncio.create_task(client.post("/v1/completions", LONG, headers=key_of("capped"))) for _ in range(500)]
    await client.wait_for_metric("guidevane_tenant_rejections_total{reason=tenant_concurrency,tenant=capped}", 495)
    assert (await client.metrics())[in_flight("capped")] == 5
    for post in posts:
        if not post.done():
            post.cancel()
    answers = [one for one in await asyncio.gather(*posts, return_exceptions=True) if isinstance(one, tuple)]
    assert len(answers) == 495
    assert {(status, body["error"]["code"]) for status, body, _ in answers} == {(429, "tenant_concurrency")}
    assert all(1 <= int(headers["Retry-After"]) <= 120 for _, _, headers in answers)
    await client.wait_for_metric(in_flight("capped"), 0)
    await client.wait_until_idle()


async def test_a_tenants_choices_come_in_all_or_none(client: Any) -> None:
    async with holding(client, "capped", 2):
        status, body, _ = await client.post("/v1/completions", {**SHORT, "n": 4}, headers=key_of("capped"))
        assert (status, body["error"]["code"]) == (429, "tenant_concurrency")
        assert (await client.metrics())[in_flight("capped")] == 2
    status, _, _ = await client.post("/v1/completions", {**SHORT, "n": 5}, headers=key_of("capped"))
    assert status == 200
    status, body, _ = await client.post("/v1/completions", {**SHORT, "n": 6}, headers=key_of("capped"))
    assert (status, body["error"]["param"]) == (400, "n")


async def test_a_tenants_waiting_tokens_are_capped_and_others_come_in(client: Any) -> None:
    async with holding(client, "a", 2):
        waiting = asyncio.create_task(
            client.post("/v1/completions", {**SHORT, "prompt": "a" * 90}, headers=key_of("brief"))
        )
        await client.wait_for_metric("guidevane_tenant_queued_tokens{tenant=brief}", 90)
        status, body, headers = await client.post(
            "/v1/completions", {**SHORT, "prompt": "a" * 20}, headers=key_of("brief")
        )
        assert (status, body["error"]["code"]) == (429, "tenant_token_budget")
        assert int(headers["Retry-After"]) >= 1
        other = asyncio.create_task(client.post("/v1/completions", {**SHORT, "prompt": "a" * 200}, headers=key_of("b")))
        await client.wait_for_metric("guidevane_tenant_queued_tokens{tenant=b}", 200)
    assert [(await one)[0] for one in (waiting, other)] == [200, 200]


# ------------------------------------------------------------------------------------------------------------ isolation


async def cached_tokens(client: Any, name: str, prompt: str, **more: Any) -> int:
    _, body, _ = await client.post("/v1/completions", {**SHORT, "prompt": prompt, **more}, headers=key_of(name))
    return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_no_tenant_finds_what_another_one_computed(client: Any) -> None:
    prompt = "a prompt of more than one block, which two tenants send alike"
    assert await cached_tokens(client, "a", prompt) == 0
    assert await cached_tokens(client, "a", prompt) > 0
    assert await cached_tokens(client, "b", prompt) == 0
    assert await cached_tokens(client, "b", prompt) > 0


async def test_a_cache_salt_divides_a_tenant_further(client: Any) -> None:
    prompt = "another prompt of more than one block, with and without salt"
    assert await cached_tokens(client, "a", prompt, cache_salt="user 1") == 0
    assert await cached_tokens(client, "a", prompt, cache_salt="user 2") == 0
    assert await cached_tokens(client, "a", prompt) == 0
    assert await cached_tokens(client, "a", prompt, cache_salt="user 1") > 0


# --------------------------------------------------------------------------------------------------------------- shares


async def ends_in_order(client: Any, posts: list[tuple[str, dict[str, Any], dict[str, str]]]) -> list[str]:
    """Send all while nobody can come in, then let them; the labels as their answers come."""
    order: list[str] = []

    async def post(label: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        status, _, _ = await client.post("/v1/completions", body, headers=headers)
        assert status == 200
        order.append(label)

    async with asyncio.TaskGroup() as group, holding(client, "b", 2):
        for one in posts:
            group.create_task(post(*one))
        await client.wait_for_metric("vllm:num_requests_waiting", len(posts))
    return order


async def test_a_hog_gets_no_more_than_its_share(client: Any) -> None:
    body = {"prompt": "a", "max_tokens": 4, "ignore_eos": True}
    hogs = [("hog", body, key_of("hog"))] * 60
    smalls = [(name, body, key_of(name)) for name in SMALL for _ in range(3)]
    order = await ends_in_order(client, hogs + smalls)
    last_small = max(at for at, label in enumerate(order) if label != "hog")
    # All requests cost the same: while the small tenants have theirs served, three each, the hog gets three. Two run
    # at once, and the answers of one step may come in any order.
    assert Counter(order[:last_small])["hog"] <= 3 + 4


async def test_offline_work_gets_its_share_beside_interactive_work(client: Any) -> None:
    body = {"prompt": "a", "max_tokens": 4, "ignore_eos": True}
    offline = [
        *([("offline", {**body, "service_tier": "flex"}, key_of("a"))] * 15),
        *([("offline", body, key_of("a", **{"X-Request-Class": "offline"}))] * 15),
    ]
    interactive = [("interactive", body, key_of("a"))] * 36
    order = await ends_in_order(client, offline + interactive)
    last_interactive = max(at for at, label in enumerate(order) if label == "interactive")
    # Nine to one: 36 beside 4, and what runs at the same time.
    assert 2 <= Counter(order[:last_interactive])["offline"] <= 4 + 4
