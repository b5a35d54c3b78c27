"""The writer of status: what it holds back, and whom it writes for."""

from typing import Any

import pytest

from guidevane_api.limits import Envelope, PartialLimits
from guidevane_api.status import MetricsState
from guidevane_operator.errors import ConflictError
from guidevane_operator.events import EventRecorder
from guidevane_operator.kube import ServiceKey
from guidevane_operator.limits_plan import next_desired
from guidevane_operator.record import Directory, ServiceRecord
from guidevane_operator.signals import Known, Signals
from guidevane_operator.status_writer import StatusWriter

KEY = ServiceKey("demo", "chat")


class FakeKube:
    """Notes what is written, and holds it; somebody else writes first where it is told so."""

    def __init__(self) -> None:
        self.written: list[dict[str, Any]] = []
        self.status: dict[str, Any] = {}
        self.is_late = False

    async def patch_status(self, key: ServiceKey, status: Any, uid: str, resource_version: str = "") -> dict[str, Any]:
        if self.is_late and resource_version:
            raise ConflictError(409, "Conflict", "somebody wrote first")
        self.written.append({"uid": uid, "status": status})
        self.status |= status
        return body(1, uid=uid) | {"status": dict(self.status)}

    async def create_event(self, event: dict[str, Any]) -> dict[str, Any]:
        return event


def body(generation: int, uid: str = "u1") -> dict[str, Any]:
    meta = {"namespace": "demo", "name": "chat", "uid": uid, "generation": generation, "resourceVersion": "1"}
    return {"metadata": meta, "spec": {"model": {"uri": "file:///models/tiny"}}}


@pytest.fixture
def kube() -> FakeKube:
    return FakeKube()


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def asked() -> list[ServiceKey]:
    """Services that another pass was asked for."""
    return []


@pytest.fixture
def writer(kube: Any, clock: Clock, asked: list[ServiceKey]) -> StatusWriter:
    return StatusWriter(
        kube=kube,
        recorder=EventRecorder(kube, clock),
        clock=clock,
        min_interval_s=60.0,
        failure_of=lambda _: None,
        ask_for_pass=asked.append,
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


def seen(ttft_ms: float) -> Signals:
    return Signals(MetricsState.KNOWN, "", fresh_pods=1, expected_pods=1, ttft_p95_ms=Known(ttft_ms, 1.0, 100))


async def test_numbers_alone_wait_for_their_minute_and_a_transition_does_not(
    writer: StatusWriter, kube: FakeKube, clock: Clock
) -> None:
    record = ServiceRecord(KEY, body(1), observed_generation=1)
    for ttft_ms in (500, 700, 900):
        record.history.observe(seen(ttft_ms))
        await writer.write(record)
        clock.now_s += 20
    assert [one["status"].get("slo", {}).get("ttftP95Milliseconds") for one in kube.written] == [500]
    await writer.write(record)
    assert [one["status"].get("slo", {}).get("ttftP95Milliseconds") for one in kube.written] == [500, 900]
    record.child_error = "a quota"
    await writer.write(record)
    assert len(kube.written) == 3
    await writer.write(record)
    assert len(kube.written) == 3, "nothing changed"


async def test_limits_that_somebody_else_wrote_first_are_not_ours_and_are_decided_anew(
    writer: StatusWriter, kube: FakeKube, asked: list[ServiceKey]
) -> None:
    record = ServiceRecord(KEY, body(1), needs_refresh=False)
    desired = next_desired(PartialLimits(max_num_seqs=3), Envelope(), None)
    kube.is_late = True
    assert not await writer.persist_limits(record, desired)
    assert (record.desired, record.needs_refresh, asked) == (None, True, [KEY])
    kube.is_late = False
    assert await writer.persist_limits(record, desired)
    assert record.desired == desired and kube.written[-1]["status"]["limits"]["epoch"] == 1
