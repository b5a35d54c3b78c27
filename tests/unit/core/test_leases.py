"""Sums are those of the live leases, whatever happens to them and in whatever order."""

from hypothesis import given
from hypothesis import strategies as st

from guidevane_runtime.core.leases import NOTHING, STARTED, Lease, Ledger, Occupancy, Standing

A, B = Standing(tenant="a"), Standing(tenant="b")

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(("enter", "charge", "start", "release")),
        st.sampled_from((A, B)),
        st.integers(0, 7),
        st.integers(1, 1000),
    ),
    max_size=80,
)


def summed(leases: list[Lease]) -> Occupancy:
    columns = zip(*(lease.held for lease in leases), strict=True)
    return Occupancy(*map(sum, columns)) if leases else NOTHING


@given(ACTIONS)
def test_sums_are_those_of_the_live_leases(actions: list[tuple[str, Standing, int, int]]) -> None:
    ended: list[None] = []
    ledger = Ledger(lambda: ended.append(None))
    leases: list[Lease] = []
    for action, standing, index, number in actions:
        if action == "enter":
            leases += ledger.enter(standing, 1 + number % 3)
        elif leases:
            lease = leases[index % len(leases)]
            if action == "charge" and lease.held.num_waiting:
                lease.charge(number)
            elif action == "start":
                lease.start()
            elif action == "release":
                lease.release()
        live = [lease for lease in leases if lease.held.num_live]
        assert set(ledger) == set(live)
        assert ledger.total == summed(live)
        for tenant in ("a", "b"):
            own = [lease for lease in live if lease.standing.tenant == tenant]
            assert ledger.of(tenant) == summed(own)
            assert list(ledger.leases_of(tenant)) == own
            assert (tenant in ledger.tenants) == bool(own)


def test_a_lease_holds_its_tokens_until_its_first_token() -> None:
    (lease,) = Ledger(lambda: None).enter(A, 1)
    assert lease.held == Occupancy(1, 1, 0)
    lease.charge(70)
    assert lease.held == Occupancy(1, 1, 70)
    lease.start()
    assert lease.held == STARTED == Occupancy(1, 0, 0)
    lease.release()
    assert lease.held == NOTHING


def test_only_what_had_started_ends_as_a_pace_of_the_engine() -> None:
    ended: list[None] = []
    started, refused = Ledger(lambda: ended.append(None)).enter(A, 2)
    started.start()
    started.release()
    started.release()
    refused.release()
    assert len(ended) == 1


def test_a_released_lease_comes_back_by_nothing() -> None:
    ledger = Ledger(lambda: None)
    (lease,) = ledger.enter(A, 1)
    lease.release()
    lease.start()
    assert ledger.total == NOTHING and not ledger.tenants
