"""The real aiohttp apps over a real engine loop in a thread, with a fake model: what is live and why, and the guard."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from guidevane_api.limits import Envelope, SchedulerLimits
from guidevane_api.pod_files import ProtectionLines
from guidevane_runtime.core.door import AdmissionGate
from guidevane_runtime.core.fake_runner import FakeRunner
from guidevane_runtime.core.guard import Guard, GuardConfig, Sample
from guidevane_runtime.core.guard_steps import Line
from guidevane_runtime.core.messages import EngineSettings
from guidevane_runtime.core.plan import ScheduledBatch, StepOutput
from guidevane_runtime.engine.client import EngineClient
from guidevane_runtime.engine.local import thread_launcher
from guidevane_runtime.errors import EngineUnavailable
from guidevane_runtime.server.api.admin import AdminToken
from guidevane_runtime.server.app import create_admin_app, create_app
from guidevane_runtime.server.bodies import BodyReader
from guidevane_runtime.server.guard_watch import tick, watch_guard
from guidevane_runtime.server.limits_keeper import LimitsKeeper
from guidevane_runtime.server.metrics import ServerMetrics
from guidevane_runtime.server.services import Services
from guidevane_runtime.server.tenants_keeper import TenantsKeeper
from guidevane_runtime.server.text.tokenizer import SpecialTokens, Tokenizer
from guidevane_runtime.server.watched_file import WatchedFile

TOKEN = "t"
VOCAB_SIZE = 257
LIMITS = SchedulerLimits(
    max_num_seqs=2, long_context_threshold_tokens=64, max_model_len=4096, max_prompt_tokens=4096, max_output_tokens=4096
)
ENDLESS = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True}


class Clock:
    """The real one, and what a test adds to it."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


class PacedRunner:
    """A fake model of 2 ms per step, that can be held in its step, and broken."""

    def __init__(self) -> None:
        self._runner = FakeRunner(2048, 4, VOCAB_SIZE - 1)
        self.may_go = threading.Event()
        self.may_go.set()
        self.is_held = threading.Event()
        self.is_broken = False

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        time.sleep(0.002)
        if not self.may_go.is_set():
            self.is_held.set()
            self.may_go.wait(30.0)
        if self.is_broken:
            raise ZeroDivisionError("the model divided by zero")
        return self._runner.execute(batch)


@dataclass(frozen=True)
class Shape:
    vocab_size: int = VOCAB_SIZE


@dataclass(frozen=True)
class FakeModel:
    runner: PacedRunner
    config: Shape = field(default_factory=Shape)
    num_blocks: int = 2048
    block_size: int = 4
    dtype: str = "float32"
    device: str = "cpu"
    eos_token_ids: frozenset[int] = frozenset()
    max_model_len: int = 4096


@dataclass
class House:
    """Both ports, and what is behind them."""

    services: Services
    serving: TestClient[Any, Any]
    admin: TestClient[Any, Any]
    runner: PacedRunner
    clock: Clock

    async def ask(self, path: str, token: str = TOKEN) -> tuple[int, Any]:
        async with self.admin.get(path, headers={"Authorization": f"Bearer {token}"}) as response:
            return response.status, await response.json()

    async def limits(self) -> Any:
        return (await self.ask("/admin/limits"))[1]

    @asynccontextmanager
    async def running(self, *names: str, **changes: Any) -> AsyncIterator[None]:
        """Endless requests under these ids, with the engine; aborted at the exit."""
        tasks = []
        for name in names:
            post = self.serving.post("/v1/completions", json={**ENDLESS, **changes}, headers={"X-Request-Id": name})
            tasks.append(asyncio.create_task(post))
            await until(lambda name=name: self.services.live.named(name, 9))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: not self.services.live)

    async def hold(self) -> None:
        """The engine stays in its step, and reads no mail."""
        self.runner.may_go.clear()
        await until(self.runner.is_held.is_set)

    async def tick(self, guard: Guard, line: Line, value: float, count: int = 1) -> None:
        """Seconds in which a line has this value."""
        for _ in range(count):
            for _ in range(20):
                guard.observe(Sample(line, self.clock(), value))
            self.clock.ahead_s += 1.0
            await tick(self.services, guard)

    async def metric(self, name: str) -> float:
        async with self.serving.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        return float(next(line for line in lines if line.startswith(name)).rsplit(" ", 1)[1])


