"""Any traffic at the door: I14. Caps are never passed, a body comes in whole or not at all, counts are the leases'.

Limits, the engine's reports, the guard's pause and the drain change between any two requests.
"""

from collections import Counter
from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.door import AdmissionGate, Capacity, Refused, Rejection, Reported
from guidevane_runtime.core.leases import Lease, Standing
from guidevane_runtime.core.tenants import TenantPolicy, TenantTerms
from tests.property.machine import Machine, size_of
from tests.property.traffic import limits_st

CAPACITY = Capacity(num_blocks=12, block_size=4)
body_st = st.lists(st.sampled_from([1, 1, 4, 8, 16, 60]), min_size=1, max_size=3)
"""Prompt tokens of each choice."""
TENANTS = ("", "a", "b")
terms_st = [
    st.builds(
        TenantTerms,
        st.just(name),
        max_in_flight=st.sampled_from([None, None, 2, 3]),
        max_queued_tokens=st.sampled_from([None, 10, 40]),
    )
    for name in TENANTS
]
policy_st = st.builds(TenantPolicy, st.tuples(*terms_st))
patience_st = st.sampled_from([None, None, 0.01, 5.0])


HOPELESS = {Rejection.VALIDATION, Rejection.CONTEXT_LENGTH, Rejection.NEVER_FITS}


@dataclass
class Group:
    """The choices of one body that came in."""

    tenant: str
    leases: list[Lease]
    tokens: list[int]
    has_started: bool = False


