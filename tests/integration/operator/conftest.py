"""The operator against an API in memory, pods with real admin ports, and a Prometheus that says what it is told.

Everything speaks over sockets: kopf and our client to the API, the operator to pods and Prometheus.
"""

import asyncio
import base64
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kmock
import kopf
import pytest
from aiohttp import web

from guidevane_api.admin import LimitsPatch, LimitsSource, LimitsView
from guidevane_api.limits import Envelope, SchedulerLimits
from guidevane_operator.app import GuidevaneOperator
from guidevane_operator.handlers import WATCHED_CHILDREN, build_registry
from guidevane_operator.kube import load_configuration
from guidevane_operator.settings import Settings
from tests.integration.operator.api_server import KINDS, LLM, VERBS, ApiServer

KUBECONFIG = """
{{apiVersion: v1, kind: Config, current-context: x, contexts: [{{name: x, context: {{cluster: c, user: u}}}}],
clusters: [{{name: c, cluster: {{server: "{server}"}}}}], users: [{{name: u, user: {{}}}}]}}
"""


@dataclass
class FakeEngine:
    """The admin contract of one pod, over a real socket."""

    host: str
    port: int
    token: Callable[[], str]
    boot: int = 1
    epoch: int = 0
    limits: SchedulerLimits = field(default_factory=lambda: SchedulerLimits(max_num_seqs=8))
    refuse: dict[str, str] = field(default_factory=dict)
    silent: bool = False
    source: LimitsSource = LimitsSource.STARTUP
    accepted: list[LimitsPatch] = field(default_factory=list)
    seen_status: Callable[[], int | None] = lambda: None
    persisted_when_asked: list[int | None] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.Response:
        if self.silent:
            await asyncio.sleep(1)
        if request.headers.get("Authorization") != f"Bearer {self.token()}":
            return web.json_response({"error": {"message": "wrong token"}}, status=401)
        if request.method == "GET":
            return self.view()
        patch = LimitsPatch.model_validate(await request.json())
        self.persisted_when_asked.append(self.seen_status())
        if self.refuse:
            return web.json_response({"error": {"message": "refused", "errors": self.refuse}}, status=400)
        same = patch.epoch == self.epoch and self.accepted and patch.limits != self.accepted[-1].limits
        if patch.epoch < self.epoch or same:
            return web.json_response({"error": {"message": "stale, or another body"}}, status=409)
        self.epoch, self.limits, self.source = patch.epoch, self.limits.merged(patch.limits), patch.source
        self.accepted.append(patch)
        return self.view()

    def view(self) -> web.Response:
        limits = {"target": self.limits, "effective": self.limits, "startup": SchedulerLimits(), "ceiling": Envelope()}
        counts = {"num_running": 0, "num_waiting": 0}
        view = LimitsView(**limits, **counts, epoch=self.epoch, source=self.source, boot_id=f"boot-{self.boot}")
        return web.json_response(view.model_dump(mode="json", by_alias=True))

    def restart(self) -> None:
        """A new process: everything that was set is lost."""
        self.boot += 1
        self.epoch, self.limits = 0, SchedulerLimits(max_num_seqs=8)


@dataclass
class FakePrometheus:
    """Answers queries with the values it is told, scraped just now."""

    url: str = ""
    values: dict[str, float] = field(default_factory=dict)
    pods: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    """Protection lines that are over."""
    broken: bool = False
    queries: int = 0

    async def handle(self, request: web.Request) -> web.Response:
        self.queries += 1
        await request.post()
        if self.broken:
            return web.Response(status=503, text="starting up")
        now = 1_000_000.0
        result = [{"metric": {"signal": name}, "value": [now, str(value)]} for name, value in self.values.items()]
        result += [{"metric": {"signal": "scraped_at", "pod": pod}, "value": [now, str(now - 1)]} for pod in self.pods]
        result += [{"metric": {"signal": "guard_line", "line": line}, "value": [now, "1"]} for line in self.over]
        return web.json_response({"status": "success", "data": {"resultType": "vector", "result": result}})