async def until(condition: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline_s, "not within 20 s"
        await asyncio.sleep(0.005)


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return Tokenizer(backend, SpecialTokens(eos="</s>"), None)


@asynccontextmanager
async def house(guard: Guard | None = None) -> AsyncIterator[House]:
    runner, clock, tokenizer = PacedRunner(), Clock(), byte_tokenizer()
    metrics = ServerMetrics(CollectorRegistry(), "m", 4096)
    limits = LimitsKeeper(
        LIMITS, Envelope(), clock, (lambda target: guard.effect(target).limits) if guard else lambda target: target
    )
    listeners: list[Services] = []
    engine = EngineClient(
        thread_launcher(lambda settings: FakeModel(runner)),
        on_report=lambda report: [services.engine_reported(report) for services in listeners] and None,
    )
    with ThreadPoolExecutor(1) as pool:
        services = Services(
            model_name="m",
            engine=engine,
            tokenizer=tokenizer,
            template=None,
            gate=AdmissionGate(limits=lambda: limits.in_force, clock=clock),
            limits=limits,
            tenants=TenantsKeeper(),
            bodies=BodyReader(clock),
            metrics=metrics,
            pool=pool,
            hang_after_s=30.0,
            guard=guard,
            clock=clock,
        )
        listeners.append(services)
        await engine.start(EngineSettings(model_path="/models/fake", limits=LIMITS, envelope=Envelope()))
        await engine.wait_ready()
        services.note_engine()
        serving = TestClient(TestServer(create_app(services), handler_cancellation=True))
        admin = TestClient(TestServer(create_admin_app(services, AdminToken(lambda: TOKEN, TOKEN))))
        async with serving, admin:
            try:
                yield House(services, serving, admin, runner, clock)
            finally:
                runner.may_go.set()
                await engine.stop()


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


# ------------------------------------------------------------------------------------------------------------- guard


async def test_the_guard_moves_what_is_obeyed_and_leaves_the_target() -> None:
    guard = Guard(GuardConfig({Line.ITL: 100.0}))
    async with house(guard) as opened:
        await opened.tick(guard, Line.ITL, 300.0, 11)
        view = await opened.limits()
        assert (view["target"]["prefillChunkSize"], view["effective"]["prefillChunkSize"]) == (2048, 512)
        assert (view["epoch"], view["source"]) == (0, "Startup")
        assert await opened.metric("guidevane_guard_level{") == 1
        assert await opened.metric('guidevane_guard_line_breached{engine="0",line="itl_p95_ms"') == 1
        assert (
            await opened.metric('guidevane_limit{engine="0",kind="target",model_name="m",name="prefillChunkSize"')
            == 2048
        )
        await opened.tick(guard, Line.ITL, 10.0, 60)
        view = await opened.limits()
        assert view["effective"] == view["target"]
        assert await opened.metric("guidevane_guard_level{") == 0


async def test_a_patch_while_the_guard_acts_is_the_operators_and_is_guarded() -> None:
    guard = Guard(GuardConfig({Line.ITL: 100.0}))
    async with house(guard) as opened:
        await opened.tick(guard, Line.ITL, 300.0, 11)
        patch = {"epoch": 1, "limits": {"prefillChunkSize": 1024}}
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with opened.admin.patch("/admin/limits", json=patch, headers=headers) as response:
            view = await response.json()
            assert response.status == 200
        assert (view["epoch"], view["source"]) == (1, "Spec")
        assert (view["target"]["prefillChunkSize"], view["effective"]["prefillChunkSize"]) == (1024, 256)
        assert (
            await opened.metric('guidevane_limit{engine="0",kind="target",model_name="m",name="prefillChunkSize"')
            == 1024
        )


async def test_long_prompts_are_refused_beside_others_and_let_in_alone() -> None:
    guard = Guard(GuardConfig({Line.TTFT: 100.0}))
    body = {"prompt": "a" * 65, "max_tokens": 1}
    async with house(guard) as opened:
        await opened.tick(guard, Line.TTFT, 300.0, 11)
        async with opened.serving.post("/v1/completions", json=body) as response:
            assert response.status == 200
        async with opened.running("a"):
            async with opened.serving.post("/v1/completions", json=body) as response:
                refused = await response.json()
                assert (response.status, response.headers["Retry-After"]) == (503, "30")
            assert refused["error"]["code"] == "long_context"
            async with opened.serving.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}) as response:
                assert response.status == 200
        rejections = 'guidevane_admission_rejections_total{engine="0",model_name="m",reason="long_context"'
        assert await opened.metric(rejections) == 1


