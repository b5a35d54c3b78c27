"""The server's hold on its engine: requests in, streams out, and a new engine when one dies. No torch, no HTTP."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import TypeVar

from guidevane_runtime.core.messages import (
    Abort,
    AbortCause,
    EngineFailed,
    EngineReady,
    EngineSettings,
    Event,
    Explain,
    Explained,
    Explanation,
    FinishReason,
    RequestOutput,
    SetLimits,
    SetTargets,
    SetTenants,
    Shutdown,
    StepReport,
    Submit,
)
from guidevane_runtime.engine.link import EngineLink, Launcher, process_launcher
from guidevane_runtime.engine.stream import RequestStream
from guidevane_runtime.errors import EngineUnavailable, StartError

logger = logging.getLogger(__name__)

Told = TypeVar("Told", StepReport, EngineFailed)

MAX_BACKOFF_S = 30.0
MAX_FAILED_STARTS = 3
"""Starts in a row that never got ready; after them a restart will not help either."""


class EngineState(StrEnum):
    """Requests are taken in READY only."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


class EngineClient:
    """One engine at a time. Lives on one event loop; every method is called from it."""

    def __init__(
        self,
        launch: Launcher | None = None,
        *,
        hang_timeout_s: float = 120.0,
        on_report: Callable[[StepReport], None] | None = None,
        on_failure: Callable[[EngineFailed], None] | None = None,
    ) -> None:
        """hang_timeout_s: silence of a ready engine after which it is taken for dead. Above its longest step."""
        self._launch = launch or process_launcher()
        self._hang_timeout_s = hang_timeout_s
        self._on_report = on_report
        self._on_failure = on_failure
        self._link: EngineLink | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._streams: dict[str, RequestStream] = {}
        self._limits: SetLimits | None = None
        self._tenants: SetTenants | None = None
        self._targets: SetTargets | None = None
        self._waiting_for_epoch: list[tuple[int, asyncio.Future[StepReport]]] = []
        self._queries: dict[int, asyncio.Future[tuple[Explanation, ...]]] = {}
        self._query_ids = itertools.count(1)
        self._settled = asyncio.Event()
        self._last_heard_s = 0.0
        self._failure: EngineFailed | None = None
        self.state = EngineState.STARTING
        self.ready: EngineReady | None = None
        """What the present engine said of itself; None while there is none."""
        self.last_report: StepReport | None = None
        """Of the present engine."""
        self.num_restarts = 0

    # -------------------------------------------------------------------------------------------------- life

    async def start(self, settings: EngineSettings) -> None:
        """Start the engine and keep one alive. Returns at once; see wait_ready."""
        assert self._supervisor is None, "an engine client is started once"
        self._supervisor = asyncio.create_task(self._supervise(settings), name="engine supervisor")

    async def wait_ready(self) -> EngineReady:
        """The engine's first word. Raises StartError when it can't start and a restart will not help."""
        while self.ready is None:
            if self.state in (EngineState.FAILED, EngineState.STOPPED):
                raise StartError(
                    self._failure.message if self._failure else "the engine was stopped before it was ready"
                )
            self._settled.clear()
            await self._settled.wait()
        return self.ready

    async def stop(self, grace_s: float = 5.0) -> None:
        """End the engine: what is left is aborted. Draining first is the server's business. Idempotent."""
        if self._supervisor is None:
            self._enter(EngineState.STOPPED)
            return
        self._enter(EngineState.STOPPED)
        self._send(Shutdown())
        await asyncio.wait({self._supervisor}, timeout=grace_s if self._link else 0.0)
        self._supervisor.cancel()
        await asyncio.wait({self._supervisor})

    # ---------------------------------------------------------------------------------------------- requests

    def submit(self, submit: Submit) -> RequestStream:
        """Hand a request over. Its stream ends with exactly one terminal output, whatever happens to the engine.

        Raises EngineUnavailable while no engine takes requests.
        """
        if self.state is not EngineState.READY:
            raise EngineUnavailable(f"the engine is {self.state}; try again in a few seconds")
        stream = self._streams[submit.request_id] = RequestStream(submit.request_id)
        self._send(submit)
        return stream

    def abort(self, request_id: str, cause: AbortCause) -> None:
        """End a request within one iteration. What has ended, or never was, is left alone."""
        if request_id in self._streams:
            self._send(Abort(request_id, cause))

    @property
    def num_in_flight(self) -> int:
        """Requests whose terminal output has not come yet."""
        return len(self._streams)

    async def explain(self, request_ids: Sequence[str]) -> tuple[Explanation, ...]:
        """What holds these requests back right now. Those that ended meanwhile are missing.

        Raises EngineUnavailable when no engine is there to say it, or it dies before it did.
        """
        if self.state is not EngineState.READY:
            raise EngineUnavailable(f"the engine is {self.state}; it can explain nothing")
        query_id = next(self._query_ids)
        answer = self._queries[query_id] = asyncio.get_running_loop().create_future()
        self._send(Explain(query_id, tuple(request_ids)))
        try:
            return await answer
        finally:
            self._queries.pop(query_id, None)

    # ------------------------------------------------------------------------------------------------ limits

    async def set_limits(self, command: SetLimits) -> StepReport:
        """Change the limits; returns the first report of an engine that obeys them, or newer ones.

        They outlive the engine: a restarted one gets them before its first request.
        """
        if self._limits is None or command.epoch > self._limits.epoch:
            self._limits = command
        if self.last_report is not None and self.last_report.epoch >= command.epoch:
            return self.last_report
        if self.state in (EngineState.FAILED, EngineState.STOPPED):
            raise EngineUnavailable(f"the engine is {self.state}; limits can't take effect")
        obeyed: asyncio.Future[StepReport] = asyncio.get_running_loop().create_future()
        self._waiting_for_epoch.append((command.epoch, obeyed))
        self._send(command)
        return await obeyed

    def set_tenants(self, command: SetTenants) -> None:
        """Share by these terms. They outlive the engine: a restarted one gets them before its first request."""
        self._tenants = command
        self._send(command)

    def set_targets(self, command: SetTargets) -> None:
        """Change the targets of steps. At any time: an engine that starts later gets them before its first request."""
        self._targets = command
        self._send(command)

    # ------------------------------------------------------------------------------------------------ health

    def heartbeat_age_s(self, now_s: float) -> float | None:
        """Since the present engine's last report; None when it has not reported yet. now_s: CLOCK_MONOTONIC."""
        return None if self.last_report is None else max(0.0, now_s - self.last_report.time_s)

    # -------------------------------------------------------------------------------------------- supervision

    async def _supervise(self, settings: EngineSettings) -> None:
        """One engine after the other, with a pause that doubles until one has worked."""
        num_failed = 0
        try:
            while True:
                failure, was_ready = await self._run_engine(settings)
                num_failed = 1 if was_ready else num_failed + 1
                cannot_start = num_failed >= MAX_FAILED_STARTS and not was_ready
                self._lose_engine(replace(failure, fatal=failure.fatal or cannot_start))
                if self.state is not EngineState.RESTARTING:
                    return
                await asyncio.sleep(min(2.0 ** (num_failed - 1), MAX_BACKOFF_S))
                self.num_restarts += 1
                settings = replace(settings, limits=self._limits.limits if self._limits else settings.limits)
        except Exception as error:
            # The edge of the task, which nobody awaits: a server without a supervisor would be not ready for ever.
            logger.exception("engine supervisor failed")
            self._lose_engine(EngineFailed(f"the engine can't be supervised: {error}", fatal=True))
        finally:
            self._fail_requests("the engine was stopped")
            self._refuse_queries()
            self._refuse_limits()

    async def _run_engine(self, settings: EngineSettings) -> tuple[EngineFailed, bool]:
        """Run one engine to its end. Why it ended, and whether it had been ready."""
        try:
            link = self._link = await EngineLink.open(self._launch, self._on_event)
        except OSError as error:
            return EngineFailed(f"the engine process can't be started: {error}", fatal=False), False
        grace_s = 0.0
        how_it_ended = "unknown"
        try:
            link.send(settings)
            is_hung = await self._watch(link)
            grace_s = 0.0 if is_hung else 1.0
        finally:
            self._link = None
            how_it_ended = await link.end(grace_s)
        was_ready = self.ready is not None
        if is_hung:
            return EngineFailed(
                f"the engine was silent for {self._hang_timeout_s} s and was ended", fatal=False
            ), was_ready
        return link.failure or EngineFailed(f"the engine died: {how_it_ended}", fatal=False), was_ready

    async def _watch(self, link: EngineLink) -> bool:
        """Wait for the engine's end. True: it hangs, so it has to be ended. Loading may take any time."""
        loop = asyncio.get_running_loop()
        while True:
            left_s = self._last_heard_s + self._hang_timeout_s - loop.time() if self.ready else self._hang_timeout_s
            if left_s <= 0:
                return True
            try:
                await asyncio.wait_for(link.closed.wait(), left_s)
            except TimeoutError:
                continue
            return False

    def _lose_engine(self, failure: EngineFailed) -> None:
        """The engine is gone, and with it every request that it had."""
        self.ready = self.last_report = None
        num_failed = self._fail_requests(failure.message)
        self._refuse_queries()
        if self.state is EngineState.STOPPED:
            return
        self._enter(EngineState.FAILED if failure.fatal else EngineState.RESTARTING)
        logger.error("engine lost", extra={"reason": failure.message, "num_requests_failed": num_failed})
        self._failure = failure
        _tell(self._on_failure, failure)

    def _fail_requests(self, message: str) -> int:
        streams, self._streams = self._streams, {}
        for request_id, stream in streams.items():
            stream.put(RequestOutput(request_id, finish_reason=FinishReason.ERROR, error=message))
        return len(streams)

    def _refuse_queries(self) -> None:
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(EngineUnavailable("the engine is gone; it took its requests with it"))

    def _refuse_limits(self) -> None:
        waiting, self._waiting_for_epoch = self._waiting_for_epoch, []
        for _, obeyed in waiting:
            if not obeyed.done():
                obeyed.set_exception(EngineUnavailable("the engine is gone; limits did not take effect"))

    def _enter(self, state: EngineState) -> None:
        self.state = state
        self._settled.set()

    # ------------------------------------------------------------------------------------------------ events

    def _on_event(self, event: Event) -> None:
        self._last_heard_s = asyncio.get_running_loop().time()
        match event:
            case StepReport():
                self._take_report(event)
            case EngineReady():
                self._take_ready(event)
            case Explained():
                if (answer := self._queries.get(event.query_id)) and not answer.done():
                    answer.set_result(event.explanations)
            case EngineFailed():
                logger.error("engine failed", extra={"reason": event.message, "fatal": event.fatal})

    def _take_ready(self, ready: EngineReady) -> None:
        self.ready = ready
        if self.state is not EngineState.STOPPED:
            self._enter(EngineState.READY)
        for command in (self._limits, self._tenants, self._targets):
            if command is not None:
                self._send(command)

    def _take_report(self, report: StepReport) -> None:
        self.last_report = report
        for output in report.outputs:
            self._deliver(output)
        self._tell_of_limits(report)
        _tell(self._on_report, report)

    def _deliver(self, output: RequestOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return
        if output.finish_reason is not None:
            del self._streams[output.request_id]
        stream.put(output)

    def _tell_of_limits(self, report: StepReport) -> None:
        if not self._waiting_for_epoch:
            return
        obeyed = [future for epoch, future in self._waiting_for_epoch if epoch <= report.epoch]
        self._waiting_for_epoch = [wait for wait in self._waiting_for_epoch if wait[0] > report.epoch]
        for future in obeyed:
            if not future.done():
                future.set_result(report)

    def _send(self, message: object) -> None:
        if self._link is not None:
            self._link.send(message)


def _tell(listener: Callable[[Told], None] | None, event: Told) -> None:
    """A listener's fault is its own: it must not take the engine down with it."""
    if listener is None:
        return
    try:
        listener(event)
    except Exception:
        logger.exception("a listener of the engine raised")
