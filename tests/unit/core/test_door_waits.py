"""The ladder in virtual time: deadlines that cannot be met, and how long whoever is refused is told to wait."""

import pytest

from guidevane_runtime.core.door import MAX_LOOKED_AT, Rejection, Reported
from guidevane_runtime.core.leases import Standing
from guidevane_runtime.core.tenants import RequestClass, TenantTerms
from tests.unit.core.door_house import A, B, House, refusal

# ----------------------------------------------------------------------------------------------------------- deadlines


def due(in_s: float, tenant: str = "") -> Standing:
    """It comes at 100 s and is to have ended so much later."""
    return Standing(100.0, tenant, deadline_s=100.0 + in_s)


@pytest.fixture
def measured() -> House:
    """1,000 prompt tokens and 100 ends a second; one slot is taken. The clock stands at 100 s again."""
    house = House(TenantTerms("a"), TenantTerms("b", weight=3), max_num_seqs=64)
    house.learn_prefill(1000)
    house.learn_ends(0.01)
    house.now_s = 100.0
    return house


def test_a_deadline_that_the_first_token_would_miss_is_refused_with_both_times(measured: House) -> None:
    measured.wait(3000, due(1.0))
    found = refusal(lambda: measured.wait(1000, due(2.5)))
    assert found.reason is Rejection.DEADLINE_UNREACHABLE
    assert "the deadline is in 2.500 s, the first token is expected in 4.0" in str(found)
    assert found.wait_s == pytest.approx(1.5, rel=0.02)
    measured.wait(1000, due(4.5))


def test_a_request_without_a_deadline_is_not_asked_for_one(measured: House) -> None:
    measured.wait(100_000)
    assert measured.wait(1000).held.num_queued_tokens == 1000


def test_who_is_due_later_does_not_stand_in_the_way(measured: House) -> None:
    measured.wait(100_000)
    assert measured.wait(1000, due(2.0)).held.num_queued_tokens == 1000


def test_other_class_and_other_tenants_stand_in_the_way_by_their_share_only(measured: House) -> None:
    measured.wait(50_000, Standing(0.0, "a", RequestClass.OFFLINE))
    measured.wait(50_000, Standing(0.0, "b"))
    measured.wait(500, due(0.6, "a"))
    # 500 tokens of its own before it, at a quarter of 1,000 tokens/s, and its own 500.
    assert refusal(lambda: measured.wait(500, due(2.4, "a"))).reason is Rejection.DEADLINE_UNREACHABLE
    measured.wait(500, due(2.6, "a"))


@pytest.mark.parametrize(("tenant", "other", "missed_s", "kept_s"), [("x", "y", 1.4, 1.6), ("b", "a", 1.1, 1.25)])
def test_its_share_is_by_weight_and_a_tenant_that_is_not_listed_weighs_one(
    measured: House, tenant: str, other: str, missed_s: float, kept_s: float
) -> None:
    """500 tokens of its own before it at a half, or three quarters, of 1,000 tokens/s, and its own 500."""
    measured.wait(50_000, Standing(0.0, other))
    measured.wait(500, due(0.6, tenant))
    assert refusal(lambda: measured.wait(500, due(missed_s, tenant))).reason is Rejection.DEADLINE_UNREACHABLE
    measured.wait(500, due(kept_s, tenant))


def test_a_request_is_compared_with_a_bounded_number_of_those_before_it(measured: House) -> None:
    measured.change(max_queued_requests=10_000)
    for _ in range(MAX_LOOKED_AT + 1000):
        measured.wait(1, Standing(0.0))
    # It says 1.03 s where 2.03 s are right: too early rather than too late, as nobody is refused for it.
    measured.learn_ends(0.0001)
    measured.now_s = 100.0
    measured.wait(1, due(1.1))
    assert refusal(lambda: measured.wait(1, due(1.0))).reason is Rejection.DEADLINE_UNREACHABLE


def test_a_lone_request_is_never_refused_for_its_deadline(measured: House) -> None:
    assert measured.wait(1_000, due(0.001)).held.num_queued_tokens == 1000


def test_an_unknown_pace_refuses_nobody() -> None:
    house = House()
    house.wait(100_000, due(0.5))
    assert house.wait(1000, due(1.0)).held.num_queued_tokens == 1000


def test_slots_that_have_to_be_waited_for_count_too(measured: House) -> None:
    measured.learn_ends(1.0)
    measured.now_s = 100.0
    measured.gate.observe(Reported(num_running=64, num_waiting=1))
    measured.wait(1, due(1.0))
    assert refusal(lambda: measured.wait(1, due(1.5))).reason is Rejection.DEADLINE_UNREACHABLE
    measured.wait(1, due(2.5))


