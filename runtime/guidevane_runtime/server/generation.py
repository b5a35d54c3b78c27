"""Runs the choices of one HTTP request and collects their news. Leaving it ends what still runs, whatever the cause."""

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from guidevane_runtime.core.leases import Lease
from guidevane_runtime.core.messages import AbortCause, CacheScope, RequestOutput, Submit
from guidevane_runtime.engine.stream import RequestStream
from guidevane_runtime.errors import EngineUnavailable, WaitedTooLong
from guidevane_runtime.server.admission import rejection_reason
from guidevane_runtime.server.choices import Choice, Delta
from guidevane_runtime.server.metrics import RequestTimes
from guidevane_runtime.server.services import Services


@dataclass(frozen=True, slots=True)
class _Run:
    """One choice on its way through the engine."""

    choice: Choice
    lease: Lease
    times: RequestTimes


class Generation:
    """An async context: on entry every choice is submitted, on exit the rest is aborted and every lease released.

    The first part of the exit is synchronous, so a cancelled handler frees its places before it can be cancelled again.
    """

    def __init__(
        self,
        services: Services,
        choices: Sequence[Choice],
        leases: Sequence[Lease],
        *,
        client_id: str,
        cache_salt: str = "",
    ) -> None:
        """client_id: the X-Request-Id, under which an administrator finds the choices."""
        self.choices = choices
        self.tenant = leases[0].standing.tenant
        self._services = services
        self._leases = leases
        self._client_id = client_id
        self._cache_salt = cache_salt
        self._unread: dict[int, Delta] = {}
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._live: dict[str, _Run] = {}

    async def __aenter__(self) -> Self:
        try:
            for choice, lease in zip(self.choices, self._leases, strict=True):
                self._start(choice, lease)
        except EngineUnavailable:
            self.end(AbortCause.CANCELLED)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(AbortCause.CLIENT_GONE if is_client_gone(kind) else AbortCause.CANCELLED)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def end(self, cause: AbortCause) -> None:
        """Abort what still runs and give every place back."""
        for request_id in list(self._live):
            self._services.engine.abort(request_id, cause)
            self._settle(request_id, "abort")
        for lease in self._leases:
            lease.release()
        for task in self._tasks:
            task.cancel()

    async def next(self) -> dict[int, Delta]:
        """Everything new since the last call, by choice; waits for it. Raises if a choice was given up."""
        await self._news.wait()
        self._news.clear()
        unread, self._unread = self._unread, {}
        if self._error is not None:
            if not unread:
                raise self._error
            self._news.set()
        return unread

    @property
    def is_done(self) -> bool:
        """Whether every choice has ended and its end was read."""
        return not self._unread and all(choice.finish_reason for choice in self.choices)

    def _start(self, choice: Choice, lease: Lease) -> None:
        request_id, standing = uuid.uuid4().hex, lease.standing
        submit = Submit(
            request_id,
            choice.prompt_token_ids,
            choice.params,
            standing.arrival_s,
            standing.priority,
            tenant=standing.tenant,
            request_class=standing.request_class,
            deadline_s=standing.deadline_s,
            cache_scope=CacheScope(standing.tenant, self._cache_salt),
        )
        stream = self._services.engine.submit(submit)
        self._services.live.add(request_id, self._client_id, standing)
        self._live[request_id] = _Run(
            choice, lease, RequestTimes(standing.arrival_s, standing.tenant, standing.request_class)
        )
        self._tasks.append(asyncio.create_task(self._run(stream)))

    async def _run(self, stream: RequestStream) -> None:
        try:
            async for output in stream:
                if self._take(output):
                    break
        except Exception as error:  # raised again where the handler waits
            self._give_up(stream.request_id, error)

    def _give_up(self, request_id: str, error: Exception) -> None:
        run = self._live.get(request_id)
        # In the queue, and once per body: one that had begun to answer was not refused.
        if isinstance(error, WaitedTooLong) and self._error is None and run and not run.choice.num_tokens:
            self._services.metrics.rejected(rejection_reason(error), self.tenant)
        self._error = self._error or error
        # Where the fault is ours, the engine still runs it.
        self._services.engine.abort(request_id, AbortCause.CANCELLED)
        self._settle(request_id, "abort" if isinstance(error, WaitedTooLong) else "error")
        self._news.set()

    def _take(self, output: RequestOutput) -> bool:
        """Take what a step brought. True: the choice has ended."""
        run = self._live[output.request_id]
        choice, before = run.choice, run.choice.num_tokens
        delta = choice.feed(output)
        if choice.num_tokens:
            run.lease.start()
        now_s = self._services.clock()
        self._services.metrics.output_arrived(run.times, output, choice, choice.num_tokens - before, now_s)
        if not delta.is_empty:
            self._add(choice.index, delta)
        if choice.finish_reason is None:
            return False
        if output.finish_reason is None:
            self._services.engine.abort(output.request_id, AbortCause.STOP_STRING)
        self._settle(output.request_id, choice.finish_reason)
        return True

    def _settle(self, request_id: str, outcome: str) -> None:
        """The one end of a choice. A second call finds nothing left to do."""
        run = self._live.pop(request_id, None)
        if run is not None:
            self._services.live.forget(request_id)
            run.lease.release()
            self._services.metrics.request_ended(run.times, run.choice, outcome, self._services.clock())

    def _add(self, index: int, delta: Delta) -> None:
        if index in self._unread:
            self._unread[index].merge(delta)
        else:
            self._unread[index] = delta
        self._news.set()


def is_client_gone(kind: type[BaseException] | None) -> bool:
    """Whether a handler ended because nobody reads its answer: aiohttp cancels it, or a write fails."""
    return kind is not None and issubclass(kind, (asyncio.CancelledError, ConnectionError))
