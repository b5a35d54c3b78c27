"""Pods that hang, over real sockets: each is asked on its own, and delays nobody else."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.integration.operator.conftest import FakeEngine

PROMPT_S = 2.5
"""Limits are with a healthy pod within this time, however many others hang and however busy the machine is.
One call may take 4 s, so whoever waits for one is later than that."""


@dataclass
class HungPod:
    """Takes connections and never answers, as a process does that is stopped or stuck."""

    host: str
    port: int
    asked_at: list[float] = field(default_factory=list)
    open_now: int = 0
    most_at_once: int = 0

    async def hang(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked_at.append(time.monotonic())
        self.open_now += 1
        self.most_at_once = max(self.most_at_once, self.open_now)
        try:
            while await reader.read(4096):
                pass
        finally:
            self.open_now -= 1
            writer.close()


@asynccontextmanager
async def hanging(host: str, port: int) -> AsyncIterator[HungPod]:
    """A hung pod's admin port."""
    pod = HungPod(host, port)
    server = await asyncio.start_server(pod.hang, host, port)
    try:
        yield pod
    finally:
        server.close()
        await server.wait_closed()


async def add_hung_pod(cluster: Any, name: str, service: str = "chat") -> HungPod:
    host = f"127.0.8.{len(cluster.engines) + 1}"
    pod: HungPod = await cluster.stack.enter_async_context(hanging(host, cluster.admin_port))
    cluster.engines[name] = FakeEngine(host, cluster.admin_port, lambda: "")
    await cluster.put_pod(name, service)
    return pod


@pytest.fixture(autouse=True)
def patient(cluster: Any) -> None:
    """The operator's own timeout of a call, far above what a change may take; renewals do not get in the way."""
    seconds = {"admin_timeout_seconds": 4.0, "drift_seconds": 60.0, "key_seconds": 60.0}
    cluster.settings = cluster.settings.model_copy(update=seconds)


async def test_limits_reach_the_other_pods_at_once_however_long_one_hangs(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service(replicas=3)
    await cluster.until(cluster.deployment)
    healthy = [await cluster.add_pod(f"chat-{n}") for n in range(2)]
    hung = await add_hung_pod(cluster, "chat-2")
    await cluster.until(lambda: hung.asked_at)

    took = []
    for value, pause_s in enumerate((0.0, 0.3, 1.0, 3.9, 0.0), 1):
        await asyncio.sleep(pause_s)
        began = time.monotonic()
        await cluster.add_service(replicas=3, limits={"maxNumSeqs": value})
        await cluster.until(lambda wanted=value: all(e.limits.max_num_seqs == wanted for e in healthy))
        took.append(time.monotonic() - began)

    assert max(took) < PROMPT_S, took
    await cluster.until(lambda: cluster.condition("LimitsInSync").get("reason") == "AdminUnreachable")
    assert "chat-2" in cluster.condition("LimitsInSync")["message"]


async def test_services_with_hung_pods_do_not_delay_one_without(cluster: Any) -> None:
    await cluster.start_operator()
    names = [f"hung-{n}" for n in range(6)]
    for name in (*names, "chat"):
        await cluster.add_service(name)
        await cluster.until(lambda wanted=name: cluster.deployment(wanted))
    engine = await cluster.add_pod("chat-0")
    await cluster.until(lambda: engine.accepted)
    hung = [await add_hung_pod(cluster, f"{name}-0", name) for name in names]
    await cluster.until(lambda: all(pod.asked_at for pod in hung))

    began = time.monotonic()
    for name in names:
        await cluster.add_service(name, limits={"maxNumSeqs": 2})
    await cluster.add_service(limits={"maxNumSeqs": 2})
    await cluster.until(lambda: engine.limits.max_num_seqs == 2)

    assert time.monotonic() - began < PROMPT_S


async def test_a_hung_pod_has_one_call_at_a_time_with_growing_pauses(cluster: Any) -> None:
    cluster.settings = cluster.settings.model_copy(update={"admin_timeout_seconds": 0.3})
    await cluster.start_operator()
    await cluster.add_service()
    await cluster.until(cluster.deployment)
    hung = await add_hung_pod(cluster, "chat-0")
    await cluster.until(lambda: hung.asked_at)

    began = hung.asked_at[0]
    while time.monotonic() - began < 5:
        await cluster.put_pod("chat-0", note=str(time.monotonic()))  # every sighting makes a pass
        await asyncio.sleep(0.1)

    assert hung.most_at_once == 1
    assert len(hung.asked_at) <= 3  # at 0, 1.3 and 3.6 s
    await cluster.until(lambda: "AdminUnreachable" in cluster.events())
    assert cluster.events().count("AdminUnreachable") == 1


async def test_a_pod_that_answers_late_ends_with_the_newest_limits(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service()
    await cluster.until(cluster.deployment)
    engine = await cluster.add_pod("chat-0")
    await cluster.until(lambda: cluster.condition("LimitsInSync").get("status") == "True")

    engine.silent = True  # for a second, far below the timeout
    await cluster.add_service(limits={"maxNumSeqs": 2})
    await cluster.until(lambda: cluster.condition("LimitsInSync").get("reason") == "Applying")
    await cluster.add_service(limits={"maxNumSeqs": 3})

    await cluster.until(lambda: cluster.condition("LimitsInSync").get("status") == "True")
    assert engine.limits.max_num_seqs == 3
    assert cluster.status()["limits"]["epoch"] == engine.epoch == 3
    assert "AdminUnreachable" not in cluster.events()


async def test_a_process_that_takes_the_place_of_a_hung_one_is_asked_at_once(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service(limits={"maxNumSeqs": 3})
    await cluster.until(cluster.deployment)
    hung = await add_hung_pod(cluster, "chat-0")
    await cluster.until(lambda: hung.asked_at)

    new = await cluster.add_pod("chat-1")
    cluster.engines["chat-0"].host, new_host = new.host, new.host
    began = time.monotonic()
    await cluster.put_pod("chat-0", restartCount=1)

    await cluster.until(lambda: len(new.accepted) >= 2 and new_host)
    assert time.monotonic() - began < PROMPT_S


async def test_a_pod_that_refuses_is_asked_again_with_growing_pauses(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service()
    await cluster.until(cluster.deployment)
    engine = await cluster.add_pod("chat-0", ready=False)
    engine.refuse = {"maxNumSeqs": "above the boot allocation"}
    await cluster.put_pod("chat-0")

    await cluster.until(lambda: engine.persisted_when_asked)
    for _ in range(20):
        await cluster.put_pod("chat-0", note=str(time.monotonic()))
        await asyncio.sleep(0.1)

    assert len(engine.persisted_when_asked) <= 3
    engine.refuse = {}
    await cluster.until(lambda: cluster.condition("LimitsInSync").get("status") == "True")
