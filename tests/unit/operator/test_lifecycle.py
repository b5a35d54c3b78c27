"""Services that come and go: of one that is gone nothing stays, nor comes in the way of the next of its name."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes.aio import client as kubernetes_client

from guidevane_operator.app import GuidevaneOperator
from guidevane_operator.errors import RetryLaterError
from guidevane_operator.kube import Manifest, Resource, ServiceKey
from guidevane_operator.ledger import ChildKey
from guidevane_operator.loops import Failure, WorkQueue
from guidevane_operator.reconcile import Reconciler
from guidevane_operator.record import Directory, Flight
from guidevane_operator.settings import Settings
from tests.unit.operator.test_push import KEY, obeyed, pod


def body(uid: str, version: int) -> Manifest:
    meta = {"namespace": "demo", "name": "chat", "uid": uid, "generation": 1, "resourceVersion": str(version)}
    return {"metadata": meta, "spec": {"model": {"uri": "file:///models/tiny"}}}


@pytest.fixture
async def operator() -> AsyncIterator[GuidevaneOperator]:
    found = GuidevaneOperator(Settings(), kubernetes_client.Configuration())
    yield found
    await found.close()


async def test_a_service_made_again_does_not_inherit_the_pauses_of_the_old_one(operator: GuidevaneOperator) -> None:
    operator.see_service(body("u1", 10), gone=False)
    operator.queue.failures[KEY] = Failure(9, "a child was refused", datetime.now(UTC))
    operator.see_service(body("u2", 20), gone=False)
    operator.see_service(body("u1", 15), gone=True)  # late: kopf has a worker for each object
    assert operator.queue.failures == {}
    assert operator.directory.get(KEY) is not None


async def test_a_pass_that_finds_another_object_does_not_drop_what_is_known_of_it(operator: GuidevaneOperator) -> None:
    class Kube:
        async def try_get(self, resource: Resource, key: ServiceKey) -> Manifest | None:
            directory.put(body("u2", 20))  # the watch is faster than the answer
            return body("u2", 20)

    directory, asked, kube, none = Directory(), [], Kube(), SimpleNamespace()
    directory.put(body("u1", 10))
    writer = SimpleNamespace(ask_for_pass=asked.append)
    parts: list[Any] = [directory, kube, none, none, writer, none]
    reconciler = Reconciler(*parts, runtime_image="i")
    seen: list[Any] = []

    original = directory.put

    def put(found: Manifest) -> Any:
        seen.append(original(found))
        return seen[-1]

    directory.put = put  # type: ignore[method-assign]
    await reconciler.ensure(KEY)
    assert directory.get(KEY) is seen[0]
    assert not seen[0].is_gone


async def test_a_queue_keeps_nothing_of_a_key_that_was_forgotten_while_its_visit_failed() -> None:
    gate, visits = asyncio.Event(), 0

    async def visit(key: ServiceKey) -> None:
        nonlocal visits
        visits += 1
        if visits == 1:
            await gate.wait()
            raise RetryLaterError("not yet")

    queue = WorkQueue(visit, lambda: 0.0, tick_s=0.01)
    task = asyncio.create_task(queue.run())
    queue.add(KEY)
    async with asyncio.timeout(5):
        while not visits:  # noqa: ASYNC110 - a count has no event
            await asyncio.sleep(0.005)
        queue.forget(KEY)
        gate.set()
        while visits < 2 or queue.pulse.started:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    held = {name: value for name, value in vars(queue).items() if value and name in ("_timers", "_ready", "failures")}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert held == {}


async def test_an_operator_that_ends_waits_for_the_calls_that_it_gives_up(operator: GuidevaneOperator) -> None:
    ended = []

    async def call() -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # closing a connection takes a turn of the loop
            ended.append(True)

    operator.see_service(body("u1", 10), gone=False)
    record = operator.directory.get(KEY)
    assert record is not None
    patch: Any = obeyed
    record.flights["chat-0"] = Flight(asyncio.create_task(call()), pod().incarnation, patch, was_silent=False)
    await asyncio.sleep(0)
    await operator.close()
    assert ended == [True]


async def test_an_edit_of_a_child_is_no_reason_to_read_every_secret_but_a_deletion_is(
    operator: GuidevaneOperator,
) -> None:
    operator.see_service(body("u1", 10), gone=False)
    record = operator.directory.get(KEY)
    assert record is not None
    record.secrets_are_due = False
    meta = {"namespace": "demo", "name": "chat-limits", "resourceVersion": "10"}
    key = ChildKey("ConfigMap", "chat-limits")
    record.children.note(key, "d", {"metadata": meta, "data": {"limits.json": "{}"}})

    edited = {"metadata": meta | {"resourceVersion": "11"}, "data": {"limits.json": "theirs"}}
    operator.see_child("ConfigMap", edited, "chat", gone=False)
    assert not record.secrets_are_due
    operator.see_child("ConfigMap", edited | {"metadata": meta | {"resourceVersion": "12"}}, "chat", gone=True)
    assert record.secrets_are_due


async def test_a_service_that_is_paused_is_not_tried_again_for_what_stood_in_the_way_before() -> None:
    async def write(record: Any) -> None:
        """Status is not what this is about."""

    directory, none = Directory(), SimpleNamespace()
    paused = body("u1", 10)
    paused["metadata"]["annotations"] = {"guidevane.dev/paused": "true"}
    record = directory.put(paused)
    record.needs_refresh, record.contested = False, "ConfigMap chat-limits was set right 4 times in a row"
    parts: list[Any] = [directory, none, none, none, SimpleNamespace(write=write), none]
    await Reconciler(*parts, runtime_image="i").ensure(KEY)
    assert record.spec is not None
