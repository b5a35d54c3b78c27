"""The server's life: tokenizer, engine, two ports, and an orderly end."""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aiohttp import web
from prometheus_client import CollectorRegistry

from guidevane_api.limits import SchedulerLimits, limit_violations
from guidevane_api.pod_files import ProtectionLines, TenantsFile
from guidevane_runtime.core.door import AdmissionGate
from guidevane_runtime.core.guard import Guard, Sample
from guidevane_runtime.core.messages import EngineFailed, StepReport
from guidevane_runtime.engine.client import EngineClient
from guidevane_runtime.engine.link import process_launcher
from guidevane_runtime.errors import StartError
from guidevane_runtime.model_source import local_model_path
from guidevane_runtime.server.api.admin import AdminToken, watch_lease
from guidevane_runtime.server.app import create_admin_app, create_app
from guidevane_runtime.server.bodies import BodyReader
from guidevane_runtime.server.error_body import quotes_no_client
from guidevane_runtime.server.guard_watch import build_guard, targets_of, watch_guard
from guidevane_runtime.server.limits_keeper import LimitsKeeper
from guidevane_runtime.server.metrics import ServerMetrics
from guidevane_runtime.server.services import Services
from guidevane_runtime.server.tenants_keeper import TenantsKeeper
from guidevane_runtime.server.tenants_watch import watch_tenants
from guidevane_runtime.server.text.chat_template import ChatTemplate
from guidevane_runtime.server.text.tokenizer import load_tokenizer
from guidevane_runtime.server.watched_file import WatchedFile
from guidevane_runtime.settings import RuntimeSettings

logger = logging.getLogger(__name__)

KEEPALIVE_TIMEOUT_S = 120.0
"""Above the idle timeout of the pools in front (Go's is 90 s): the side that reuses must never lose that race."""
NUM_TOKENIZER_THREADS = 2
"""Long prompts tokenised at once: each takes a core from the engine."""
DRAIN_POLL_S = 0.05
HANG_TIMEOUT_S = 120.0
"""Silence after which the engine is ended, and what it holds is lost; four times hang_seconds where that is more."""
ABORT_GRACE_S = 5.0
"""For the last error events to reach their clients after a drain."""


