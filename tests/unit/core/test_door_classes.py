"""The door and the two classes: offline work that waits does not shut the door to requests that somebody awaits."""

from guidevane_runtime.core.door import Rejection
from guidevane_runtime.core.leases import Standing
from guidevane_runtime.core.tenants import RequestClass
from tests.unit.core.door_house import HERE, House, refusal

OFFLINE = Standing(arrival_s=100.0, request_class=RequestClass.OFFLINE)


def test_offline_work_leaves_the_last_tenth_of_the_places_to_interactive_work() -> None:
    house = House(max_num_seqs=20, max_queued_requests=80)
    house.enter(OFFLINE, 90)
    assert refusal(lambda: house.enter(OFFLINE)).reason is Rejection.QUEUE_FULL
    house.enter(HERE, 10)
    assert refusal(lambda: house.enter(HERE)).reason is Rejection.QUEUE_FULL


def test_more_offline_choices_than_its_class_could_ever_have_are_no_overload() -> None:
    house = House(max_num_seqs=10, max_queued_requests=90)
    found = refusal(lambda: house.enter(OFFLINE, 91))
    assert (found.reason, found.param) == (Rejection.VALIDATION, "n")
    assert "have room for 90" in str(found)


def test_offline_work_leaves_the_last_tenth_of_the_tokens_to_interactive_work() -> None:
    house = House(max_queued_tokens=1000)
    house.wait(900, OFFLINE)
    assert refusal(lambda: house.wait(1, OFFLINE)).reason is Rejection.QUEUED_TOKENS
    house.wait(100, HERE)
    assert refusal(lambda: house.wait(1, HERE)).reason is Rejection.QUEUED_TOKENS


def test_offline_work_below_its_share_may_have_the_last_place_and_the_last_token() -> None:
    house = House(max_num_seqs=20, max_queued_requests=80, max_queued_tokens=1000)
    house.wait(950, HERE)
    house.enter(HERE, 98)
    house.wait(50, OFFLINE)
    assert refusal(lambda: house.enter(HERE)).reason is Rejection.QUEUE_FULL


def test_a_body_counts_to_the_share_of_its_class() -> None:
    house = House(max_num_seqs=20, max_queued_requests=80, max_queued_tokens=1000)
    house.enter(HERE, 87)
    house.wait(880, HERE)
    house.wait(20, OFFLINE)
    assert refusal(lambda: house.wait(81, OFFLINE)).reason is Rejection.QUEUED_TOKENS
    house.wait(80, OFFLINE)
    assert refusal(lambda: house.enter(OFFLINE, 9)).reason is Rejection.QUEUE_FULL
    house.enter(OFFLINE, 8)


def test_offline_work_that_ended_or_began_holds_no_place_or_token_of_its_class() -> None:
    house = House(max_num_seqs=20, max_queued_requests=80, max_queued_tokens=1000)
    for _ in range(3):
        lease = house.wait(900, OFFLINE)
        lease.start()
        house.wait(900, OFFLINE).release()
        lease.release()
    assert len(house.enter(OFFLINE, 90)) == 90


def test_shares_of_the_classes_are_those_of_the_policy() -> None:
    house = House(max_num_seqs=20, max_queued_requests=80)
    house.policy = type(house.policy)(interactive_share=1, offline_share=9)
    house.enter(HERE, 10)
    house.enter(OFFLINE, 90)
    assert refusal(lambda: house.enter(HERE)).reason is Rejection.QUEUE_FULL


def test_of_a_few_places_none_is_kept() -> None:
    house = House(max_num_seqs=1, max_queued_requests=1)
    house.enter(OFFLINE, 2)
    assert refusal(lambda: house.enter(HERE)).reason is Rejection.QUEUE_FULL
