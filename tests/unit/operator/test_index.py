"""What watches saw: no change is lost between our own writes and the watch."""

from typing import Any

from guidevane_operator.kube import ServiceKey
from guidevane_operator.record import Directory


def body(generation: int, version: int, uid: str = "u1", **extra: Any) -> dict[str, Any]:
    meta = {"namespace": "demo", "name": "chat", "uid": uid, "generation": generation, "resourceVersion": str(version)}
    return {"metadata": meta | extra, "spec": {}}


KEY = ServiceKey("demo", "chat")


def test_an_older_object_does_not_replace_a_newer_one() -> None:
    directory = Directory()
    record = directory.put(body(2, 20))
    directory.put(body(1, 10))
    assert record.generation == 2


def test_a_spec_that_came_with_the_answer_to_our_own_write_is_still_to_be_dealt_with() -> None:
    directory = Directory()
    record = directory.put(body(1, 10))
    record.dealt_with = record.asked
    record.take_body(body(2, 30))  # the answer to a status write, made after somebody else's change
    directory.put(body(2, 20))  # that change, as the watch delivers it
    assert record.asked != record.dealt_with


def test_our_own_status_write_asks_for_nothing() -> None:
    directory = Directory()
    record = directory.put(body(1, 10))
    record.dealt_with = record.asked
    directory.put(body(1, 11) | {"status": {"replicas": 1}})
    assert record.asked == record.dealt_with


def test_annotations_and_deletion_are_asked_for() -> None:
    directory = Directory()
    record = directory.put(body(1, 10))
    record.dealt_with = record.asked
    directory.put(body(1, 11, annotations={"guidevane.dev/paused": "true"}))
    assert record.asked != record.dealt_with
    assert record.paused


def test_a_service_made_again_under_its_name_starts_afresh() -> None:
    directory = Directory()
    old = directory.put(body(5, 50))
    new = directory.put(body(1, 60, uid="u2"))
    assert new is not old
    assert directory.get(KEY) is new
    directory.drop(KEY)
    assert directory.get(KEY) is None


def test_late_news_of_the_old_object_does_not_take_the_new_one_away() -> None:
    """Kopf has a worker for each object: the end of the old one may come after the beginning of the new one."""
    directory = Directory()
    directory.put(body(5, 50))
    new = directory.put(body(1, 60, uid="u2"))
    assert directory.put(body(6, 55)) is new
    assert not directory.drop(KEY, "u1")
    assert directory.get(KEY) is new
    assert directory.drop(KEY, "u2")
    assert directory.get(KEY) is None


def test_a_block_of_status_that_another_release_wrote_costs_no_other_block() -> None:
    novel = {"state": "Novel", "history": [{"knob": "x", "from": 1, "to": 2, "rule": "r"}] * 9}
    limits = {"epoch": 7, "desired": {"maxNumSeqs": 3}, "source": "Retune"}
    status = {
        "retune": novel,
        "limits": limits,
        "conditions": [{"type": "Ready", "status": "Maybe"}],
        "reason": "Ready",
    }
    read = Directory().put(body(1, 10) | {"status": status}).status
    assert read.limits is not None
    assert (read.limits.epoch, read.reason, read.retune, read.conditions) == (7, "Ready", None, None)