class Server:
    """Owns everything between `python -m guidevane_runtime` and its exit status."""

    def __init__(self, settings: RuntimeSettings) -> None:
        self._settings = settings
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._engine = EngineClient(
            process_launcher(("--log-format", settings.log_format)),
            hang_timeout_s=max(HANG_TIMEOUT_S, 4.0 * settings.hang_seconds),
            on_report=self._on_report,
            on_failure=self._on_failure,
        )
        self._failure: EngineFailed | None = None
        self._services: Services | None = None

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises StartError when the engine can't run and a restart won't help."""
        settings = self._settings
        path = local_model_path(settings.model)
        services = self._services = build_services(settings, self._engine, path)
        self._engine.set_tenants(services.tenants.command)
        serving = listening(create_app(services), "serving", settings.host, settings.port)
        with self._signals(), services.pool:
            async with serving, self._admin_port(services):
                if services.guard is not None:
                    self._engine.set_targets(targets_of(services.guard))
                await self._engine.start(settings.engine_settings(str(path), services.limits.startup))
                try:
                    await self._serve(services)
                finally:
                    await self._engine.stop()
        if self._failure is not None:
            raise StartError(self._failure.message)

    async def _serve(self, services: Services) -> None:
        guard = services.guard
        looks = [lambda: watch_lease(services), lambda: watch_tenants(services)]
        if guard is not None:
            looks.append(lambda: watch_guard(services, guard, services.slo_file))
        watches = [asyncio.create_task(keep_watching(look)) for look in looks]
        try:
            await self._wait_for_stop(services)
            await self._drain(services)
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.wait(watches)

    async def _wait_for_stop(self, services: Services) -> None:
        """Until a signal, which may come while the model is still being loaded."""
        starting = asyncio.create_task(self._engine.wait_ready())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                services.note_engine()
                await stopping
        finally:
            starting.cancel()
            stopping.cancel()

    async def _drain(self, services: Services) -> None:
        """Not ready first, then wait for what is in flight."""
        deadline_s = services.clock() + self._settings.drain_seconds
        services.gate.drain()
        logger.info("draining", extra={"in_flight": services.gate.num_live, "drain_s": self._settings.drain_seconds})
        stopping = asyncio.create_task(self._stop_now.wait())
        while services.gate.num_live and services.clock() < deadline_s and not stopping.done():
            await asyncio.wait((stopping,), timeout=DRAIN_POLL_S)
        stopping.cancel()
        logger.info("drained", extra={"aborted": services.gate.num_live})

    @contextlib.asynccontextmanager
    async def _admin_port(self, services: Services) -> AsyncIterator[None]:
        first = self._settings.read_admin_token()
        if first is None:
            yield
            return
        token = AdminToken(self._settings.read_admin_token, first)
        async with listening(
            create_admin_app(services, token), "admin", self._settings.host, self._settings.admin_port
        ):
            yield

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        """The first asks to drain, the second to stop now."""
        (self._stop_now if self._stop.is_set() else self._stop).set()

    def _on_report(self, report: StepReport) -> None:
        if self._services is not None:
            self._services.engine_reported(report)

    def _on_failure(self, failure: EngineFailed) -> None:
        if self._services is not None:
            self._services.engine_lost()
        if failure.fatal:
            self._failure = failure
            self._stop.set()
            self._stop_now.set()


async def keep_watching(look: Callable[[], Awaitable[None]], pause_s: float = 1.0) -> None:
    """A look that fails is a bug of ours, and no reason to look no more: leases, keys and the guard hang on it."""
    while True:
        try:
            await look()
        except Exception:
            logger.exception("a watch failed, and goes on")
        await asyncio.sleep(pause_s)


def build_services(
    settings: RuntimeSettings, engine: EngineClient, model_path: Path, clock: Callable[[], float] = time.monotonic
) -> Services:
    """Everything that handlers need, from the settings; the engine is not started."""
    tokenizer = load_tokenizer(model_path)
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special) if tokenizer.chat_template else None
    slo_file = WatchedFile(settings.slo_file, "--slo-file", ProtectionLines) if settings.slo_file else None
    guard = build_guard(settings.protection, slo_file)
    limits = _limits_keeper(settings, guard, clock)
    watched = WatchedFile(settings.tenants_file, "--tenants-file", TenantsFile) if settings.tenants_file else None
    tenants = TenantsKeeper(watched)
    gate = AdmissionGate(
        limits=lambda: limits.in_force,
        clock=clock,
        policy=lambda: tenants.policy,
        target=lambda: limits.target,
    )
    metrics = ServerMetrics(
        CollectorRegistry(), settings.model_name, settings.envelope_max_model_len or limits.startup.max_model_len
    )
    metrics.limits_target(limits.target)
    metrics.limits_effective(limits.effective)
    metrics.tenants.listed = lambda: tenants.names
    metrics.tenants.uses = lambda: {name: gate.use_of(name) for name in gate.tenants}
    if guard is not None:
        metrics.on_sample = lambda line, value: guard.observe(Sample(line, clock(), value))
    return Services(
        model_name=settings.model_name,
        engine=engine,
        tokenizer=tokenizer,
        template=template,
        gate=gate,
        limits=limits,
        tenants=tenants,
        bodies=BodyReader(clock),
        metrics=metrics,
        pool=ThreadPoolExecutor(NUM_TOKENIZER_THREADS, thread_name_prefix="tokenize"),
        hang_after_s=settings.hang_seconds,
        guard=guard,
        slo_file=slo_file,
        clock=clock,
    )


def _limits_keeper(settings: RuntimeSettings, guard: Guard | None, clock: Callable[[], float]) -> LimitsKeeper:
    startup = _startup_limits(settings)
    if guard is None:
        return LimitsKeeper(startup, settings.envelope, clock)
    return LimitsKeeper(startup, settings.envelope, clock, lambda target: guard.effect(target).limits)


def _startup_limits(settings: RuntimeSettings) -> SchedulerLimits:
    limits = SchedulerLimits.resolve(settings.read_startup_limits(), settings.envelope)
    if errors := limit_violations(limits, settings.envelope):
        raise StartError(f"--limits-file {settings.limits_file}: {'; '.join(errors.values())}")
    return limits


@contextlib.asynccontextmanager
async def listening(app: web.Application, name: str, host: str, port: int) -> AsyncIterator[None]:
    """An open port. A client that disconnects cancels its handler, which frees what the request holds."""
    http_logger = logging.getLogger(f"{__name__}.http")
    http_logger.addFilter(quotes_no_client)
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        keepalive_timeout=KEEPALIVE_TIMEOUT_S,
        shutdown_timeout=ABORT_GRACE_S,
        auto_decompress=False,
        access_log=None,
        logger=http_logger,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, backlog=1024)
        try:
            await site.start()
        except (OSError, UnicodeError) as error:  # the latter for what can't be a host's name
            raise StartError(f"can't listen on {host}:{port}: {error}") from error
        logger.info("listening", extra={"port_name": name, "host": host, "port": runner.addresses[0][1]})
        yield
    finally:
        await runner.cleanup()
