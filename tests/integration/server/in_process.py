"""A whole server over a paced fake model, in this process: what the tests of its insides drive."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry

from guidevane_api.limits import Envelope, SchedulerLimits
from guidevane_runtime.core.door import AdmissionGate
from guidevane_runtime.core.fake_runner import FakeRunner
from guidevane_runtime.core.guard import Guard, Sample
from guidevane_runtime.core.guard_steps import Line
from guidevane_runtime.core.messages import EngineSettings
from guidevane_runtime.core.plan import ScheduledBatch, StepOutput
from guidevane_runtime.engine.client import EngineClient
from guidevane_runtime.engine.local import thread_launcher
from guidevane_runtime.server.api.admin import AdminToken
from guidevane_runtime.server.app import create_admin_app, create_app
from guidevane_runtime.server.bodies import BodyReader
from guidevane_runtime.server.guard_watch import tick
from guidevane_runtime.server.limits_keeper import LimitsKeeper
from guidevane_runtime.server.metrics import ServerMetrics
from guidevane_runtime.server.services import Services
from guidevane_runtime.server.tenants_keeper import TenantsKeeper
from guidevane_runtime.server.text.tokenizer import SpecialTokens, Tokenizer
from tests.byte_tokenizer import byte_tokenizer

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
    deadline_s = time.monotonic() + 120.0
    while not condition():
        assert time.monotonic() < deadline_s, "not within 120 s"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def house(guard: Guard | None = None) -> AsyncIterator[House]:
    tokenizer = Tokenizer(byte_tokenizer("</s>"), SpecialTokens(eos="</s>"), None)
    runner, clock = PacedRunner(), Clock()
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
            gate=AdmissionGate(limits=lambda: limits.in_force, clock=clock, target=lambda: limits.target),
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
        serving = TestClient(TestServer(create_app(services)))
        admin = TestClient(TestServer(create_admin_app(services, AdminToken(lambda: TOKEN, TOKEN))))
        for client in (serving, admin):
            await client.server.start_server(auto_decompress=False)
        async with serving, admin:
            try:
                yield House(services, serving, admin, runner, clock)
            finally:
                runner.may_go.set()
                await engine.stop()