def test_slots_are_had_by_share_too(measured: House) -> None:
    """One of its own before it, and it has every other slot that gets free: three ends of 1 s."""
    measured.learn_ends(1.0)
    measured.now_s = 100.0
    measured.gate.observe(Reported(num_running=64, num_waiting=1))
    for _ in range(3):
        measured.wait(1, Standing(0.0, "y"))
    measured.wait(1, due(1.5, "x"))
    assert refusal(lambda: measured.wait(1, due(2.5, "x"))).reason is Rejection.DEADLINE_UNREACHABLE
    measured.wait(1, due(3.5, "x"))


def test_a_free_slot_is_not_waited_for(measured: House) -> None:
    measured.learn_ends(1.0)
    measured.now_s = 100.0
    measured.gate.observe(Reported(num_running=8, num_waiting=1))
    measured.wait(1, due(0.4))
    assert measured.wait(1, due(0.5)).held.num_queued_tokens == 1


# --------------------------------------------------------------------------------------------------------------- waits


@pytest.mark.parametrize("gap_s", [0.01, 6.0])
def test_the_wait_for_a_place_follows_the_pace_at_which_requests_end(gap_s: float) -> None:
    house = House(max_num_seqs=100, max_queued_requests=100)
    house.learn_ends(gap_s)
    house.gate.observe(Reported())
    house.enter(count=195)
    assert refusal(lambda: house.enter(count=15)).wait_s == pytest.approx(10 * gap_s, rel=0.01)


def test_a_pause_does_not_slow_the_pace() -> None:
    house = House(max_num_seqs=1, max_queued_requests=1)
    house.learn_ends(0.1)
    house.now_s += 3600
    (lease,) = house.enter()
    lease.start()
    house.now_s += 0.1
    lease.release()
    house.enter(count=2)
    assert refusal(house.enter).wait_s == pytest.approx(0.1, rel=0.01)


def test_arrivals_that_are_rare_do_not_slow_the_pace() -> None:
    house = House(max_num_seqs=2, max_queued_requests=1)
    house.learn_ends(0.1)
    house.gate.observe(Reported(num_running=1))
    house.enter()
    for _ in range(50):
        (lease,) = house.enter()
        lease.start()
        house.now_s += 60.0
        lease.release()
    house.enter(count=2)
    assert refusal(house.enter).wait_s == pytest.approx(0.1, rel=0.01)


def test_what_is_refused_behind_the_door_does_not_quicken_the_pace() -> None:
    house = House(max_num_seqs=1, max_queued_requests=1)
    house.learn_ends(10.0)
    for _ in range(100):
        house.enter()[0].release()
    house.enter(count=2)
    assert refusal(house.enter).wait_s == pytest.approx(10.0, rel=0.01)


def test_the_wait_of_a_tenant_follows_the_pace_of_its_own_ends() -> None:
    house = House(TenantTerms("a", max_in_flight=2), max_num_seqs=8)
    house.learn_ends(1.0)
    house.enter(A, 2)
    house.enter(B, 6)
    # One in four of those that end is one of a's.
    assert refusal(lambda: house.enter(A)).wait_s == pytest.approx(4.0, rel=0.01)


def test_the_wait_for_tokens_follows_the_prefill_rate() -> None:
    house = House(max_queued_tokens=1000)
    house.learn_prefill(100)
    house.wait(1000)
    assert refusal(lambda: house.wait(500)).wait_s == pytest.approx(5.0, rel=0.01)


def test_the_wait_for_a_tenants_tokens_follows_its_share_of_the_prefill_rate() -> None:
    house = House(TenantTerms("a", max_queued_tokens=1000), TenantTerms("b", weight=3))
    house.learn_prefill(100)
    house.wait(1000, A)
    house.wait(1000, B)
    assert refusal(lambda: house.wait(100, A)).wait_s == pytest.approx(4.0, rel=0.01)


def test_small_prompts_without_a_queue_say_nothing_of_the_prefill_rate() -> None:
    house = House(max_queued_tokens=1000)
    house.learn_prefill(1000)
    for _ in range(200):
        house.gate.observe(Reported(num_running=1, num_prompt_tokens=1, step_s=0.1))
    house.wait(1000)
    assert refusal(lambda: house.wait(500)).wait_s == pytest.approx(0.5, rel=0.01)