class DoorMachine(Machine):
    @initialize(limits=limits_st, policy=policy_st)
    def open(self, limits: SchedulerLimits, policy: TenantPolicy) -> None:
        self.now_s = 0.0
        self.limits = limits
        self.policy = policy
        self.reported = Reported()
        self.gate = AdmissionGate(limits=lambda: self.limits, clock=lambda: self.now_s, policy=lambda: self.policy)
        self.gate.engine_ready(CAPACITY, 10.0)
        self.groups: list[Group] = []
        self.num_asked = self.num_let_in = 0
        self.refusals: Counter[Rejection] = Counter()
        self.is_draining = False

    # ------------------------------------------------------------------------------------------------ actions

    @rule(bodies=st.lists(st.tuples(st.sampled_from(TENANTS), patience_st, body_st), min_size=1, max_size=5))
    def burst(self, bodies: list[tuple[str, float | None, list[int]]]) -> None:
        for tenant, patience_s, tokens in bodies:
            deadline_s = None if patience_s is None else self.now_s + patience_s
            self.ask(Standing(self.now_s, tenant, deadline_s=deadline_s), tokens)

    def ask(self, standing: Standing, tokens: list[int]) -> None:
        self.num_asked += 1
        before = self.counts()
        leases: list[Lease] = []
        try:
            leases = self.gate.enter(standing, len(tokens))
            self.check_places(before[0], leases, len(tokens))
            self.gate.check_prompt(max(tokens), 1)
            self.gate.charge(leases, tokens)
        except Refused as refused:
            for lease in leases:
                lease.release()
            self.check_refusal(refused, before, standing, len(tokens))
            assert self.counts() == before
            return
        self.num_let_in += 1
        self.groups.append(Group(standing.tenant, leases, tokens))
        assert before[1] == 0 or before[1] + sum(tokens) <= self.limits.max_queued_tokens
        assert max(tokens) < CAPACITY.num_tokens
        self.check_caps(standing.tenant, sum(tokens))

    @precondition(lambda self: self.groups)
    @rule(number=st.integers(0, 9))
    def first_token(self, number: int) -> None:
        group = self.groups[number % len(self.groups)]
        group.has_started = True
        for lease in group.leases:
            lease.start()

    @precondition(lambda self: self.groups)
    @rule(number=st.integers(0, 9), num_times=st.integers(1, 2))
    def end(self, number: int, num_times: int) -> None:
        """Every end may release a place, and two of them may meet."""
        group = self.groups.pop(number % len(self.groups))
        for lease in group.leases * num_times:
            lease.release()

    @rule(limits=limits_st)
    def set_limits(self, limits: SchedulerLimits) -> None:
        """Below what is inside, too: nobody is sent away."""
        before = self.counts()
        self.limits = limits
        assert self.counts() == before

    @rule(policy=policy_st)
    def set_terms(self, policy: TenantPolicy) -> None:
        """As with limits."""
        before = self.counts()
        self.policy = policy
        assert self.counts() == before

    @rule(num_running=st.integers(0, 8), num_waiting=st.integers(0, 4), num_prefill=st.integers(0, 50))
    def hear_of_a_step(self, num_running: int, num_waiting: int, num_prefill: int) -> None:
        self.reported = Reported(num_running, num_waiting, num_prefill, 0.01)
        self.gate.observe(self.reported)

    @rule(seconds=st.sampled_from([0.1, 3.0, 1000.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(pause_s=st.sampled_from([None, None, 5.0]))
    def pause_long_context(self, pause_s: float | None) -> None:
        self.gate.long_context_pause_s = pause_s

    @rule(is_there=st.sampled_from([True, True, False]))
    def lose_or_find_the_engine(self, is_there: bool) -> None:
        if is_there:
            self.gate.engine_ready(CAPACITY, 10.0)
        else:
            self.reported = Reported()
            self.gate.engine_lost()

    @precondition(lambda self: self.num_asked > 10)
    @rule()
    def drain(self) -> None:
        self.is_draining = True
        self.gate.drain()

    # ------------------------------------------------------------------------------------------------- checks

    def counts(self) -> tuple[int, int]:
        return self.gate.num_live, self.gate.num_queued_tokens

    def most(self) -> int:
        """Places at most: a burst may fill what runs at once, and the waiting room."""
        return max(self.limits.max_num_seqs, self.reported.num_running) + self.limits.max_queued_requests

    def check_places(self, num_before: int, leases: list[Lease], count: int) -> None:
        assert not self.is_draining and self.gate.capacity is not None
        assert len(leases) == count and self.gate.num_live == num_before + count <= self.most()

    def check_caps(self, tenant: str, added: int) -> None:
        """Of the one that came in last; a lone body may be above the cap of tokens."""
        terms, groups = self.policy.terms_of(tenant), [group for group in self.groups if group.tenant == tenant]
        num_live = sum(len(group.leases) for group in groups)
        num_queued = sum(sum(group.tokens) for group in groups if not group.has_started)
        assert terms.max_in_flight is None or num_live <= terms.max_in_flight
        assert terms.max_queued_tokens is None or num_queued == added or num_queued <= terms.max_queued_tokens

    def check_refusal(self, refused: Refused, before: tuple[int, int], standing: Standing, count: int) -> None:
        """Each refusal has one reason, which is so, and says when to come back if that helps."""
        reason = refused.reason
        self.refusals[reason] += 1
        assert (refused.wait_s is None) == (reason in HOPELESS)
        assert refused.wait_s is None or refused.wait_s >= 0 or self.is_draining
        terms = self.policy.terms_of(standing.tenant)
        least = min(self.limits.max_num_seqs, self.reported.num_running) + self.limits.max_queued_requests
        why = {
            Rejection.DRAINING: self.is_draining,
            Rejection.NOT_READY: self.gate.capacity is None,
            Rejection.VALIDATION: count
            > min(self.limits.max_num_seqs + self.limits.max_queued_requests, terms.max_in_flight or count),
            Rejection.TENANT_CONCURRENCY: terms.max_in_flight is not None and before[0] > 0,
            Rejection.TENANT_TOKENS: terms.max_queued_tokens is not None and before[1] > 0,
            # One above its share leaves the last tenth to the others.
            Rejection.QUEUE_FULL: before[0] + count > least - least // 10,
            Rejection.QUEUED_TOKENS: before[1] > 0,
            Rejection.LONG_CONTEXT: self.gate.long_context_pause_s is not None and before[0] > 0,
            Rejection.DEADLINE_UNREACHABLE: standing.deadline_s is not None and before[1] > 0,
            Rejection.CONTEXT_LENGTH: True,
            Rejection.NEVER_FITS: True,
        }
        assert why[reason], (reason, before, count)

    @invariant()
    def counts_are_those_of_the_leases(self) -> None:
        num_live = sum(len(group.leases) for group in self.groups)
        assert self.counts() == (num_live, sum(sum(g.tokens) for g in self.groups if not g.has_started))

    @invariant()
    def counts_of_a_tenant_are_those_of_its_leases(self) -> None:
        for tenant in TENANTS:
            groups = [group for group in self.groups if group.tenant == tenant]
            held = self.gate.use_of(tenant)
            assert held.num_live == sum(len(group.leases) for group in groups)
            assert held.num_queued_tokens == sum(sum(group.tokens) for group in groups if not group.has_started)
        assert set(self.gate.tenants) == {group.tenant for group in self.groups}

    @invariant()
    def everybody_came_in_or_was_refused_for_one_reason(self) -> None:
        assert self.refusals.total() == self.num_asked - self.num_let_in


TestDoorMachine = DoorMachine.TestCase
TestDoorMachine.settings = size_of(DoorMachine)
