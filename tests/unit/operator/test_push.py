"""Whom a round over the pods asks, and when again."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from guidevane_api.admin import LimitsPatch, LimitsSource, LimitsView
from guidevane_api.limits import Envelope, PartialLimits, SchedulerLimits
from guidevane_operator.admin_client import Accepted, PushResult, Refused, Unreachable
from guidevane_operator.facts import PodFacts
from guidevane_operator.kube import ServiceKey
from guidevane_operator.limits_plan import next_desired
from guidevane_operator.push import LimitsPusher
from guidevane_operator.record import ServiceRecord

KEY = ServiceKey("demo", "chat")
PROMPT_S = 5.0
"""A pod that comes back has its limits within this time."""


def obeyed(patch: LimitsPatch, boot: str = "b1") -> Accepted:
    limits = SchedulerLimits(**patch.limits.given())
    return Accepted(
        LimitsView(
            target=limits,
            effective=limits,
            startup=SchedulerLimits(),
            ceiling=Envelope(),
            num_running=0,
            num_waiting=0,
            epoch=patch.epoch,
            source=LimitsSource.SPEC,
            boot_id=boot,
        )
    )


class FakeAdmin:
    """Pods by address; hangs, refuses or fails where told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.answers: dict[str, Callable[[LimitsPatch], PushResult]] = {}
        self.hung: set[str] = set()
        self.gate = asyncio.Event()

    async def patch(self, host: str, port: int, token: str, patch: LimitsPatch) -> PushResult:
        self.asked.append((host, patch.epoch))
        if host in self.hung:
            await self.gate.wait()
        return self.answers.get(host, obeyed)(patch)


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def pod(ip: str = "10.0.0.1", name: str = "chat-0", **facts: Any) -> PodFacts:
    found = PodFacts(name, f"u-{name}", ip, "r1", ready=True, terminating=False, restarts=0, started=True)
    return replace(found, **facts)


class Service:
    def __init__(self) -> None:
        self.clock, fake = Clock(), FakeAdmin()
        admin: Any = fake
        self.admin: FakeAdmin = fake
        self.pusher = LimitsPusher(admin, self.clock, lambda _: None)
        self.record = ServiceRecord(KEY, {"metadata": {"namespace": "demo", "name": "chat", "uid": "u1"}})
        self.record.token = "t"
        self.record.desired = next_desired(PartialLimits(max_num_seqs=4), Envelope(), None)
        self.record.pods = {"chat-0": pod()}

    async def round(self, renew: bool = False) -> None:
        """One round, and what the calls that nobody waits for bring."""
        await self.pusher.push(self.record, renew)
        for _ in range(5):
            await asyncio.sleep(0)
        await self.pusher.push(self.record)

    async def fail(self, rounds: int, answer: PushResult) -> float:
        """The pod fails so often in a row, asked each time as soon as its pause is over; gives the last pause."""
        self.admin.answers["10.0.0.1"] = lambda _: answer
        pause_s = 0.0
        for _ in range(rounds):
            self.clock.now_s += pause_s
            await self.round()
            pause_s = self.record.acks["chat-0"].retry_at_s - self.clock.now_s
        assert len(self.admin.asked) == rounds
        return pause_s


@pytest.fixture
async def service() -> Service:
    return Service()


async def test_a_pod_that_was_silent_for_long_is_asked_often_enough_to_have_its_limits_soon(service: Service) -> None:
    assert 1.0 < await service.fail(12, Unreachable("TimeoutError at 10.0.0.1:8001")) < PROMPT_S


async def test_a_pod_that_refuses_is_asked_ever_more_rarely(service: Service) -> None:
    assert await service.fail(12, Refused(400, "above the boot allocation")) == 60.0


async def test_a_pod_whose_address_changes_is_asked_there_at_once(service: Service) -> None:
    await service.fail(5, Unreachable("TimeoutError at 10.0.0.1:8001"))
    service.record.pods["chat-0"] = pod("10.0.0.2")
    await service.round()
    assert service.admin.asked[-1][0] == "10.0.0.2"
    assert service.record.pods_in_sync() == ["chat-0"]


async def test_a_call_to_an_old_address_does_not_hold_up_the_new_one(service: Service) -> None:
    service.admin.hung.add("10.0.0.1")
    await service.round()
    service.record.pods["chat-0"] = pod("10.0.0.2")
    await service.round()
    assert service.record.pods_in_sync() == ["chat-0"]
    service.record.give_up_calls()


async def test_a_pod_that_becomes_ready_again_is_asked_at_once(service: Service) -> None:
    await service.fail(6, Refused(400, "not yet"))
    del service.admin.answers["10.0.0.1"]
    await service.round()
    assert service.record.pods_in_sync() == [], "its pause is not over"
    for is_ready in (False, True):
        service.record.pods["chat-0"] = pod(ready=is_ready)
        await service.round()
    assert service.record.pods_in_sync() == ["chat-0"]


async def test_a_pod_that_knows_another_token_does_not_make_the_others_unreachable(service: Service) -> None:
    service.record.pods["chat-1"] = pod("10.0.0.2", "chat-1")
    service.record.secrets_are_due = False
    service.admin.answers["10.0.0.1"] = lambda _: Refused(401, "wrong token")
    await service.round()
    assert service.record.secrets_are_due, "somebody may have changed the Secret"
    await service.round(renew=True)
    assert service.record.token
    assert [host for host, _ in service.admin.asked].count("10.0.0.2") == 2


async def test_a_call_that_fails_as_nobody_foresaw_is_a_pod_that_does_not_answer(service: Service) -> None:
    def surprise(_: LimitsPatch) -> PushResult:
        raise ValueError("a bug, or an answer that nobody foresaw")

    service.record.pods["chat-1"] = pod("10.0.0.2", "chat-1")
    service.admin.answers["10.0.0.1"] = surprise
    await service.round()
    assert service.record.pods_in_sync() == ["chat-1"]
    assert isinstance(service.record.acks["chat-0"].result, Unreachable)
    assert service.record.acks["chat-0"].retry_at_s > service.clock()


async def test_an_older_call_that_ends_after_a_newer_change_does_not_count_for_it(service: Service) -> None:
    service.admin.hung.add("10.0.0.1")
    await service.round()
    service.record.desired = next_desired(PartialLimits(max_num_seqs=2), Envelope(), service.record.desired)
    service.admin.gate.set()
    await service.round()
    await service.round()
    assert [epoch for _, epoch in service.admin.asked] == [1, 2]
    assert service.record.pods_in_sync() == ["chat-0"]


async def test_many_silent_pods_of_a_service_ask_for_few_passes(service: Service) -> None:
    """Whenever each of them fails: a pass looks at all pods."""
    passes: list[float] = []
    service.record.pods = {f"chat-{n}": pod(f"10.0.0.{n}", f"chat-{n}") for n in range(100)}

    async def fail_some_time(host: str, port: int, token: str, patch: LimitsPatch) -> PushResult:
        await asyncio.sleep(int(host.rsplit(".", 1)[1]) / 100)
        return Unreachable("ClientError")

    service.admin.patch = fail_some_time  # type: ignore[method-assign]
    service.pusher.ask_for_pass = lambda _: passes.append(asyncio.get_running_loop().time())
    await service.pusher.push(service.record)
    await asyncio.sleep(1.0)
    service.record.give_up_calls()
    assert 1 <= len({round(at, 2) for at in passes}) <= 6
