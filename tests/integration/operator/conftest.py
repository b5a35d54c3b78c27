"""The operator against an API in memory, pods with real admin ports, and a Prometheus that says what it is told.

Everything speaks over sockets: kopf and our client to the API, the operator to pods and Prometheus.
"""

import asyncio
import base64
import copy
import itertools
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import attrs
import kmock
import kopf
import pytest
from aiohttp import web

from guidevane_api.admin import LimitsPatch, LimitsSource, LimitsView
from guidevane_api.limits import Envelope, SchedulerLimits
from guidevane_operator.app import GuidevaneOperator
from guidevane_operator.handlers import build_registry
from guidevane_operator.kube import load_configuration
from guidevane_operator.settings import Settings

KINDS = {
    "guidevane.dev/v1alpha1/llmservices": "LLMService",
    "v1/pods": "Pod",
    "v1/services": "Service",
    "v1/configmaps": "ConfigMap",
    "v1/secrets": "Secret",
    "v1/serviceaccounts": "ServiceAccount",
    "v1/namespaces": "Namespace",
    "v1/events": "Event",
    "events.k8s.io/v1/events": "Event",
    "apps/v1/deployments": "Deployment",
    "policy/v1/poddisruptionbudgets": "PodDisruptionBudget",
    "apiextensions.k8s.io/v1/customresourcedefinitions": "CustomResourceDefinition",
}
SELECTED = "guidevane.dev/name"
"""Label that the operator's watches of pods and Deployments select by."""
LLM = "guidevane.dev/v1alpha1/llmservices"
VERBS = ("get", "list", "watch", "create", "patch", "delete")
NAMESPACE = "demo"
KUBECONFIG = """
{{apiVersion: v1, kind: Config, current-context: x, contexts: [{{name: x, context: {{cluster: c, user: u}}}}],
clusters: [{{name: c, cluster: {{server: "{server}"}}}}], users: [{{name: u, user: {{}}}}]}}
"""


