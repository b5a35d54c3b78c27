"""Several tenants on one runtime, over HTTP: keys, caps, isolation, shares, deadlines, and a file that changes."""

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

LIMITS = {
    "maxModelLen": 16384,
    "maxNumSeqs": 2,
    "maxQueuedRequests": 1000,
    "waitingTimeoutMilliseconds": 60000,
}
LONG = {"prompt": "a", "max_tokens": 16000, "ignore_eos": True}
"""Outlives every wait of this file, and is aborted."""
SHORT = {"prompt": "a", "max_tokens": 1}
OPEN_ROUTES = ("/livez", "/readyz", "/health", "/ping", "/version", "/metrics")
KEYED_ROUTES = (
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
)
SMALL = [f"small{number}" for number in range(9)]


def tenant(name: str, **terms: Any) -> dict[str, Any]:
    """Its key says whose it is."""
    return {"name": name, "keySha256": [hashlib.sha256(f"key-of-{name}".encode()).hexdigest()], **terms}


TENANTS = [
    tenant("a"),
    tenant("b"),
    tenant("capped", maxInFlight=5),
    tenant("brief", maxQueuedTokens=100),
    tenant("hog"),
    *(tenant(name) for name in SMALL),
]


def key_of(name: str, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer key-of-{name}", **more}


class TenantsFile:
    """As Kubernetes mounts it: the name stays, what it points to is swapped."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tenants.json"
        self._num_versions = 0

    def write(self, tenants: list[dict[str, Any]] | None = None, text: str | None = None) -> None:
        self._num_versions += 1
        version = self.path.with_name(f"version{self._num_versions}")
        version.write_text(json.dumps({"tenants": tenants}) if text is None else text)
        link = self.path.with_name("next")
        link.symlink_to(version)
        link.rename(self.path)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> TenantsFile:
    made = TenantsFile(tmp_path_factory.mktemp("tenants"))
    made.write(TENANTS)
    return made


@pytest.fixture(scope="module")
def shared(start_runtime: Any, tiny_model: Path, file: TenantsFile) -> Iterator[Any]:
    """Two at once; who waits, waits long."""
    flags = ("--served-model-name", "tiny", "--dtype", "float32", "--kv-cache-memory", "4Mi")
    with start_runtime(tiny_model, *flags, "--tenants-file", str(file.path), limits=LIMITS) as started:
        started.wait_for_ports()
        started.wait_for_engine()
        yield started


@pytest.fixture
async def client(shared: Any, connect: Any) -> AsyncIterator[Any]:
    async with connect(shared) as opened:
        yield opened


def in_flight(name: str) -> str:
    return f"guidevane_tenant_requests_in_flight{{tenant={name}}}"


@asynccontextmanager
async def holding(client: Any, name: str, count: int) -> AsyncIterator[None]:
    """That many long requests of a tenant between the door and their end; aborted at the exit."""
    tasks = [asyncio.create_task(client.post("/v1/completions", LONG, headers=key_of(name))) for _ in range(count)]
    try:
        await client.wait_for_metric(in_flight(name), count)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.wait_until_idle()


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


async def test_a_change_of_the_file_holds_at_once_and_harms_no_stream(client: Any, file: TenantsFile) -> None:
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
        file.write([tenant("a"), tenant("capped", maxInFlight=1), tenant("new")])
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
        file.write(TENANTS)
        await wait_for_status(client, "b", 200)


async def test_a_bad_file_changes_nothing_and_is_seen(client: Any, file: TenantsFile) -> None:
    try:
        file.write(text='{"tenants": [{"name": "a", "weight": 0}]}')
        await client.wait_for_metric("guidevane_tenants_file_good", 0)
        assert (await client.post("/v1/completions", SHORT, headers=key_of("b")))[0] == 200
        warnings = [one for one in client.runtime.entries if one["message"] == "file ignored"]
        assert "tenants.0.weight" in warnings[-1]["reason"]
    finally:
        file.write(TENANTS)
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
