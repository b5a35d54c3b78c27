"""What the door says is so: `never` only to what can never come in, and waits that fit what has to be waited for."""

import pytest

from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.door import AdmissionGate, Capacity, Rejection, Reported
from guidevane_runtime.core.leases import Lease, Standing
from guidevane_runtime.core.tenants import TenantTerms
from tests.unit.core.door_house import BUSY, HERE, A, B, House, refusal

# --------------------------------------------------------------------------------------------- bodies of many choices


@pytest.fixture
def guarded() -> AdmissionGate:
    """The guard has cut 40 places down to 3."""
    target = SchedulerLimits(max_num_seqs=8, max_queued_requests=32)
    cut = target.model_copy(update={"max_num_seqs": 1, "max_queued_requests": 2})
    gate = AdmissionGate(limits=lambda: cut, clock=lambda: 100.0, target=lambda: target)
    gate.engine_ready(Capacity(num_blocks=100, block_size=16), load_s=2.0)
    return gate


def test_a_body_that_is_too_large_only_while_the_guard_acts_is_told_to_come_back(guarded: AdmissionGate) -> None:
    found = refusal(lambda: guarded.enter(HERE, 16))
    assert found.reason is Rejection.QUEUE_FULL and found.wait_s


def test_a_body_that_the_targets_have_no_room_for_is_told_that_it_never_comes_in(guarded: AdmissionGate) -> None:
    found = refusal(lambda: guarded.enter(HERE, 41))
    assert (found.reason, found.wait_s) == (Rejection.VALIDATION, None)


def test_a_body_above_what_one_of_several_tenants_may_fill_is_not_told_to_come_back() -> None:
    """The last tenth is for the others, however empty the house is."""
    house = House(TenantTerms("a"), TenantTerms("b"), max_num_seqs=8, max_queued_requests=12)
    found = refusal(lambda: house.enter(A, 19))
    assert (found.reason, found.wait_s) == (Rejection.VALIDATION, None)
    assert "have room for 18" in str(found)
    house.enter(A, 18)


def test_a_tenant_by_itself_may_fill_the_house_with_one_body() -> None:
    assert len(House(TenantTerms("a"), max_num_seqs=8, max_queued_requests=12).enter(A, 20)) == 20


# ---------------------------------------------------------------------------------------------- bodies of many tokens


def test_a_body_above_the_token_limit_waits_until_it_is_alone_and_no_longer() -> None:
    house = House(max_queued_tokens=1000)
    house.learn_prefill(1000)
    house.wait(500)
    found = refusal(lambda: house.wait(50_000))
    assert found.reason is Rejection.QUEUED_TOKENS
    assert found.wait_s == pytest.approx(0.5, rel=0.02)


def test_a_body_above_its_tenants_token_cap_waits_until_it_is_alone_and_no_longer() -> None:
    house = House(TenantTerms("a", max_queued_tokens=1000), TenantTerms("b"))
    house.learn_prefill(1000)
    house.wait(500, A)
    house.wait(500, B)
    found = refusal(lambda: house.wait(50_000, A))
    assert found.reason is Rejection.TENANT_TOKENS
    assert found.wait_s == pytest.approx(1.0, rel=0.02)


# ------------------------------------------------------------------------------------------------- an engine that dies


def fill(house: House) -> list[Lease]:
    """All places, and the report that says so."""
    house.gate.observe(Reported())
    leases = house.enter(HERE, 40)
    house.gate.observe(Reported(num_running=20, num_waiting=20))
    return leases


def wait_for_one_place_s(house: House) -> float:
    found = refusal(lambda: house.enter(HERE))
    assert found.reason is Rejection.QUEUE_FULL and found.wait_s is not None
    return found.wait_s


def test_requests_that_an_engine_takes_with_it_say_nothing_of_its_pace() -> None:
    """All of them end at one moment: the next engine would seem to end a request in no time."""
    house = House(max_num_seqs=20, max_queued_requests=20)
    house.learn_ends(2.0)
    leases = fill(house)
    before_s = wait_for_one_place_s(house)
    assert before_s == pytest.approx(2.0, rel=0.02)
    for lease in leases[:20]:
        lease.start()
    house.gate.engine_lost()
    for lease in leases:
        lease.release()
    house.gate.engine_ready(Capacity(1 << 16, 16), load_s=2.0)
    fill(house)
    assert wait_for_one_place_s(house) == pytest.approx(before_s)


def test_the_time_without_an_engine_is_no_pace_of_the_next_one() -> None:
    """A body that was still being tokenised when the engine died keeps its place meanwhile."""
    house = House(max_num_seqs=20, max_queued_requests=20)
    house.learn_ends(2.0)
    (early,) = house.enter(Standing(house.now_s))
    house.gate.engine_lost()
    house.now_s += 300.0
    house.gate.engine_ready(Capacity(1 << 16, 16), load_s=300.0)
    house.gate.observe(BUSY)
    early.start()
    house.now_s += 2.0
    early.release()
    fill(house)
    assert wait_for_one_place_s(house) == pytest.approx(2.0, rel=0.02)