@asynccontextmanager
async def serving(host: str, port: int, method: str, path: str, handle: Any) -> AsyncIterator[int]:
    """One route on a real socket; gives the port."""
    application = web.Application()
    application.router.add_route(method, path, handle)
    runner = web.AppRunner(application, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@dataclass
class Cluster:
    api: ApiServer
    prometheus: FakePrometheus
    settings: Settings
    stack: Any
    speed: float = 1.0
    """Seconds on the operator's clock in one of ours."""
    engines: dict[str, FakeEngine] = field(default_factory=dict)
    admin_port: int = 0
    health_port: int = 0
    _thread: threading.Thread | None = None
    _stop: threading.Event | None = None
    running: GuidevaneOperator | None = None

    async def start_operator(self) -> None:
        async def start() -> GuidevaneOperator:
            clock = lambda: time.monotonic() * self.speed  # noqa: E731
            self.running = GuidevaneOperator(self.settings, await load_configuration(), clock)
            return self.running

        registry = build_registry(start)

        # A loop of its own: at its end kopf cancels every task of the loop it ran in.
        self._stop, ready = threading.Event(), threading.Event()
        coroutine = kopf.operator(
            registry=registry,
            clusterwide=True,
            standalone=True,
            stop_flag=self._stop,
            ready_flag=ready,
            liveness_endpoint=f"http://127.0.0.1:{self.health_port}/healthz" if self.health_port else None,
        )
        begun = self.api.watches_begun
        self._thread = threading.Thread(target=asyncio.run, args=(coroutine,))
        self._thread.start()
        assert await asyncio.to_thread(ready.wait, 60), "the operator does not start"
        watches = 2 + len(WATCHED_CHILDREN)  # services and pods too
        await self.until(lambda: self.api.watches_begun >= begun + watches)

    async def stop_operator(self) -> None:
        if self._thread is not None and self._stop is not None:
            self._stop.set()
            await asyncio.to_thread(self._thread.join, 60)
            assert not self._thread.is_alive(), "the operator does not end"
        self._thread = None

    async def add_service(self, name: str = "chat", **blocks: Any) -> None:
        await self.api.put(LLM, self.service(name, **blocks))

    def service(self, name: str = "chat", **blocks: Any) -> dict[str, Any]:
        spec = {
            "replicas": 1,
            "model": {"uri": "file:///models/tiny"},
            "engine": {"adminPort": self.admin_port},
            "limits": {"maxNumSeqs": 8},
        }
        body = {"apiVersion": "guidevane.dev/v1alpha1", "kind": "LLMService", "metadata": {"name": name}}
        return body | {"spec": spec | blocks}

    async def add_pod(self, name: str, service: str = "chat", **status: Any) -> FakeEngine:
        engine = self.engines.get(name)
        if engine is None:
            host = f"127.0.7.{len(self.engines) + 1}"  # no client socket ever has this address
            engine = self.engines[name] = FakeEngine(host, 0, lambda: self.token(service))
            engine.seen_status = lambda: self.status(service).get("limits", {}).get("epoch")
            port = await self.stack.enter_async_context(
                serving(host, self.admin_port, "*", "/admin/limits", engine.handle)
            )
            engine.port = self.admin_port = port
        await self.put_pod(name, service, **status)
        return engine

    async def put_pod(self, name: str, service: str = "chat", ready: bool = True, **container: Any) -> None:
        revision = (self.deployment(service) or {}).get("spec", {}).get("template", {}).get("metadata", {})
        labels = revision.get("labels", {}) | {"guidevane.dev/name": service}
        state = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
        status = {
            "podIP": self.engines[name].host if name in self.engines else "",
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            "containerStatuses": [{"name": "runtime", "restartCount": 0, "state": state} | container],
        }
        ports = [{"name": "admin", "containerPort": self.admin_port}]
        spec = {"containers": [{"name": "runtime", "ports": ports}]}
        await self.api.put("v1/pods", {"metadata": {"name": name, "labels": labels}, "spec": spec, "status": status})

    def deployment(self, name: str = "chat") -> dict[str, Any] | None:
        return self.api.find("apps/v1/deployments", name)

    def status(self, name: str = "chat") -> dict[str, Any]:
        return dict((self.api.find(LLM, name) or {}).get("status") or {})

    def condition(self, kind: str, name: str = "chat") -> dict[str, Any]:
        found = {c["type"]: c for c in self.status(name).get("conditions", [])}
        return dict(found.get(kind, {}))

    def token(self, name: str = "chat") -> str:
        secret = self.api.find("v1/secrets", f"{name}-admin") or {"data": {"token": ""}}
        return base64.b64decode(secret["data"]["token"]).decode()

    def events(self) -> list[str]:
        return [event["reason"] for event in self.api.all_of("events.k8s.io/v1/events")]

    def note(self, reason: str) -> str:
        """What the first event with that reason says."""
        return next(e["note"] for e in self.api.all_of("events.k8s.io/v1/events") if e["reason"] == reason)

    async def until(self, condition: Callable[[], Any]) -> Any:
        """Wait for a condition. How soon it comes is no claim of these tests, and machines are busy."""
        async with asyncio.timeout(60):
            while not (found := condition()):  # noqa: ASYNC110 - what is waited for is another program's doing
                await asyncio.sleep(0.02)
        return found


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(ApiServer(strict=False))
        server = await stack.enter_async_context(kmock.Server(api))
        for path, kind in KINDS.items():
            info = kmock.ResourceInfo(kind=kind, namespaced=kind not in ("Namespace", "CustomResourceDefinition"))
            info.verbs = set(VERBS)
            info.subresources = {"status"} if kind == "LLMService" else set()
            api.resources[path] = info
        (tmp_path / "kubeconfig").write_text(KUBECONFIG.format(server=server.url))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        prometheus = FakePrometheus()
        port = await stack.enter_async_context(serving("127.0.0.1", 0, "POST", "/api/v1/query", prometheus.handle))
        prometheus.url = f"http://127.0.0.1:{port}"
        periods = {"admin_timeout_seconds": 0.5, "drift_seconds": 0.3, "status_seconds": 0.2, "key_seconds": 0.2}
        periods["resync_seconds"] = 86_400
        settings = Settings(prometheus_url=prometheus.url, **periods)
        cluster = Cluster(api, prometheus, settings, stack)
        # One port for the admin servers of all pods, each on an address of its own.
        cluster.admin_port = await stack.enter_async_context(
            serving("127.0.7.250", 0, "POST", "/api/v1/query", prometheus.handle)
        )
        try:
            yield cluster
        finally:
            await cluster.stop_operator()
