"""The operator's background work: a queue of services to reconcile, and loops that visit every service in turn.

Each visit is guarded: one failing service is logged, counted and tried again, and holds up nobody else. The loops
note when they last ran; the health probe reads it.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from guidevane_operator.errors import OperatorError, RetryLaterError
from guidevane_operator.kube import ServiceKey

logger = logging.getLogger(__name__)

Visit = Callable[[ServiceKey], Awaitable[None]]
Clock = Callable[[], float]
"""Monotonic seconds."""

MAX_BACKOFF_S = 60.0
MAX_CONCURRENT = 20
"""Visits at once in one loop: a restarted operator does not hit the API server with every service in one moment."""
HUNG_S = 300.0
"""A visit that takes longer is hung: every call in it has a timeout far below."""


@dataclass
class Pulse:
    """When a loop last showed that it is alive."""

    clock: Clock
    ticked_at: float | None = None
    started: dict[ServiceKey, float] = field(default_factory=dict)
    """Visits under way, by their start time."""
    failures: int = 0

    def tick(self) -> None:
        """Note that the loop is running."""
        self.ticked_at = self.clock()

    def fault(self, max_age_s: float) -> str | None:
        """Why this loop counts as dead, or None."""
        now = self.clock()
        if self.ticked_at is None:
            return "has not started"
        if now - self.ticked_at > max_age_s:
            return f"last ticked {now - self.ticked_at:.0f} s ago, limit {max_age_s:.0f} s"
        hung = [key for key, since in self.started.items() if now - since > HUNG_S]
        return f"hangs in {hung[0].namespace}/{hung[0].name}" if hung else None


@dataclass(frozen=True)
class Failure:
    """Passes over one service that failed in a row."""

    consecutive: int
    message: str
    """What the last one said."""
    retry_at: datetime
    """Wall clock, for display only."""


class Loop:
    """Visits every service once per period, each in a task of its own."""

    def __init__(
        self,
        name: str,
        keys: Callable[[], Iterable[ServiceKey]],
        period_s: Callable[[ServiceKey], float],
        visit: Visit,
        clock: Clock,
        tick_s: float = 0.5,
    ) -> None:
        self.name = name
        self.pulse = Pulse(clock)
        self._keys, self._period_s, self._visit, self._clock = keys, period_s, visit, clock
        self._tick_s = tick_s
        self._due: dict[ServiceKey, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Run until cancelled."""
        try:
            while True:
                self.pulse.tick()
                self._start_due()
                await asyncio.sleep(self._tick_s)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start_due(self) -> None:
        """Start the visits whose time has come; a service still being visited is left alone."""
        now, known = self._clock(), set(self._keys())
        self._due = {key: at for key, at in self._due.items() if key in known}
        # The longest overdue first: where visits are too slow for their period, all come late and none is left out.
        for key in sorted(known, key=lambda key: self._due.get(key, now)):
            period_s = self._period_s(key)
            # The first visit comes somewhere in the first period, so that services spread out after a restart.
            due = self._due.setdefault(key, now + random.uniform(0, period_s))  # noqa: S311
            due = self._due[key] = min(due, now + period_s)  # the period may have become shorter
            if now >= due and key not in self.pulse.started and len(self.pulse.started) < MAX_CONCURRENT:
                self._due[key] = now + period_s * random.uniform(0.95, 1.05)  # noqa: S311
                self._spawn(key)

    def _spawn(self, key: ServiceKey) -> None:
        self.pulse.started[key] = self._clock()
        task = asyncio.create_task(self._guarded(key), name=f"{self.name}:{key.namespace}/{key.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, key: ServiceKey) -> None:
        """One visit that cannot end the loop."""
        try:
            await self._visit(key)
        except OperatorError as error:
            self.pulse.failures += 1
            extra = {"loop": self.name, "namespace": key.namespace, "service": key.name}
            logger.warning("loop failed: %s", error, extra=extra)
        except Exception:
            self.pulse.failures += 1
            logger.exception("loop failed", extra={"loop": self.name, "namespace": key.namespace, "service": key.name})
        finally:
            self.pulse.started.pop(key, None)


class WorkQueue:
    """Services to reconcile: added many times, visited once; a failed visit comes back after a growing pause."""

    name = "reconcile"

    def __init__(self, visit: Visit, clock: Clock, num_workers: int = 4, tick_s: float = 1.0) -> None:
        self.pulse = Pulse(clock)
        self.failures: dict[ServiceKey, Failure] = {}
        self._visit, self._clock, self._num_workers, self._tick_s = visit, clock, num_workers, tick_s
        self._ready: dict[ServiceKey, None] = {}
        self._wake = asyncio.Event()
        self._timers: dict[ServiceKey, asyncio.TimerHandle] = {}

    def add(self, key: ServiceKey) -> None:
        """Visit `key` as soon as a worker is free. Added during its visit, it is visited again."""
        self._ready[key] = None
        self._wake.set()

    def forget(self, key: ServiceKey) -> None:
        """The service is gone."""
        self._ready.pop(key, None)
        self.failures.pop(key, None)
        timer = self._timers.pop(key, None)
        if timer:
            timer.cancel()

    async def run(self) -> None:
        """Run until cancelled."""
        try:
            await asyncio.gather(*(self._work() for _ in range(self._num_workers)))
        finally:
            for timer in self._timers.values():
                timer.cancel()

    async def _work(self) -> None:
        while True:
            self.pulse.tick()
            key = self._take()
            if key is None:
                self._wake.clear()
                try:
                    async with asyncio.timeout(self._tick_s):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                continue
            await self._guarded(key)

    def _take(self) -> ServiceKey | None:
        """The oldest key that no other worker is busy with."""
        for key in self._ready:
            if key not in self.pulse.started:
                del self._ready[key]
                return key
        return None

    async def _guarded(self, key: ServiceKey) -> None:
        """One visit; a failure is retried after 1, 2, 4 ... 60 s."""
        self.pulse.started[key] = self._clock()
        try:
            await self._visit(key)
            self.failures.pop(key, None)
        except OperatorError as error:
            level = logging.INFO if isinstance(error, RetryLaterError) else logging.WARNING
            logger.log(level, "again: %s", error, extra={"namespace": key.namespace, "service": key.name})
            self._later(key, error)
        except Exception as error:
            self.pulse.failures += 1
            logger.exception("reconcile failed", extra={"namespace": key.namespace, "service": key.name})
            self._later(key, error)
        finally:
            self.pulse.started.pop(key, None)
            if key in self._ready:
                self._wake.set()

    def _later(self, key: ServiceKey, error: Exception) -> None:
        """Note the failure, and come back when its pause is over."""
        before = self.failures.get(key)
        consecutive = before.consecutive + 1 if before else 1
        delay_s = _backoff_s(consecutive)
        message = str(error) or type(error).__name__
        self.failures[key] = Failure(consecutive, message, datetime.now(UTC) + timedelta(seconds=delay_s))
        previous = self._timers.pop(key, None)
        if previous:
            previous.cancel()
        self._timers[key] = asyncio.get_running_loop().call_later(delay_s, self._again, key)

    def _again(self, key: ServiceKey) -> None:
        """The pause after a failure is over."""
        del self._timers[key]
        self.add(key)


def _backoff_s(failed: int) -> float:
    """1, 2, 4 ... 60 seconds."""
    return float(min(MAX_BACKOFF_S, 2.0 ** min(failed - 1, 10)))
