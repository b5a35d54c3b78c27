"""The writer of status: what it holds back, and whom it writes for."""

import logging
from typing import Any

import pytest

from guidevane_operator.events import EventRecorder
from guidevane_operator.kube import ServiceKey
from guidevane_operator.record import Directory, ServiceRecord
from guidevane_operator.status_writer import StatusWriter

KEY = ServiceKey("demo", "chat")


class FakeKube:
    """Notes what is written."""

    def __init__(self) -> None:
        self.written: list[dict[str, Any]] = []

    async def patch_status(self, key: ServiceKey, status: Any, uid: str, resource_version: str = "") -> dict[str, Any]:
        self.written.append({"uid": uid, "status": status})
        return body(1, uid=uid) | {"status": status}

    async def create_event(self, event: dict[str, Any]) -> dict[str, Any]:
        return event


def body(generation: int, uid: str = "u1") -> dict[str, Any]:
    meta = {"namespace": "demo", "name": "chat", "uid": uid, "generation": generation, "resourceVersion": "1"}
    return {"metadata": meta, "spec": {"model": {"uri": "file:///models/tiny"}}}


@pytest.fixture
def kube() -> FakeKube:
    return FakeKube()


@pytest.fixture
def writer(kube: Any) -> StatusWriter:
    return StatusWriter(
        kube=kube,
        recorder=EventRecorder(kube, lambda: 0.0),
        clock=lambda: 0.0,
        min_interval_s=60.0,
        failure_of=lambda _: None,
        ask_for_pass=lambda key: logging.getLogger(__name__).debug("asked %s", key),
    )


async def test_status_does_not_speak_of_a_spec_that_was_only_seen(writer: StatusWriter, kube: FakeKube) -> None:
    record = ServiceRecord(KEY, body(2), observed_generation=1)
    await writer.write(record)
    status = kube.written[-1]["status"]
    assert status["observedGeneration"] == 1
    assert {condition["observedGeneration"] for condition in status["conditions"]} == {1}


async def test_nothing_is_written_for_a_service_that_was_made_again_under_its_name(
    writer: StatusWriter, kube: FakeKube
) -> None:
    directory = Directory()
    old = directory.put(body(1, "old"))
    new = directory.put(body(1, "new"))
    await writer.write(old)
    assert kube.written == []
    await writer.write(new)
    assert kube.written[-1]["uid"] == "new"
