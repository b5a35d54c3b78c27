"""The waiting room: the tenant that was served least is next; inside it, by class, then by place.

A place is a point in time and does not change while a request waits: its deadline, or its arrival and a slack where it
has none, moved by its priority. So the order inside a class is EDF, and a late comer passes those before it only as far
as deadline and priority reach: nobody starves. A preempted request comes back to its own place.
"""

from collections.abc import Callable, Iterator
from itertools import chain, islice, takewhile
from math import inf
from typing import NamedTuple

from guidevane_runtime.core.fair import FairTurns, Flow
from guidevane_runtime.core.grammar import GrammarState
from guidevane_runtime.core.line import Line
from guidevane_runtime.core.messages import Hold, SetTenants
from guidevane_runtime.core.request import Request
from guidevane_runtime.core.rules import Held
from guidevane_runtime.core.tenants import EQUAL_TERMS, RequestClass, TenantPolicy, TenantTerms

SLACK_S = 30.0
"""A request without a deadline stands where one with this much time stands: the default of waitingTimeoutMilliseconds.
"""
AGEING_S = 60.0
"""Head start of one priority level, in seconds: who has waited so much longer goes before the next level. Above the
default waiting timeout, so that in a queue that keeps it levels are strict."""
MAX_HEAD_START_S = 3600.0
"""Priorities are 32-bit numbers; their head start ends here, or the lowest could wait for years."""
LOOK_AHEAD = 64
"""Requests of one class of one tenant that are asked in one search: a step costs the same however many wait."""
MAX_ASKED = 4 * LOOK_AHEAD
"""Requests that are asked in one search in all. Above LOOK_AHEAD, so that one long line hides nobody."""


class Place(NamedTuple):
    """Where a request stands; all but the first only keep the order total."""

    due_s: float
    priority: int
    arrival_s: float
    request_id: str


def due_of(arrival_s: float, deadline_s: float | None, priority: int) -> float:
    """The point in time at which a request stands."""
    due_s = arrival_s + SLACK_S if deadline_s is None else deadline_s
    return due_s + max(-MAX_HEAD_START_S, min(priority * AGEING_S, MAX_HEAD_START_S))


def place_of(request: Request) -> Place:
    submit = request.submit
    due_s = due_of(submit.arrival_s, submit.deadline_s, submit.priority)
    return Place(due_s, submit.priority, submit.arrival_s, submit.request_id)


def deadline_of(request: Request) -> float:
    """Infinity when it has none."""
    return inf if request.submit.deadline_s is None else request.submit.deadline_s


class ClassLane(Flow):
    """Requests of one class of one tenant, in the order of their places."""

    def __init__(self, weight: int) -> None:
        super().__init__(weight)
        self.line = Line(place_of)
        self.is_paused = False

    @property
    def may_be_served(self) -> bool:
        return bool(self.line) and not self.is_paused


class Tenant(Flow):
    """What one tenant has waiting, and which of its requests run."""

    def __init__(self, terms: TenantTerms, policy: TenantPolicy) -> None:
        super().__init__(terms.weight)
        self.lanes = {request_class: ClassLane(policy.share_of(request_class)) for request_class in RequestClass}
        self.turns = FairTurns[ClassLane]()
        self.running: set[str] = set()
        self.max_in_flight = terms.max_in_flight
        self.offline.is_paused = policy.pauses_offline

    @property
    def offline(self) -> ClassLane:
        return self.lanes[RequestClass.OFFLINE]

    @property
    def is_at_cap(self) -> bool:
        return self.max_in_flight is not None and len(self.running) >= self.max_in_flight

    @property
    def may_be_served(self) -> bool:
        """At its cap a tenant counts as one that has nothing waiting: it gathers no credit there. So in a pause."""
        return not self.is_at_cap and any(lane.may_be_served for lane in self.lanes.values())

    def obey(self, terms: TenantTerms, policy: TenantPolicy) -> None:
        self.weight = terms.weight
        self.max_in_flight = terms.max_in_flight
        self.offline.is_paused = policy.pauses_offline
        for request_class, lane in self.lanes.items():
            lane.weight = policy.share_of(request_class)
            self._note_turn(lane)

    def add(self, request: Request) -> None:
        lane = self.lanes[request.submit.request_class]
        lane.line.add(request)
        self._note_turn(lane)

    def remove(self, request: Request) -> None:
        lane = self.lanes[request.submit.request_class]
        lane.line.discard(request)
        self._note_turn(lane)

    def in_turn(self) -> Iterator[Request]:
        """The first of each line, as many as one search asks."""
        for lane in self.turns.in_turn():
            yield from islice(lane.line, LOOK_AHEAD)

    def in_line(self) -> Iterator[Request]:
        for lane in self.turns.in_turn():
            yield from lane.line
        if self.offline.is_paused:
            yield from self.offline.line

    def _note_turn(self, lane: ClassLane) -> None:
        if lane.may_be_served:
            self.turns.enter(lane)
        else:
            self.turns.leave(lane)


