"""The ladder in virtual time: who may come in at all, places, and the order of the rungs."""

from collections.abc import Callable

import pytest

from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.door import AdmissionGate, Capacity, Rejection, Reported
from guidevane_runtime.core.leases import Standing
from guidevane_runtime.core.tenants import TenantTerms
from tests.unit.core.door_house import A, B, House, refusal

# --------------------------------------------------------------------------------------------------------- open or not


def test_draining_sends_a_request_to_another_replica_at_once() -> None:
    house = House()
    house.gate.drain()
    found = refusal(house.enter)
    assert (found.reason, found.wait_s) == (Rejection.DRAINING, 0.0)
    assert found.message == str(found) == "the server is shutting down; send this to another replica"


def test_without_an_engine_nobody_comes_in() -> None:
    house = House()
    house.gate.engine_lost()
    found = refusal(house.enter)
    assert found.reason is Rejection.NOT_READY
    assert str(found) == "the engine is not ready: the model is being loaded"


def test_a_first_load_is_expected_to_take_as_long_again_as_it_has_taken_and_then_nothing() -> None:
    now_s = 100.0
    gate = AdmissionGate(limits=SchedulerLimits, clock=lambda: now_s)
    waits_s = [gate.load_wait_s]
    now_s = 103.0
    waits_s.append(gate.load_wait_s)
    gate.engine_ready(Capacity(10, 16), load_s=3.0)
    assert [*waits_s, gate.load_wait_s] == [0.0, 3.0, 0.0]


@pytest.mark.parametrize(("elapsed_s", "wait_s"), [(0.0, 10.0), (4.0, 6.0), (9.0, 9.0), (30.0, 30.0)])
def test_a_restart_is_expected_to_take_as_long_as_the_last_load_or_as_long_again(
    elapsed_s: float, wait_s: float
) -> None:
    house = House()
    house.gate.engine_ready(Capacity(10, 16), load_s=10.0)
    house.gate.engine_lost()
    house.now_s += elapsed_s
    assert refusal(house.enter).wait_s == wait_s


# -------------------------------------------------------------------------------------------------------------- places


def test_an_idle_engine_takes_its_slots_and_its_queue() -> None:
    house = House(max_num_seqs=2, max_queued_requests=3)
    house.enter(count=5)
    found = refusal(house.enter)
    assert found.reason is Rejection.QUEUE_FULL
    assert str(found) == "5 requests wait, this asks for 1 more, limits.maxQueuedRequests is 3"
    assert house.gate.num_live == 5


def test_slots_that_memory_does_not_allow_are_no_room() -> None:
    house = House(max_num_seqs=8, max_queued_requests=3)
    house.enter(count=4)
    house.gate.observe(Reported(num_running=1, num_waiting=3))
    assert refusal(house.enter).reason is Rejection.QUEUE_FULL


def test_a_group_comes_in_whole_or_not_at_all() -> None:
    house = House(max_num_seqs=5, max_queued_requests=3)
    held = house.enter(count=3)
    assert refusal(lambda: house.enter(count=8)).reason is Rejection.QUEUE_FULL
    assert house.gate.num_live == 3
    for lease in held:
        lease.release()
    assert len(house.enter(count=8)) == 8


def test_more_choices_than_an_idle_engine_has_places_for_are_no_overload() -> None:
    house = House(max_num_seqs=2, max_queued_requests=3)
    found = refusal(lambda: house.enter(count=6))
    assert (found.reason, found.param, found.wait_s) == (Rejection.VALIDATION, "n", None)
    assert "asks for 6 choices, limits.maxNumSeqs and limits.maxQueuedRequests have room for 5" in str(found)


def test_a_released_lease_makes_room_once() -> None:
    house = House(max_num_seqs=1, max_queued_requests=1)
    first, _ = house.enter(count=2)
    first.release()
    first.release()
    house.enter()
    assert refusal(house.enter).reason is Rejection.QUEUE_FULL


def test_limits_count_as_they_are_at_the_moment() -> None:
    house = House(max_num_seqs=2, max_queued_requests=3)
    house.enter(count=5)
    assert refusal(house.enter).reason is Rejection.QUEUE_FULL
    house.change(max_queued_requests=4)
    assert len(house.enter()) == 1


# ------------------------------------------------------------------------------------------------------ tenants' places


def test_a_tenant_at_its_cap_is_refused_and_the_others_come_in() -> None:
    house = House(TenantTerms("a", max_in_flight=2), TenantTerms("b"))
    house.enter(A, 2)
    found = refusal(lambda: house.enter(A))
    assert found.reason is Rejection.TENANT_CONCURRENCY
    assert "tenant 'a' would have 3 requests at once, its maxInFlight is 2" in str(found)
    house.enter(B, 3)


def test_all_choices_of_a_tenant_come_in_or_none() -> None:
    house = House(TenantTerms("a", max_in_flight=8))
    house.enter(A, 3)
    assert refusal(lambda: house.enter(A, 8)).reason is Rejection.TENANT_CONCURRENCY
    assert house.gate.use_of("a").num_live == 3
    assert len(house.enter(A, 5)) == 5


