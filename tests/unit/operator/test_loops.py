"""Loops and queue: nothing is lost, nothing ends them."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from guidevane_operator.errors import RetryLaterError
from guidevane_operator.kube import ServiceKey
from guidevane_operator.loops import HUNG_S, MAX_CONCURRENT, Loop, Pulse, WorkQueue

KEYS = [ServiceKey("demo", name) for name in "abc"]


class Clock:
    """Time that a test moves."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Visits:
    """Notes visits; fails or hangs where told to."""

    def __init__(self) -> None:
        self.made: list[ServiceKey] = []
        self.failing: dict[ServiceKey, list[Exception]] = {}
        self.gate = asyncio.Event()
        self.blocked: set[ServiceKey] = set()

    async def __call__(self, key: ServiceKey) -> None:
        self.made.append(key)
        if key in self.blocked:
            await self.gate.wait()
        if self.failing.get(key):
            raise self.failing[key].pop(0)

    async def until(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.made) < count:  # noqa: ASYNC110 - a list has no event
                await asyncio.sleep(0.005)


@pytest.fixture
async def visits() -> Visits:
    return Visits()


@pytest.fixture
async def queue(visits: Visits) -> AsyncIterator[WorkQueue]:
    found = WorkQueue(visits, Clock(), tick_s=0.01)
    task = asyncio.create_task(found.run())
    yield found
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_key_added_many_times_is_visited_once(queue: WorkQueue, visits: Visits) -> None:
    for _ in range(10):
        queue.add(KEYS[0])
    queue.add(KEYS[1])
    await visits.until(2)
    await asyncio.sleep(0.03)
    assert sorted(visits.made) == KEYS[:2]


async def test_a_key_added_during_its_visit_is_visited_again_and_never_twice_at_once(
    queue: WorkQueue, visits: Visits
) -> None:
    visits.blocked = {KEYS[0]}
    queue.add(KEYS[0])
    await visits.until(1)
    queue.add(KEYS[0])
    await asyncio.sleep(0.03)
    assert visits.made == [KEYS[0]]
    visits.gate.set()
    await visits.until(2)


@pytest.mark.parametrize("error", [RetryLaterError("not yet"), ValueError("a bug")])
async def test_a_failed_visit_comes_back_and_holds_up_nobody(
    queue: WorkQueue, visits: Visits, error: Exception
) -> None:
    visits.failing = {KEYS[0]: [error]}
    queue.add(KEYS[0])
    queue.add(KEYS[1])
    await visits.until(3)
    assert visits.made.count(KEYS[0]) == 2
    assert queue.failures == {}


async def test_a_forgotten_key_is_not_tried_again(queue: WorkQueue, visits: Visits) -> None:
    visits.failing = {KEYS[0]: [ValueError("gone")]}
    queue.add(KEYS[0])
    await visits.until(1)
    await asyncio.sleep(0.02)
    queue.forget(KEYS[0])
    await asyncio.sleep(1.1)
    assert visits.made == [KEYS[0]]


async def test_a_loop_visits_all_keys_although_one_fails_and_one_hangs(visits: Visits) -> None:
    clock = Clock()
    loop = Loop("observe", lambda: KEYS, lambda _: 10.0, visits, clock, tick_s=0.002)
    visits.blocked = {KEYS[0]}
    visits.failing = {KEYS[1]: [ValueError("a"), ValueError("b")]}
    task = asyncio.create_task(loop.run())
    await asyncio.sleep(0.01)
    for _ in range(3):
        clock.now_s += 11.0
        await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [visits.made.count(key) for key in KEYS] == [1, 3, 3]
    assert loop.pulse.failures == 2


async def test_a_loop_makes_a_bounded_number_of_visits_at_once(visits: Visits) -> None:
    clock, keys = Clock(), [ServiceKey("demo", str(number)) for number in range(3 * MAX_CONCURRENT)]
    loop = Loop("observe", lambda: keys, lambda _: 10.0, visits, clock, tick_s=0.002)
    visits.blocked = set(keys)
    task = asyncio.create_task(loop.run())
    await asyncio.sleep(0.01)
    clock.now_s += 11.0
    await visits.until(MAX_CONCURRENT)
    await asyncio.sleep(0.02)
    assert len(visits.made) == MAX_CONCURRENT
    visits.gate.set()
    await visits.until(len(keys))
    assert sorted(visits.made) == sorted(keys)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_shorter_period_counts_at_once(visits: Visits) -> None:
    clock, period = Clock(), [1000.0]
    loop = Loop("retune", lambda: KEYS[:1], lambda _: period[0], visits, clock, tick_s=0.002)
    task = asyncio.create_task(loop.run())
    await asyncio.sleep(0.01)
    period[0] = 5.0
    await asyncio.sleep(0.01)
    clock.now_s += 6.0
    await visits.until(1)
    assert visits.made == KEYS[:1]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_a_pulse_tells_what_is_wrong() -> None:
    clock = Clock()
    pulse = Pulse(clock)
    assert pulse.fault(60) == "has not started"
    pulse.tick()
    assert pulse.fault(60) is None
    clock.now_s = 61
    assert pulse.fault(60) == "last ticked 61 s ago, limit 60 s"
    pulse.started[KEYS[0]] = clock.now_s
    clock.now_s += HUNG_S + 1
    pulse.tick()
    assert pulse.fault(60) == "hangs in demo/a"


async def test_a_service_gets_its_turn_however_many_slow_ones_there_are() -> None:
    """Visits take 5 s of a period of 15 s: more services than the loop can serve in time, and none is left out."""
    clock, made = Clock(), []
    keys = [ServiceKey("demo", f"slow-{number}") for number in range(100)]

    async def visit(key: ServiceKey) -> None:
        made.append(key)
        ends_s = clock() + 5
        while clock() < ends_s:  # noqa: ASYNC110 - the clock is moved by hand
            await asyncio.sleep(0)

    loop = Loop("observe", lambda: keys, lambda _: 15.0, visit, clock, tick_s=0)
    task = asyncio.create_task(loop.run())
    for _ in range(200):
        clock.now_s += 0.5
        for _ in range(8):
            await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    counts = [made.count(key) for key in keys]
    assert min(counts) > max(counts) // 2, sorted(counts)  # first turns are spread at random