class Bill(NamedTuple):
    """What the prompt of one request was charged for; kept until it ends."""

    tenant: Tenant
    lane: ClassLane
    start: int
    """Tokens below it came from the prefix cache."""
    tenant_rate: float
    """Virtual service of one prompt token when it was charged."""
    lane_rate: float


class WaitingQueue:
    """Owns every waiting request, and only those; keeps the books of those that it let go until they end.

    Tenants are remembered for ever: their names come from the server's list of keys, so they are few.
    """

    def __init__(self, policy: TenantPolicy = EQUAL_TERMS) -> None:
        self.policy = policy
        self.epoch = 0
        self._requests: dict[str, Request] = {}
        self._compiling: dict[Request, GrammarState] = {}
        """Of those, the ones without a place in line: their grammar is not ready."""
        self._unstarted = {kind: Line(lambda request: (request.submit.arrival_s,)) for kind in RequestClass}
        """Those that wait for their first step. The preempted are not among them: their client is reading already."""
        self._num_tokens = 0
        self._tenants: dict[str, Tenant] = {}
        self._turns = FairTurns[Tenant]()
        self._bills: dict[str, Bill] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """In no particular order."""
        return iter(self._requests.values())

    @property
    def num_tokens(self) -> int:
        """Tokens that wait to be computed."""
        return self._num_tokens

    @property
    def num_compiling(self) -> int:
        """Of those that wait, the ones whose grammar is not ready."""
        return len(self._compiling)

    def oldest_wait_s(self, request_class: RequestClass, now_s: float) -> float:
        """Of those of a class that wait for their first step, the one that came first; 0 with nobody there."""
        oldest = self._unstarted[request_class].first
        return max(0.0, now_s - oldest.submit.arrival_s) if oldest else 0.0

    def overdue(self, arrived_before_s: float) -> list[Request]:
        """Those that wait for their first step for too long, whatever for."""
        lines = self._unstarted.values()
        return [r for line in lines for r in takewhile(lambda r: r.submit.arrival_s < arrived_before_s, line)]

    def virtual_service(self, tenant: str) -> float:
        """The tenant's counter: price of what it was served over its weight, with what it was lifted by."""
        known = self._tenants.get(tenant)
        return known.counter if known else 0.0

    def set_tenants(self, command: SetTenants) -> bool:
        """Obey newer terms at once. False, and nothing done, when their epoch is not above the present one."""
        if command.epoch <= self.epoch:
            return False
        self.policy, self.epoch = command.policy, command.epoch
        for name, tenant in self._tenants.items():
            tenant.obey(self.policy.terms_of(name), self.policy)
            self._note_turn(tenant)
        return True

    # ------------------------------------------------------------------------------------------ in, first, and out

    def add(self, request: Request) -> None:
        """A newcomer, or one that was running until it was preempted."""
        self._tenant(request.submit.tenant).running.discard(request.request_id)
        self._requests[request.request_id] = request
        if request.first_scheduled_s is None:
            self._unstarted[request.submit.request_class].add(request)
        self._num_tokens += request.num_tokens
        if request.grammar is None or request.grammar.is_ready:
            self._line_up(request)
        else:
            self._compiling[request] = request.grammar

    def remove(self, request: Request) -> None:
        """Its place is gone at once, so the queue never counts the dead."""
        tenant = self._tenant(request.submit.tenant)
        del self._requests[request.request_id]
        self._compiling.pop(request, None)
        self._unstarted[request.submit.request_class].discard(request)
        self._num_tokens -= request.num_tokens
        tenant.remove(request)
        self._note_turn(tenant)

    def line_up_compiled(self) -> dict[Request, str]:
        """Those whose grammar is ready take their places. Those whose grammar never will be are returned, with why."""
        for request, grammar in tuple(self._compiling.items()):
            if grammar.is_ready:
                del self._compiling[request]
                self._line_up(request)
        return {request: grammar.error for request, grammar in self._compiling.items() if grammar.error}

    def in_line(self) -> list[Request]:
        """All that wait, first in turn first as turns stand now; then those of tenants at their cap or in a pause.

        Last come those whose grammar is being compiled.
        """
        in_turn = list(self._turns.in_turn())
        at_cap = [tenant for tenant in self._tenants.values() if tenant not in in_turn]
        lined_up = [request for tenant in (*in_turn, *at_cap) for request in tenant.in_line()]
        return lined_up + list(self._compiling)

    def first(self, is_eligible: Callable[[Request], bool]) -> Request | None:
        """The first in turn that may be looked at now."""
        in_turn = (request for tenant in self._turns.in_turn() for request in tenant.in_turn())
        asked = islice(chain(in_turn, self._paused()), MAX_ASKED)
        return next((request for request in asked if is_eligible(request)), None)

    def is_paused(self, request: Request) -> bool:
        """Whether it stays here because its class is in a pause."""
        is_offline = request.submit.request_class is RequestClass.OFFLINE
        return is_offline and self.policy.pauses_offline and self._num_running > 0

    def _paused(self) -> Iterator[Request]:
        """The first of each tenant's paused line, while nothing runs: an engine that idles protects nobody."""
        if not self.policy.pauses_offline or self._num_running:
            return
        for tenant in sorted(self._tenants.values(), key=lambda tenant: tenant.counter):
            yield from islice(tenant.offline.line, 1)

    @property
    def _num_running(self) -> int:
        return sum(len(tenant.running) for tenant in self._tenants.values())

    def held(self, request: Request) -> Held | None:
        """Own rule: without a grammar no place, in a pause and at its cap no turn.

        So it holds nobody whom first() gives; it is here to be told.
        """
        if request in self._compiling:
            return Held(Hold.GRAMMAR, "the grammar of its output is being compiled")
        if self.is_paused(request):
            return Held(Hold.OFFLINE_PAUSED, "the guard holds offline work back while anything runs")
        tenant = self._tenant(request.submit.tenant)
        if not tenant.is_at_cap:
            return None
        why = "{value} requests of its tenant run, its maxInFlight is {bound}"
        return Held(Hold.TENANT_CAP, why, len(tenant.running), tenant.max_in_flight)

    def enter(self, request: Request) -> None:
        """It is in the books since admit()."""

    # ------------------------------------------------------------------------------------------------- the books

    def admit(self, request: Request) -> None:
        """Let it go to run. Its prompt is paid here, beyond what the prefix cache had, and only once."""
        tenant = self._tenant(request.submit.tenant)
        tenant.running.add(request.request_id)
        self.remove(request)
        if request.request_id not in self._bills:
            self._open_bill(request, tenant)

    def charge_output(self, request: Request) -> None:
        """One token came out."""
        bill = self._bills[request.request_id]
        bill.tenant.charge(self.policy.output_price)
        bill.lane.charge(self.policy.output_price)

    def settle(self, request: Request, *, is_in_flight: bool) -> None:
        """Close the books of a request that ended. What it paid for and never had is paid back.

        While a step computes it, how far it got is not known: it has had what it paid for.
        """
        tenant = self._tenant(request.submit.tenant)
        tenant.running.discard(request.request_id)
        bill = self._bills.pop(request.request_id, None)
        if bill and not is_in_flight:
            num_left = max(0, request.num_prompt_tokens - max(request.num_ever_computed_tokens, bill.start))
            bill.tenant.refund(num_left * bill.tenant_rate)
            bill.lane.refund(num_left * bill.lane_rate)
        self._note_turn(tenant)

    def _line_up(self, request: Request) -> None:
        tenant = self._tenant(request.submit.tenant)
        tenant.add(request)
        self._note_turn(tenant)

    def _open_bill(self, request: Request, tenant: Tenant) -> None:
        lane, price = tenant.lanes[request.submit.request_class], self.policy.input_price
        start = request.num_computed_tokens
        bill = Bill(tenant, lane, start, price / tenant.weight, price / lane.weight)
        self._bills[request.request_id] = bill
        num_tokens = request.num_prompt_tokens - (0 if self.policy.bills_cached_tokens else start)
        tenant.charge(num_tokens * price)
        lane.charge(num_tokens * price)

    def _tenant(self, name: str) -> Tenant:
        if name not in self._tenants:
            self._tenants[name] = Tenant(self.policy.terms_of(name), self.policy)
        return self._tenants[name]

    def _note_turn(self, tenant: Tenant) -> None:
        if tenant.may_be_served:
            self._turns.enter(tenant)
        else:
            self._turns.leave(tenant)
