"""Any traffic at the door: I14. Caps are never passed, a body comes in whole or not at all, counts are the leases'.

Limits, the engine's reports, the guard's pause and the drain change between any two requests.
"""

from collections import Counter
from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.messages import EngineStats
from guidevane_runtime.errors import GuidevaneError, InvalidRequest
from guidevane_runtime.server.admission import AdmissionGate, Capacity, Lease, Refused, Rejection, rejection_reason
from tests.property.machine import Machine, size_of
from tests.property.traffic import limits_st

CAPACITY = Capacity(num_blocks=12, block_size=4)
body_st = st.lists(st.sampled_from([1, 4, 8, 16, 60]), min_size=1, max_size=3)
"""Prompt tokens of each choice."""


@dataclass
class Group:
    """The choices of one body that came in."""

    leases: list[Lease]
    tokens: list[int]
    has_started: bool = False


class DoorMachine(Machine):
    @initialize(limits=limits_st)
    def open(self, limits: SchedulerLimits) -> None:
        self.now_s = 0.0
        self.limits = limits
        self.stats = EngineStats()
        self.gate = AdmissionGate(limits=lambda: self.limits, clock=lambda: self.now_s)
        self.gate.capacity = CAPACITY
        self.groups: list[Group] = []
        self.num_asked = self.num_let_in = 0
        self.refusals: Counter[Rejection] = Counter()
        self.is_draining = False

    # ------------------------------------------------------------------------------------------------ actions

    @rule(bodies=st.lists(body_st, min_size=1, max_size=5))
    def burst(self, bodies: list[list[int]]) -> None:
        for tokens in bodies:
            self.ask(tokens)

    def ask(self, tokens: list[int]) -> None:
        self.num_asked += 1
        before = self.counts()
        leases: list[Lease] = []
        try:
            leases = self.gate.enter(len(tokens))
            self.check_places(before[0], leases, len(tokens))
            self.gate.check_prompt(max(tokens), 1)
            self.gate.charge(leases, tokens)
        except GuidevaneError as error:
            for lease in leases:
                lease.release()
            self.check_refusal(error, before, len(tokens))
            assert self.counts() == before
            return
        self.num_let_in += 1
        self.groups.append(Group(leases, tokens))
        assert before[1] == 0 or before[1] + sum(tokens) <= self.limits.max_queued_tokens
        assert max(tokens) < CAPACITY.num_blocks * CAPACITY.block_size

    @precondition(lambda self: self.groups)
    @rule(number=st.integers(0, 9))
    def first_token(self, number: int) -> None:
        group = self.groups[number % len(self.groups)]
        group.has_started = True
        for lease in group.leases:
            lease.started = True

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

    @rule(num_running=st.integers(0, 8), num_waiting=st.integers(0, 4), num_prefill=st.integers(0, 50))
    def hear_of_a_step(self, num_running: int, num_waiting: int, num_prefill: int) -> None:
        self.stats = EngineStats(num_running=num_running, num_waiting=num_waiting)
        self.gate.observe(self.stats, num_prefill, 0.01)

    @rule(seconds=st.sampled_from([0.1, 3.0, 1000.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(pause_s=st.sampled_from([None, None, 5.0]))
    def pause_long_context(self, pause_s: float | None) -> None:
        self.gate.long_context_pause_s = pause_s

    @rule(is_there=st.sampled_from([True, True, False]))
    def lose_or_find_the_engine(self, is_there: bool) -> None:
        self.gate.capacity = CAPACITY if is_there else None

    @precondition(lambda self: self.num_asked > 10)
    @rule()
    def drain(self) -> None:
        self.is_draining = True
        self.gate.drain(self.now_s + 10.0)

    # ------------------------------------------------------------------------------------------------- checks

    def counts(self) -> tuple[int, int]:
        return self.gate.num_live, self.gate.num_queued_tokens()

    def most(self) -> int:
        """Places at most: a burst may fill what runs at once, and the waiting room."""
        return max(self.limits.max_num_seqs, self.stats.num_running) + self.limits.max_queued_requests

    def check_places(self, num_before: int, leases: list[Lease], count: int) -> None:
        assert not self.is_draining and self.gate.capacity is not None
        assert len(leases) == count and self.gate.num_live == num_before + count <= self.most()

    def check_refusal(self, error: GuidevaneError, before: tuple[int, int], count: int) -> None:
        """Each refusal has one reason, which is so, and says when to come back if that helps."""
        reason = rejection_reason(error)
        self.refusals[reason] += 1
        assert isinstance(error, InvalidRequest) or (isinstance(error, Refused) and 1 <= error.retry_after_s <= 120)
        least = min(self.limits.max_num_seqs, self.stats.num_running) + self.limits.max_queued_requests
        why = {
            Rejection.DRAINING: self.is_draining,
            Rejection.NOT_READY: self.gate.capacity is None,
            Rejection.VALIDATION: count > self.limits.max_num_seqs + self.limits.max_queued_requests,
            Rejection.QUEUE_FULL: before[0] + count > least,
            Rejection.QUEUED_TOKENS: before[1] > 0,
            Rejection.LONG_CONTEXT: self.gate.long_context_pause_s is not None and before[0] > 0,
            Rejection.CONTEXT_LENGTH: True,
            Rejection.NEVER_FITS: True,
        }
        assert why[reason], (reason, before, count)

    @invariant()
    def counts_are_those_of_the_leases(self) -> None:
        num_live = sum(len(group.leases) for group in self.groups)
        assert self.counts() == (num_live, sum(sum(g.tokens) for g in self.groups if not g.has_started))

    @invariant()
    def everybody_came_in_or_was_refused_for_one_reason(self) -> None:
        assert self.refusals.total() == self.num_asked - self.num_let_in


TestDoorMachine = DoorMachine.TestCase
TestDoorMachine.settings = size_of(DoorMachine)