def test_a_hog_leaves_the_last_tenth_of_the_places_to_tenants_below_their_share() -> None:
    house = House(TenantTerms("a"), TenantTerms("b"), max_num_seqs=20, max_queued_requests=80)
    house.enter(A, 90)
    assert refusal(lambda: house.enter(A)).reason is Rejection.QUEUE_FULL
    house.enter(B, 10)
    assert refusal(lambda: house.enter(B)).reason is Rejection.QUEUE_FULL
    assert house.gate.num_live == 100


def test_the_last_tenth_is_rounded_down_and_a_tenant_that_is_not_listed_weighs_one() -> None:
    house = House(TenantTerms("a"), max_num_seqs=10, max_queued_requests=5)
    house.enter(A, count=6)
    house.enter(Standing(arrival_s=100.0, tenant="x"), count=8)
    assert refusal(lambda: house.enter(Standing(arrival_s=100.0, tenant="x"))).reason is Rejection.QUEUE_FULL
    house.enter(A)


def test_a_tenant_by_itself_has_all_tokens_and_with_another_one_in_sight_not_the_last_tenth() -> None:
    house = House(TenantTerms("a"), max_queued_tokens=1000)
    leases = [house.wait(500, A), house.wait(500, A)]
    for lease in leases:
        lease.release()
    house.wait(400, A)
    found = refusal(lambda: house.wait(550, Standing(arrival_s=100.0, tenant="x")))
    assert found.reason is Rejection.QUEUED_TOKENS


def test_a_tenant_by_itself_has_all_places() -> None:
    house = House(TenantTerms("a"), max_num_seqs=20, max_queued_requests=80)
    house.enter(A, 100)
    assert refusal(lambda: house.enter(A)).reason is Rejection.QUEUE_FULL


def test_a_tenants_share_of_the_places_is_that_of_its_weight() -> None:
    house = House(TenantTerms("a", weight=19), TenantTerms("b"), max_num_seqs=20, max_queued_requests=80)
    house.enter(B, 3)
    house.enter(A, 95)
    assert refusal(lambda: house.enter(A)).reason is Rejection.QUEUE_FULL
    house.enter(B, 2)


def test_more_choices_than_a_tenants_cap_are_no_overload() -> None:
    house = House(TenantTerms("a", max_in_flight=4))
    found = refusal(lambda: house.enter(A, 5))
    assert (found.reason, found.param) == (Rejection.VALIDATION, "n")
    assert "asks for 5 choices, maxInFlight of tenant 'a' is 4" in str(found)


def test_a_tenants_cap_counts_as_it_is_at_the_moment() -> None:
    house = House(TenantTerms("a", max_in_flight=4))
    leases = house.enter(A, 4)
    house.agree(TenantTerms("a", max_in_flight=2))
    leases.pop().release()
    leases.pop().release()
    assert refusal(lambda: house.enter(A)).reason is Rejection.TENANT_CONCURRENCY
    leases.pop().release()
    house.enter(A)


def test_a_tenant_that_is_not_listed_has_no_cap() -> None:
    assert len(House(TenantTerms("a", max_in_flight=1)).enter(B, 100)) == 100


# ----------------------------------------------------------------------------------------------------- order of rungs


def test_the_cheapest_rung_that_says_no_is_the_one_that_is_told() -> None:
    """Everything is wrong at once; then the rungs are cleared one by one, from the first."""
    house = House(max_num_seqs=2, max_queued_requests=2)
    house.learn_prefill(1000)
    house.learn_ends(0.01)
    house.gate.observe(Reported())
    for standing in (A, A, A, B):
        house.wait(100, standing)
    house.change(max_queued_requests=1, max_queued_tokens=200, max_prompt_tokens=100, long_context_threshold_tokens=50)
    house.agree(TenantTerms("a", max_in_flight=3, max_queued_tokens=100))
    house.gate.long_context_pause_s = 30.0
    house.gate.engine_lost()
    late = Standing(house.now_s, "a", deadline_s=house.now_s + 0.001)
    ladder: list[tuple[Rejection, Callable[[], None]]] = [
        (Rejection.NOT_READY, lambda: house.gate.engine_ready(Capacity(10, 16), 1.0)),
        (Rejection.QUEUE_FULL, lambda: house.change(max_queued_requests=10)),
        (Rejection.TENANT_CONCURRENCY, lambda: house.agree(TenantTerms("a", max_queued_tokens=100))),
        (Rejection.CONTEXT_LENGTH, lambda: house.change(max_prompt_tokens=1000)),
        (Rejection.NEVER_FITS, lambda: house.gate.engine_ready(Capacity(1000, 16), 1.0)),
        (Rejection.QUEUED_TOKENS, lambda: house.change(max_queued_tokens=10_000)),
        (Rejection.TENANT_TOKENS, lambda: house.agree()),
        (Rejection.LONG_CONTEXT, lambda: setattr(house.gate, "long_context_pause_s", None)),
        (Rejection.DEADLINE_UNREACHABLE, house.gate.engine_lost),
        (Rejection.NOT_READY, house.gate.drain),
        (Rejection.DRAINING, lambda: None),
    ]
    for reason, clear in ladder:
        assert refusal(lambda: house.gate.admit(late, 500, 1)).reason is reason
        clear()
    assert house.gate.num_live == 4