async def test_offline_work_is_held_back_while_the_guard_says_so_and_not_refused() -> None:
    guard = Guard(GuardConfig({Line.TTFT: 100.0}))
    offline = {"json": {"prompt": "a", "max_tokens": 1}, "headers": {"X-Request-Class": "offline", "X-Request-Id": "o"}}
    async with house(guard) as opened:
        await opened.tick(guard, Line.TTFT, 300.0, 22)
        async with opened.running("a"):
            post = asyncio.create_task(opened.serving.post("/v1/completions", **offline))
            await until(lambda: opened.services.stats.num_waiting == 1)
            _, body = await opened.ask("/admin/requests/o")
            (one,) = body["requests"]
            assert (one["state"], one["class"], one["heldBackBy"]["limit"]) == ("waiting", "offline", "offlinePaused")
            _, view = await opened.ask("/admin/tenants")
            assert view["offlinePaused"]
            # Without a file there is one tenant, without a name.
            assert [(one["name"], one["numInFlight"], one["numKeys"]) for one in view["tenants"]] == [("", 2, 0)]
            async with opened.serving.post("/v1/completions", json=offline["json"]) as response:
                assert response.status == 200
            await opened.tick(guard, Line.TTFT, 10.0, 60)
            async with await post as response:
                assert response.status == 200


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


async def test_a_dry_run_is_seen_and_not_felt() -> None:
    guard = Guard(GuardConfig({Line.ITL: 100.0, Line.TTFT: 100.0}, dry_run=True))
    async with house(guard) as opened:
        await opened.tick(guard, Line.ITL, 300.0, 40)
        view = await opened.limits()
        assert view["effective"] == view["target"]
        assert opened.services.gate.long_context_pause_s is None
        assert await opened.metric("guidevane_guard_level{") == 3


async def test_the_guard_is_asked_again_and_again() -> None:
    guard = Guard(GuardConfig({Line.ITL: 100.0}))
    async with house(guard) as opened:
        watching = asyncio.create_task(watch_guard(opened.services, guard, tick_s=0.01))
        for _ in range(20):
            guard.observe(Sample(Line.ITL, opened.clock(), 300.0))
        breached = opened.services.metrics.registry.get_sample_value
        labels = {"model_name": "m", "engine": "0", "line": "itl_p95_ms"}
        await until(lambda: breached("guidevane_guard_line_breached", labels) == 1)
        watching.cancel()
        await asyncio.wait((watching,))


async def test_new_lines_in_the_file_reach_the_guard_while_it_watches(tmp_path: Path) -> None:
    guard = Guard(GuardConfig({Line.ITL: 100.0}))
    file = tmp_path / "slo.json"
    file.write_text('{"itlP95Milliseconds": 100}')
    slo_file = WatchedFile(file, "--slo-file", ProtectionLines)
    slo_file.read()
    async with house(guard) as opened:
        watching = asyncio.create_task(watch_guard(opened.services, guard, slo_file, tick_s=0.01))
        file.write_text('{"mode": "dry-run", "ttftP95Milliseconds": 700}')
        await until(lambda: guard.config.dry_run)
        watching.cancel()
        await asyncio.wait((watching,))
    assert guard.config.lines == {Line.TTFT: 700.0}