@attrs.define(kw_only=True, eq=False)
class ApiServer(kmock.KubernetesEmulator):
    """kmock's API in memory, plus what our writes rely on: server-side apply, status apart from spec, conflicts."""

    status_faults: list[int] = attrs.field(factory=list)
    """Answers to the next PATCHes of a status, oldest first."""
    away: bool = False
    """Answers 503 to everything."""
    writes: Counter[str] = attrs.field(factory=Counter)
    secret_reads: int = 0
    versions: Iterator[int] = attrs.field(factory=lambda: itertools.count(100))

    async def _handle(self, request: Any) -> web.StreamResponse:
        if self.away:
            return web.json_response({"kind": "Status", "code": 503, "reason": "ServiceUnavailable"}, status=503)
        if request.method.value in ("POST", "PATCH", "DELETE") and request.resource is not None:
            self.writes[f"{request.method.value} {request.resource.plural}/{request.subresource or ''}"] += 1
        if request.method.value == "GET" and request.resource is not None:
            self.secret_reads += request.resource.plural == "secrets"
        if request.method.value == "PATCH" and request.name is not None:
            return await self._patch(request)
        if request.method.value == "POST" and isinstance(request.data, dict):
            self._stamp(request.data, {})
        if request.method.value == "GET" and "labelSelector" in request.params and "watch" not in request.params:
            return self._list(request)
        return await super()._handle(request)

    async def _patch(self, request: Any) -> web.StreamResponse:
        if request.subresource == "status" and self.status_faults:
            status = self.status_faults.pop(0)
            return web.json_response({"kind": "Status", "code": status, "reason": "Injected"}, status=status)
        key = (request.resource, request.namespace, request.name)
        before = self._stored(key)
        is_apply = "apply-patch" in request.headers["Content-Type"]
        if not before and not is_apply:
            return web.json_response({"kind": "Status", "code": 404, "reason": "NotFound"}, status=404)
        wanted = request.data.get("metadata", {}) if not is_apply else {}
        if any(wanted.get(name, held) != held for name, held in before.get("metadata", {}).items()):
            return web.json_response({"kind": "Status", "code": 409, "reason": "Conflict"}, status=409)
        patch = {"status": request.data["status"]} if request.subresource == "status" else request.data
        after = _merged(before, patch)
        if after != before:
            self._stamp(after, before)
            self._store(key, after)
            kind = "MODIFIED" if before else "ADDED"
            await self._buses[request.resource].put({"type": kind, "object": after})
        return web.json_response(after)

    def _store(self, key: Any, body: dict[str, Any]) -> None:
        if key in self.objects and not self.objects[key].deleted:
            self.objects[key].delete()
        if key in self.objects:
            self.objects[key].create(body)
        else:
            self.objects[key] = body

    def _stamp(self, body: dict[str, Any], before: dict[str, Any]) -> None:
        meta = body.setdefault("metadata", {})
        number = next(self.versions)
        meta["resourceVersion"] = str(number)
        meta.setdefault("uid", f"uid-{number}")
        changed = body.get("spec") != before.get("spec")
        meta["generation"] = before.get("metadata", {}).get("generation", 0) + (1 if changed else 0)

    def _list(self, request: Any) -> web.StreamResponse:
        label, _, value = request.params["labelSelector"].partition("=")
        items = [
            o.raw
            for (resource, namespace, _), o in self.objects.items()
            if resource == request.resource and request.namespace in (None, namespace) and not o.deleted
            if label in (labels := o.raw["metadata"].get("labels", {})) and value in ("", labels[label])
        ]
        return web.json_response({"items": items, "metadata": {}})

    def find(self, resource: str, name: str) -> dict[str, Any] | None:
        return self._stored((kmock.resource(resource), NAMESPACE, name)) or None

    def _stored(self, key: Any) -> dict[str, Any]:
        if key not in self.objects or self.objects[key].deleted:
            return {}
        return copy.deepcopy(self.objects[key].raw)

    def all_of(self, resource: str) -> list[dict[str, Any]]:
        wanted = kmock.resource(resource)
        return [o.raw for (found, _, _), o in self.objects.items() if found == wanted and not o.deleted]

    async def put(self, resource: str, body: dict[str, Any]) -> None:
        """Create an object, or write a whole new version of it, as a person or a controller would."""
        name = body["metadata"]["name"]
        before = self.find(resource, name) or {}
        after = copy.deepcopy(body)
        after["metadata"] = before.get("metadata", {}) | after["metadata"] | {"namespace": NAMESPACE}
        if resource == LLM and "status" in before:
            after["status"] = before["status"]  # only the status subresource changes it
        self._stamp(after, before)
        self._store((kmock.resource(resource), NAMESPACE, name), after)
        event = {"type": "MODIFIED" if before else "ADDED", "object": after}
        had, has = (SELECTED in found.get("metadata", {}).get("labels", {}) for found in (before, after))
        if had and not has:
            event = {"type": "DELETED", "object": before}  # for a watch with a selector it is gone
        await self._buses[kmock.resource(resource)].put(event)

    async def delete_object(self, resource: str, name: str) -> None:
        before = self.find(resource, name)
        self.objects[(kmock.resource(resource), NAMESPACE, name)].delete()
        await self._buses[kmock.resource(resource)].put({"type": "DELETED", "object": before})


def _merged(value: Any, patch: Any) -> Any:
    """RFC 7386; near enough to server-side apply for objects of one manager."""
    if not isinstance(patch, dict):
        return patch
    result = dict(value) if isinstance(value, dict) else {}
    for name, inner in patch.items():
        if inner is None:
            result.pop(name, None)
        else:
            result[name] = _merged(result.get(name), inner)
    return result


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

        @kopf.on.startup(registry=registry)
        def end_at_once(settings: kopf.OperatorSettings, **_: Any) -> None:
            settings.watching.server_timeout = settings.watching.client_timeout = 1

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
        self._thread = threading.Thread(target=asyncio.run, args=(coroutine,))
        self._thread.start()
        assert await asyncio.to_thread(ready.wait, 10), "the operator does not start"

    async def stop_operator(self) -> None:
        if self._thread is not None and self._stop is not None:
            self._stop.set()
            await asyncio.to_thread(self._thread.join, 20)
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

    async def until(self, condition: Callable[[], Any], timeout_s: float = 10) -> Any:
        """Wait for a condition; the last value it gave is in the failure."""
        async with asyncio.timeout(timeout_s):
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
