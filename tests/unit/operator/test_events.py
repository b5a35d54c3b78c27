"""Events: told on transitions, folded where they repeat, capped where they storm, and never in the way."""

from typing import Any

import pytest

from guidevane_api.conditions import EventReason
from guidevane_operator.errors import KubeError
from guidevane_operator.events import MAX_NOTE, MAX_PER_HOUR, REPEAT_S, EventRecorder

LOST, BACK = EventReason.METRICS_LOST, EventReason.METRICS_RECOVERED


class FakeKube:
    """Notes what is posted; says no where told to."""

    def __init__(self) -> None:
        self.posted: list[dict[str, Any]] = []
        self.refuses = False

    async def create_event(self, event: dict[str, Any]) -> dict[str, Any]:
        if self.refuses:
            raise KubeError(403, "Forbidden", "no events")
        self.posted.append(event)
        return event


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def service(uid: str = "u1") -> dict[str, Any]:
    return {"metadata": {"namespace": "demo", "name": "chat", "uid": uid, "resourceVersion": "7"}}


@pytest.fixture
def kube() -> FakeKube:
    return FakeKube()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorder(kube: Any, clock: Clock) -> EventRecorder:
    return EventRecorder(kube, clock)


async def test_the_same_again_within_a_minute_is_one_event_and_another_subject_is_another(
    recorder: EventRecorder, kube: FakeKube, clock: Clock
) -> None:
    for subject in ("pod-0", "pod-0", "pod-1"):
        await recorder.post(service(), LOST, "gone", subject)
    await recorder.post(service(), BACK, "back", "pod-0")
    assert [event["reason"] for event in kube.posted] == [LOST, LOST, BACK]
    clock.now_s += REPEAT_S - 1
    await recorder.post(service(), LOST, "gone", "pod-0")
    assert len(kube.posted) == 3
    clock.now_s += 1
    await recorder.post(service(), LOST, "gone", "pod-0")
    assert len(kube.posted) == 4


async def test_a_storm_is_cut_off_for_the_hour_and_for_its_service_alone(
    recorder: EventRecorder, kube: FakeKube, clock: Clock
) -> None:
    for number in range(3 * MAX_PER_HOUR):
        await recorder.post(service(), LOST, "gone", str(number))
    assert len(kube.posted) == MAX_PER_HOUR
    await recorder.post(service("u2"), LOST, "gone")
    assert len(kube.posted) == MAX_PER_HOUR + 1
    clock.now_s += 3601
    await recorder.post(service(), LOST, "gone", "later")
    assert len(kube.posted) == MAX_PER_HOUR + 2


async def test_a_service_made_again_under_its_name_starts_with_nothing_told(
    recorder: EventRecorder, kube: FakeKube
) -> None:
    await recorder.post(service("u1"), LOST, "gone")
    await recorder.post(service("u2"), LOST, "gone")
    assert len(kube.posted) == 2


async def test_what_was_told_of_services_long_ago_takes_no_memory(recorder: EventRecorder, clock: Clock) -> None:
    for number in range(50):
        await recorder.post(service(f"u{number}"), LOST, "gone")
    clock.now_s += 3601
    await recorder.post(service("new"), LOST, "gone")
    assert list(recorder._posted) == ["new"]


async def test_an_event_that_is_refused_is_forgotten_and_nothing_fails(recorder: EventRecorder, kube: FakeKube) -> None:
    kube.refuses = True
    await recorder.post(service(), LOST, "gone")
    kube.refuses = False
    await recorder.post(service(), BACK, "back")
    assert [event["reason"] for event in kube.posted] == [BACK]


@pytest.mark.parametrize(("reason", "kind"), [(LOST, "Warning"), (BACK, "Normal")])
async def test_an_event_is_about_its_service_and_a_warning_where_a_person_should_look(
    recorder: EventRecorder, kube: FakeKube, reason: EventReason, kind: str
) -> None:
    await recorder.post(service(), reason, "x" * (MAX_NOTE + 1))
    (event,) = kube.posted
    assert event["type"] == kind
    assert len(event["note"]) == MAX_NOTE and event["note"].endswith("x…")
    assert (event["regarding"]["kind"], event["regarding"]["uid"]) == ("LLMService", "u1")
    assert event["metadata"]["namespace"] == event["regarding"]["namespace"] == "demo"
